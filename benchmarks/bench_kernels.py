"""Time the kernels against torch, vLLM's own and FlashInfer's: bytes, share of a copy's bandwidth, ratio to each peer.

    python benchmarks/bench_kernels.py                     # this machine's device, every shape
    python benchmarks/bench_kernels.py --quick             # embedded model's shapes and one real one

On a GPU: Triton against torch, vLLM's kernels and FlashInfer, replayed from CUDA graphs. On a CPU: the references
against torch and vLLM's CPU path. Nothing is timed before its result equals the reference's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import kernel_peers
import torch
from harness import append, copy_gb_per_s, measure, rotations, rows
from torch.nn import functional as F
from vllm_eesd.kernels.reference.rejection import rejection as reference

RESULTS = Path(__file__).resolve().parent / "results"
BATCHES = (1, 4, 16, 32, 64, 128, 256)
MODELS = ((32000, 4096), (128256, 4096), (128256, 8192), (151936, 3584))
EMBEDDED = (4096, 192)  # vocabulary and hidden size of the model in models/
NUM_DRAFTS = 4
HEAD_SIZE, NUM_KV_HEADS, BLOCK_SIZE = 128, 8, 16


class Inputs(NamedTuple):
    """One verification batch: every request has NUM_DRAFTS drafts."""

    target_logits: torch.Tensor
    draft_sampled: torch.Tensor
    cu_num_logits: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


def kernel_for(device: str, name: str) -> Callable:
    """Return a kernel, in Triton on a GPU and in plain torch on a CPU."""
    return getattr(import_module(f"vllm_eesd.kernels.{'gpu' if device == 'cuda' else 'reference'}.{name}"), name)


def report(kernel: str, shape: dict, methods: dict[str, Callable], inputs: list, num_bytes: int, options) -> list[dict]:
    times = measure(methods, inputs, options.device, options.rounds)
    found = rows(kernel, shape, times, num_bytes, options.bandwidth, next(iter(methods)))
    for row in found:
        print(
            f"{kernel} {shape} {row['method']}: {row['ms']:.4f} ms, {row['share_of_copy']:.0%} of a copy, "
            f"ours {row['ours_is_faster']:.2f}x"
        )
    return found


def torch_argmax(hidden_states, norm_weight, weight):
    """norm + linear + argmax."""
    return F.linear(F.rms_norm(hidden_states, norm_weight.shape, norm_weight, 1e-6), weight).argmax(-1)


def torch_confidences(hidden_states, norm_weight, weight):
    """norm + linear + maximum + logsumexp, which a compiler fuses."""
    logits = F.linear(F.rms_norm(hidden_states, norm_weight.shape, norm_weight, 1e-6), weight)
    best = logits.max(dim=-1)
    return best.indices, (best.values - logits.logsumexp(dim=-1)).exp()


def bench_exit_head(vocab_size: int, hidden_size: int, batch: int, options) -> list[dict]:
    dtype, device = options.dtype, options.device
    num_bytes = (vocab_size + batch) * hidden_size * dtype.itemsize
    inputs = []
    for _ in range(rotations(num_bytes)):
        hidden_states = torch.randn(batch, hidden_size, device=device, dtype=dtype)
        weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype) * hidden_size**-0.5
        inputs.append((hidden_states, torch.ones(hidden_size, device=device, dtype=dtype), weight))

    kernel = kernel_for(device, "exit_head")

    def ours(hidden_states, norm_weight, weight):
        return kernel(hidden_states, weight, norm_weight=norm_weight)

    check_exit_head(ours(*inputs[0]), inputs[0])
    shape = {"vocab_size": vocab_size, "hidden_size": hidden_size, "batch": batch, "dtype": str(dtype)}
    methods = {
        "ours": ours,
        "torch, no confidences": torch_argmax,
        "linear alone": lambda hidden_states, norm_weight, weight: F.linear(hidden_states, weight),
    }
    if device == "cpu":  # as V1's compiled draft step ends
        methods["compiled torch, confidences"] = torch.compile(torch_confidences, dynamic=True)
    return report("exit_head", shape, methods, inputs, num_bytes, options)


def check_exit_head(ours, inputs) -> None:
    """Fail unless the drafted logits are within rounding of the best and the confidences are those of float32."""
    hidden_states, norm_weight, weight = (tensor.float() for tensor in inputs)
    logits = F.linear(F.rms_norm(hidden_states, norm_weight.shape, norm_weight, 1e-6), weight)
    chosen = logits.gather(1, ours.token_ids[:, None])[:, 0]
    # Two bfloat16 roundings of logits around 4.
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=0, atol=0.07)
    # A probability is off by as much, relatively, as its logit.
    torch.testing.assert_close(ours.top1_prob, logits.softmax(-1).amax(-1), rtol=0.07, atol=0)


def verification(vocab_size: int, batch: int, device: str, dtype: torch.dtype) -> Inputs:
    """Random logits; drafts that are accepted about half of the time when greedy."""
    num_logits = batch * (NUM_DRAFTS + 1)
    target_logits = torch.randn(num_logits, vocab_size, device=device).to(dtype) * 2
    best = target_logits.argmax(-1).roll(1)
    random = torch.randint(0, vocab_size, (num_logits,), device=device)
    return Inputs(
        target_logits,
        torch.where(torch.rand(num_logits, device=device) < 0.5, best, random),
        torch.arange(0, num_logits + 1, NUM_DRAFTS + 1, dtype=torch.int32, device=device),
        torch.arange(num_logits, device=device),
        torch.full((batch,), 0.7, device=device),
        torch.arange(batch, device=device),
    )


def verify(function: Callable, inputs: Inputs, *, sampled: bool):
    temperature = inputs.temperature if sampled else torch.zeros_like(inputs.temperature)
    if inputs.target_logits.is_cuda:
        noise = {"seeds": inputs.seeds, "positions": inputs.positions}
    else:  # the caller's noise is part of the price
        noise = {"uniforms": torch.rand(inputs.target_logits.shape[0], 2)}
    return function(*inputs[:3], NUM_DRAFTS, temperature=temperature, **noise)


def bench_rejection(vocab_size: int, batch: int, options) -> list[dict]:
    device, found = options.device, []
    num_bytes = batch * (NUM_DRAFTS + 1) * vocab_size * options.dtype.itemsize
    sets = [(verification(vocab_size, batch, device, options.dtype),) for _ in range(rotations(num_bytes))]
    shape = {"vocab_size": vocab_size, "hidden_size": 0, "batch": batch, "dtype": str(options.dtype)}
    for way, sampled in (("greedy", False), ("sampled", True)):
        ours = partial(verify, kernel_for(device, "rejection"), sampled=sampled)
        if device == "cuda":
            expected = verify(reference, *sets[0], sampled=sampled)
            assert torch.equal(ours(*sets[0]).sampled, expected.sampled), "rejection differs from its reference"
        methods = {"ours": ours}
        peers = kernel_peers.rejection(device, sampled, NUM_DRAFTS, batch)
        if device == "cpu" and peers:  # what a step pays, around the reference or without it
            methods = {"ours": kernel_peers.eesd_v1(sampled, NUM_DRAFTS, batch), "ours, reference alone": ours}
        found += report(f"rejection {way}", shape, methods | peers, sets, num_bytes, options)
    return found


def bench_kv_fill(batch: int, options) -> list[dict]:
    device, dtype = options.device, options.dtype
    num_bytes = 4 * batch * NUM_KV_HEADS * HEAD_SIZE * dtype.itemsize
    cos_sin_cache = torch.randn(4096, HEAD_SIZE, device=device).to(dtype)
    inputs = []
    for _ in range(rotations(num_bytes)):
        qkv = torch.randn(batch, 6 * NUM_KV_HEADS, HEAD_SIZE, device=device).to(dtype)
        cache = torch.zeros(2, batch + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, device=device, dtype=dtype)
        positions = torch.randint(0, 4096, (batch,), device=device)
        slots = torch.randperm(batch * BLOCK_SIZE, device=device)[:batch]
        key, value = qkv[:, 4 * NUM_KV_HEADS : 5 * NUM_KV_HEADS], qkv[:, 5 * NUM_KV_HEADS :]
        inputs.append((key, value, positions, cos_sin_cache, slots, *cache.unbind(0)))
    methods = {"ours": kernel_for(device, "kv_fill")}
    if device == "cuda":
        methods["torch"] = torch_kv_fill
    shape = {"vocab_size": 0, "hidden_size": NUM_KV_HEADS * HEAD_SIZE, "batch": batch, "dtype": str(dtype)}
    return report("kv_fill", shape, methods, inputs, num_bytes, options)


def torch_kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache):
    """Rope and an indexed write, as a model without a kernel of its own does it; without a look at the slots."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    x, y = key.chunk(2, dim=-1)
    key_cache.flatten(0, 1)[slots] = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)
    value_cache.flatten(0, 1)[slots] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the embedded model's shapes and one real one, B <= 16")
    parser.add_argument("--only", choices=("exit_head", "rejection", "kv_fill"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, default=None, help="default: results/kernels_<device>.csv")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    path = options.csv or RESULTS / f"kernels_{options.device}.csv"
    run(options, path)
    print(path)


def run(options, path: Path) -> None:
    """Measure everything asked for, appending after every shape."""
    torch.manual_seed(0)
    options.bandwidth = copy_gb_per_s(options.device, options.rounds)
    batches = tuple(b for b in BATCHES if b <= 16) if options.quick else BATCHES
    models = (EMBEDDED, *(MODELS[:1] if options.quick else MODELS))
    with torch.inference_mode():
        for vocab_size, hidden_size in models:
            for batch in batches:
                if options.only in (None, "exit_head"):
                    append(path, bench_exit_head(vocab_size, hidden_size, batch, options))
                if options.only in (None, "rejection") and (vocab_size, hidden_size) != MODELS[2]:
                    append(path, bench_rejection(vocab_size, batch, options))
        for batch in batches:
            if options.only in (None, "kv_fill"):
                append(path, bench_kv_fill(batch, options))


if __name__ == "__main__":
    main()
