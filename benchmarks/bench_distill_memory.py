"""Peak memory of `eesd distill` against its bound, for data of growing size: the peak must stay below and not grow.

    python -P benchmarks/bench_distill_memory.py models/eesd-code-10m --exit-layer 2

Every size is distilled for a few steps in a process of its own. The bound is what cannot be done without: the program
with its libraries (as measured), target and head in float32, gradients, optimizer moments, and one batch of
activations and logits. Exit status 1 where a peak is above 1.3 times that.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ALLOWED = 1.3
MIB = 1 << 20
STEPS, BATCH, SEQ_LEN = 3, 8, 256
FLOAT32_BYTES = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--exit-layer", type=int, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 20, 1 << 23, 1 << 26])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(in_this_process(args.model, args.exit_layer, args.child)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for tokens in args.tokens:
            path = Path(directory) / f"{tokens}.bin"
            write_tokens(path, tokens, args.model)
            rows.append({"tokens": tokens} | measure(args.model, args.exit_layer, path))
            path.unlink()
            print(describe(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["peak_bytes"] > ALLOWED * row["bound_bytes"] for row in rows))


def write_tokens(path: Path, count: int, model: str) -> None:
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(0, count, MIB):  # a child's peak starts at its parent's size
            file.write(generator.integers(0, vocab_size, min(count, MIB), dtype=dtype).tobytes())


def measure(model: str, exit_layer: int, path: Path) -> dict[str, int]:
    command = [sys.executable, "-P", __file__, model, "--exit-layer", str(exit_layer), "--child", str(path)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def in_this_process(model: str, exit_layer: int, data: str) -> dict[str, int]:
    """Distill and return {"peak_bytes", "bound_bytes"} and what the bound is made of."""
    import torch

    from vllm_eesd.distill.losses import CHUNK_LOGITS
    from vllm_eesd.distill.model import new_head
    from vllm_eesd.distill.run import run
    from vllm_eesd.distill.target import load_target

    torch.set_num_threads(1)
    libraries = peak_bytes()
    target = load_target(model, exit_layer, "cpu")
    head = new_head(target, "last")
    config = target.config
    weights = sum(p.numel() for p in target.parameters()) * FLOAT32_BYTES
    training = 4 * sum(p.numel() for p in head.parameters()) * FLOAT32_BYTES  # values, gradients, two moments
    tokens = BATCH * SEQ_LEN
    # Kept for the backward pass of one layer: its input, norms, projections and the gated MLP, about this many vectors.
    activations = tokens * (16 * config.hidden_size + 4 * config.intermediate_size) * FLOAT32_BYTES
    # log p, log q, a gradient and a temporary of one chunk of logits.
    logits = 4 * min(CHUNK_LOGITS, tokens * config.vocab_size) * FLOAT32_BYTES
    del target, head
    with tempfile.TemporaryDirectory() as directory:
        run(argparse.Namespace(
            model=model, exit_layer=exit_layer, data=[data], output=f"{directory}/head", steps=STEPS, batch=BATCH,
            seq_len=SEQ_LEN, minutes=None, work=None, json=None,
        ))  # fmt: skip
    parts = {"libraries": libraries, "weights": weights, "training": training, "batch": activations + logits}
    return {"peak_bytes": peak_bytes(), "bound_bytes": sum(parts.values())} | parts


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe(row: dict[str, int]) -> str:
    ratio = row["peak_bytes"] / row["bound_bytes"]
    return (
        f"{row['tokens']:>10} tokens of data: peak {row['peak_bytes'] / MIB:.0f} MiB, bound "
        f"{row['bound_bytes'] / MIB:.0f} MiB, ratio {ratio:.2f} (allowed {ALLOWED})"
    )


if __name__ == "__main__":
    sys.exit(main())
