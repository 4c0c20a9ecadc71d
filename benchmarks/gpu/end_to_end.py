"""End-to-end cost of plain decoding, EESD, n-gram lookup, a draft model and EAGLE on a big target without its weights.

    python benchmarks/gpu/end_to_end.py 8b --csv benchmarks/results/gpu_end_to_end.csv

The target has an 8B (or 1B) model's shape and random weights, so its drafts are worth nothing: acceptance is imposed on
every method by vLLM's `rejection_sample_method="synthetic"`, from the rates below. What is measured is what drafting
and verification cost on this GPU. Engines are alive at once, each in a process of its own, and take turns. Rows are
written after every batch size; at the end gpu_costs_SHAPE.json beside them says what steps cost EESD.
docs/results.md and docs/tables/gpu.md show both (`benchmarks/pages.py gpu results`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_eesd.bench.engines import WORKER_EXTENSION
from vllm_eesd.provenance import provenance

#: Share of rounds in which draft token i was accepted: the embedded model and its former head at batch 1.
RATES = [0.83, 0.68, 0.53, 0.42, 0.34, 0.27, 0.25, 0.19]
#: Tokens an n-gram round emitted there (of 4 drafted), placeholders for failed look-ups included.
NGRAM_LENGTH = 2.92
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Of Llama 3.1 8B and Llama 3.2 1B; `tiny` exercises this script on any machine.
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128),
    "1b": (2048, 8192, 16, 32, 8, 64),
    "160m": (768, 3072, 12, 12, 12, 64),
    "tiny": (64, 128, 4, 2, 1, 32),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
NAMES += ("head_dim",)
#: Shape of the draft model beside each target.
DRAFT_MODEL = {"8b": "1b", "1b": "160m", "tiny": "tiny"}
#: EESD's head: after the first layer, of two, as the embedded model's; auxiliary layers as `eesd distill` chooses them.
EXIT_LAYER, HEAD_LAYERS = 1, 2
METHODS = ("plain", "eesd", "ngram", "draft_model", "eagle")
PEER_DRAFT_LENGTH = 4
PROMPT_TOKENS = 128


def config_directory(shape: str, root: Path, name: str = "", **others: int) -> str:
    """Return a directory that holds a model's config and nothing else.

    Args:
        name: of the directory, the shape's if empty.
        others: of the config, in place of the shape's.
    """
    directory = root / (name or shape)
    directory.mkdir(exist_ok=True)
    config = LLAMA | dict(zip(NAMES, SHAPES[shape], strict=True)) | others
    if shape == "tiny":
        config["vocab_size"] = 512
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def random_head(shape: str, root: Path) -> str:
    """Return the directory of an exit head of random weights for that shape, written there if it is missing."""
    import torch
    from transformers import LlamaConfig

    from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, write_head
    from vllm_eesd.exit_head.shapes import expected_shapes

    directory = root / f"{shape}-head"
    if (directory / "config.json").exists():
        return str(directory)
    target = LlamaConfig.from_pretrained(config_directory(shape, root))
    layers = target.num_hidden_layers
    config = ExitHeadConfig(
        exit_layer=EXIT_LAYER,
        head_type="deep_context",
        head_layers=HEAD_LAYERS,
        aux_layers=sorted({layers * quarter // 4 for quarter in (1, 2, 3)} - {EXIT_LAYER}),
        verifier=Verifier(
            name_or_path=shape,
            architecture="LlamaForCausalLM",
            hidden_size=target.hidden_size,
            num_hidden_layers=layers,
            vocab_size=target.vocab_size,
        ),
        transformer_layer_config=target.to_dict(),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else (torch.randn(size, device=device) * target.initializer_range).bfloat16().cpu()
        for name, size in expected_shapes(config).items()
    }
    write_head(directory, config, tensors)
    return str(directory)


def speculative_config(method: str, shape: str, root: Path) -> dict | None:
    """Return vLLM's `speculative_config` of METHOD or METHOD@K, which drafts up to K tokens.

    EESD drafts with a head of random weights, and without n-gram drafts: text of random weights repeats itself, and the
    rates above are those of a head.
    """
    method, _, longest = method.partition("@")
    if method == "plain":
        return None
    if method == "eesd":
        config = {"method": "eesd", "model": random_head(shape, root)}
        config |= {"num_speculative_tokens": int(longest or len(RATES))}
        return config | {"policy": "goodput", "policy_args": {"ngram": False}}
    imposed, longest = {"rejection_sample_method": "synthetic"}, int(longest or PEER_DRAFT_LENGTH)
    if method == "ngram":
        ngram = {"method": "ngram", "num_speculative_tokens": longest, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return ngram | imposed | {"synthetic_acceptance_length": NGRAM_LENGTH}
    if method == "eagle":
        model = config_directory(shape, root, f"{shape}-eagle", num_hidden_layers=1)
    else:
        model = config_directory(DRAFT_MODEL[shape], root)
    draft = {"method": method, "model": model}
    return draft | imposed | {"num_speculative_tokens": longest, "synthetic_acceptance_rates": RATES[:longest]}


def impose_acceptance_on_eesd() -> None:
    """Give EESD's config the rates; it has no option for that, since no server should."""
    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    build = EESDSpeculativeConfig.build.__func__

    def imposed(cls, *args, **kwargs):
        config = build(cls, *args, **kwargs)
        config.rejection_sample_method = "synthetic"
        config.synthetic_acceptance_rates = RATES[: config.num_speculative_tokens]
        return config

    EESDSpeculativeConfig.build = classmethod(imposed)


