"""What a draft step costs with one head or another, against the target's own forward: their ratio, head by head.

    python -P benchmarks/bench_draft_step.py --model MODEL --exit-layers 1 2 4 --head-types transformer deep_context
    python -P benchmarks/bench_draft_step.py --random 32000 --exit-layers 2 --draft-vocab 32000 16000 8000 2000

Heads are untrained, which changes no time. The second form writes a random Llama with that vocabulary. Each head is
timed in an engine of its own, compiled, without attention: draft steps and forwards take turns, so that their ratio
means something on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from vllm_eesd.provenance import provenance

BATCHES = (1, 4)
# Passes over all timed calls, after two that warm up.
PASSES, WARM_UP = 200, 2
# A small model whose LM head is most of a draft step, as it is where a large vocabulary meets a shallow draft model.
RANDOM_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model")
    source.add_argument("--random", type=int, metavar="VOCAB", help="a random model with this vocabulary")
    parser.add_argument("--exit-layers", type=int, nargs="+", required=True, metavar="N")
    parser.add_argument("--head-types", nargs="+", default=["transformer"])
    parser.add_argument("--draft-vocab", type=int, nargs="+", default=[0], metavar="V", help="default: all of it")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="rows there that are not measured anew are kept")
    parser.add_argument("--child", metavar="HEAD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(time_steps(args.model, args.child, args.dtype)))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or write_random(Path(directory), args.random)
        wanted = itertools.product(args.exit_layers, args.head_types, args.draft_vocab)
        rows = [measure(model, write_head_like(Path(directory), model, *one), args.dtype) for one in wanted]
    if args.json:
        rows = merged(json.loads(args.json.read_text()) if args.json.exists() else [], rows)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows))
    return 0


def write_random(directory: Path, vocab_size: int) -> str:
    """Write a random target and return its directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = str(directory / "target")
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **RANDOM_SIZES)).save_pretrained(model)
    return model


def write_head_like(directory: Path, model: str, exit_layer: int, head_type: str, size: int) -> Path:
    """Write an untrained head that drafts from `size` random tokens, 0 for all, and return its directory."""
    from vllm_eesd.distill.model import head_config, new_head
    from vllm_eesd.distill.target import load_target
    from vllm_eesd.distill.vocabulary import restrict
    from vllm_eesd.exit_head.checkpoint import Prior, write_head

    target = load_target(model, exit_layer, "cpu")
    head, vocab_size = new_head(target, "last", head_type), target.config.vocab_size
    smaller = size if 0 < size < vocab_size else None
    if smaller:
        torch.manual_seed(0)
        restrict(head, torch.randperm(vocab_size)[:size].sort().values)
    path = directory / f"{exit_layer}-{head_type}-{size}"
    write_head(path, head_config(target, model, head_type, Prior(), smaller), head.state_dict())
    return path


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """Return the new rows and those of the old ones that no new one replaces, in order."""
    fields = ("exit_layer", "head", "draft_vocab_size", "dtype")
    rows = {tuple(row[field] for field in fields): row for row in (*old, *new)}
    return [rows[key] for key in sorted(rows)]


def measure(model: str, head: Path, dtype: str) -> dict:
    config = json.loads((head / "config.json").read_text())
    command = [sys.executable, "-P", __file__, "--model", model, "--exit-layers", str(config["exit_layer"])]
    command += ["--dtype", dtype, "--child", str(head)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment | os.environ, text=True)
    row = {"head": config["head_type"], "exit_layer": config["exit_layer"], "dtype": dtype}
    row["draft_vocab_size"] = config["draft_vocab_size"] or config["speculators_config"]["verifier"]["vocab_size"]
    return row | json.loads(done.stdout.splitlines()[-1]) | provenance()


def time_steps(model: str, head: str, dtype: str) -> dict:
    """Return medians in ms: of draft steps of BATCHES rows, and of the target's forward over as many tokens."""
    from vllm import LLM

    from vllm_eesd.host.v1.cost_profile import draft_call, forward_call

    spec = {"method": "eesd", "model": head, "num_speculative_tokens": 8}
    llm = LLM(model, dtype=dtype, speculative_config=spec, distributed_executor_backend="uni", max_model_len=512,
              skip_tokenizer_init=True, disable_log_stats=True)  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    calls = {f"draft_{n}": draft_call(runner, runner.drafter._step, n) for n in BATCHES}
    calls |= {f"forward_{n}": forward_call(runner, n) for n in BATCHES}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + PASSES):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {f"{name}_ms": round(statistics.median(ms[WARM_UP:]), 4) for name, ms in times.items()}


def markdown(rows: list[dict]) -> str:
    lines = ["| head | N | drafts from | " + " | ".join(f"draft step / forward, {n} rows" for n in BATCHES) + " |"]
    lines.append("|---|---|---|" + "---|" * len(BATCHES))
    for row in rows:
        ratios = (f"{row[f'draft_{n}_ms'] / row[f'forward_{n}_ms']:.3f}" for n in BATCHES)
        lines.append(
            f"| {row['head']} | {row['exit_layer']} | {row['draft_vocab_size']} | " + " | ".join(ratios) + " |"
        )
    return "\n".join([f"{rows[0]['hardware']}, {rows[0]['dtype']}:", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