def start_engine(shape: str, root: Path, speculative: dict | None, engine: dict) -> Any:
    """Return an LLM in this process: random weights of that shape, and `engine` among its arguments."""
    from vllm import LLM

    return LLM(
        config_directory(shape, root),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        seed=0,
        speculative_config=speculative,
        **engine,
    )


def serve(method: str, shape: str, root: Path, options: argparse.Namespace) -> None:
    """Answer {"batch": B, "max_tokens": T} on stdin with {"seconds": S, "tokens": N} on stdout, until it closes.

    And {"costs": true} with EESD's `CostModel.state`.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    engine = json.loads(options.engine)
    if method.partition("@")[0] == "eesd":
        impose_acceptance_on_eesd()
        engine["worker_extension_cls"] = WORKER_EXTENSION
    llm = start_engine(shape, root, speculative_config(method, shape, root), engine)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    generator = random.Random(0)
    for line in sys.stdin:
        asked = json.loads(line)
        if "costs" in asked:
            print(json.dumps(llm.collective_rpc("eesd_costs")[0]), file=answers, flush=True)
            continue
        prompts = [
            {"prompt_token_ids": [generator.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)]}
            for _ in range(asked["batch"])
        ]
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


def ask(engine: subprocess.Popen, question: dict | None) -> dict:
    if question is not None:
        engine.stdin.write(json.dumps(question) + "\n")
        engine.stdin.flush()
    line = engine.stdout.readline()
    if not line:
        raise RuntimeError(f"{engine.args}: ended with status {engine.wait()}; its log is above")
    return json.loads(line)


def weights_gb(shape: str) -> float:
    """Return what a target's bfloat16 weights take, 1e9 bytes."""
    hidden, intermediate, layers, heads, kv_heads, head_dim = SHAPES[shape]
    layer = 2 * (heads + kv_heads) * head_dim * hidden + 3 * hidden * intermediate
    return 2 * (layers * layer + 2 * hidden * LLAMA["vocab_size"]) / 1e9


def check_memory(shape: str, options: argparse.Namespace) -> None:
    """Refuse before minutes are spent on starting engines that cannot all fit this GPU.

    Raises:
        SystemExit: they do not, with what to do.
    """
    share = json.loads(options.engine).get("gpu_memory_utilization")
    answer = _output("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits").split()
    if share is None or not answer or not answer[0].isdigit():  # some devices share the host's memory and name none
        return
    total = int(answer[0]) * 2**20 / 1e9
    has_draft_model = any(method.startswith("draft_model") for method in options.methods)
    # In addition to the weights: keys and values of 128 requests, activations, CUDA graphs.
    needed = weights_gb(shape) + (weights_gb(DRAFT_MODEL[shape]) if has_draft_model else 0) + 6
    if share * total < needed:
        raise SystemExit(
            f"{shape}: an engine needs about {needed:.0f} GB, gpu_memory_utilization {share} of this GPU is "
            f"{share * total:.0f} GB; measure in pairs: --methods plain,eesd --engine "
            "'{\"gpu_memory_utilization\": 0.45}', then plain and another"
        )


def _output(*command: str) -> str:
    found = shutil.which(command[0])
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() if found else ""


@contextlib.contextmanager
def started_engines(shape: str, options: argparse.Namespace, root: Path) -> Iterator[dict[str, subprocess.Popen]]:
    """Give the process of each method's engine; all are ended at the end.

    They start at the same time where `kv_cache_memory_bytes` is among the engines' arguments, else one after the
    other, because each then measures what memory the GPU has left.
    """
    engines: dict[str, subprocess.Popen] = {}
    together = "kv_cache_memory_bytes" in json.loads(options.engine)
    try:
        for method in options.methods:
            command = [sys.executable, __file__, shape, "--serve", method, "--root", str(root)]
            command += ["--engine", options.engine]
            engines[method] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if not together:
                ask(engines[method], None)
        if together:
            for engine in engines.values():
                ask(engine, None)
        yield engines
    finally:
        for engine in engines.values():
            engine.stdin.close()
        for engine in engines.values():
            engine.wait()


def measure(
    shape: str, engines: dict[str, subprocess.Popen], options: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """Yield, per batch size, one row per method: tokens per second, and the speedup paired by round."""
    for batch in options.batch:
        question = {"batch": batch, "max_tokens": options.max_tokens}
        speeds: dict[str, list[float]] = {method: [] for method in engines}
        for turn in range(options.rounds + 1):
            for method, engine in engines.items():
                answer = ask(engine, question)
                if turn:  # the first turn warms up
                    speeds[method].append(answer["tokens"] / answer["seconds"])
        rows = []
        for method, figures in speeds.items():
            ratios = [own / plain for own, plain in zip(figures, speeds["plain"], strict=True)]
            row = {"shape": shape, "batch": batch, "method": method}
            row |= {"tokens_per_s": round(statistics.median(figures), 1)}
            row |= {"speedup": round(statistics.median(ratios), 3)}
            row |= {"speedup_min": round(min(ratios), 3), "speedup_max": round(max(ratios), 3)}
            rows.append(row | {"acceptance": "imposed", "rounds": options.rounds})
            print(rows[-1], flush=True)
        yield rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", choices=sorted(DRAFT_MODEL), default="8b")
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=list(METHODS), help="METHOD or METHOD@K"
    )
    parser.add_argument("--batch", type=lambda text: [int(b) for b in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default='{"gpu_memory_utilization": 0.18}', help="further arguments of vllm.LLM")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/gpu_end_to_end.csv"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.shape, options.root, options)
        return
    if options.methods[0] != "plain":
        parser.error("--methods must begin with plain, of which the speedups are")
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from harness import append

    check_memory(options.shape, options)
    with tempfile.TemporaryDirectory() as root, started_engines(options.shape, options, Path(root)) as engines:
        for rows in measure(options.shape, engines, options):
            append(options.csv, rows)
        if "eesd" in engines:
            costs = {"shape": options.shape, **provenance(), "costs": ask(engines["eesd"], {"costs": True})}
            path = options.csv.with_name(f"gpu_costs_{options.shape}.json")
            path.write_text(json.dumps(costs) + "\n", encoding="utf-8")
    print(options.csv)


if __name__ == "__main__":
    main()
