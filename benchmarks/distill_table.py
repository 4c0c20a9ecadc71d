"""Which loss, initialisation and data distil best, at equal steps, as the tables of docs/tables/distill.md.

    python -P benchmarks/distill_table.py models/eesd-code-10m --exit-layers 2 --train train.bin --held-out held_out.bin

Each run is kept under --work and not repeated; what the target writes itself is written once. Rows are ordered by
tokens per round on the target's own greedy text. With --json, rows of that file which are not measured anew stay. With
--costs the table is ordered by N and says what a draft step costs: the weights it reads, as a share of a forward's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from pathlib import Path

import torch

from vllm_eesd.distill.loading import layer_config, read_config, target_verifier
from vllm_eesd.distill.losses import LOSS_NAMES
from vllm_eesd.distill.run import run
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig
from vllm_eesd.exit_head.shapes import expected_shapes

INITS = ("last", "exit")
# Name -> share of windows the target writes itself, as --self-generate takes it: none, or half of each batch.
SOURCES = {"text": 0, "text + own": 1}


def main() -> None:
    args = read_arguments()
    torch.set_num_threads(args.threads)
    chosen = itertools.product(args.exit_layers, args.losses, args.inits, args.head_types, args.sources)
    rows = [measure(args, *combination) for combination in chosen]
    results = args.json or args.work / "distill_table.json"
    rows = merged(json.loads(results.read_text()) if args.json and results.exists() else [], rows)
    rows.sort(key=lambda row: -row["greedy_tokens_per_round"])
    results.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows, args.model if args.costs else None))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--exit-layers", type=int, nargs="+", required=True)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--held-out", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--windows", type=int, default=512, help="written by the target, where it writes any")
    parser.add_argument("--losses", nargs="+", choices=LOSS_NAMES, default=LOSS_NAMES)
    parser.add_argument("--inits", nargs="+", choices=INITS, default=INITS)
    parser.add_argument("--head-types", nargs="+", default=["transformer"])
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/distill_table"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--costs", action="store_true")
    return parser.parse_args()


def measure(args: argparse.Namespace, exit_layer: int, loss: str, init: str, head_type: str, source: str) -> dict:
    """Return one row; every combination sees the same steps, batches and seed."""
    name = f"{exit_layer}-{loss}-{init}-{head_type}-{'own' if SOURCES[source] else 'text'}"
    directory = args.work / name
    if not (directory / "out.json").exists():
        print(f"== {name}", flush=True)
        windows = args.windows * SOURCES[source]
        directory.mkdir(parents=True, exist_ok=True)
        if windows:
            copy_generated(args.work, directory)
        run(distill_arguments(args, directory, exit_layer, loss, init, head_type, windows))
        if windows:
            copy_generated(directory, args.work)
    record = json.loads((directory / "out.json").read_text())
    before, after = record["before"], record["after"]
    return {
        "exit_layer": exit_layer,
        "loss": loss,
        "init": init,
        "head": head_type,
        "data": source,
        "steps": record["steps"],
        "tokens": record["tokens"],
        "text_agreement": after["text"]["agreement"],
        "text_overlap": after["text"]["overlap"],
        "greedy_agreement": after["greedy"]["agreement"],
        "greedy_tokens_per_round": 1 + after["greedy"]["expected_matches"],
        "untrained_tokens_per_round": 1 + before["greedy"]["expected_matches"],
    }


def copy_generated(source: Path, destination: Path) -> None:
    """Copy what the target wrote, if it is there: it depends on the target and the seed only."""
    for name in ("generated.bin", "generated.json"):
        if (source / name).exists():
            shutil.copy(source / name, destination / name)


def distill_arguments(
    args: argparse.Namespace, directory: Path, exit_layer: int, loss: str, init: str, head_type: str, windows: int
) -> argparse.Namespace:
    given = {"model": args.model, "exit_layer": exit_layer, "data": args.train, "held_out": args.held_out}
    given |= {"output": str(directory / "head"), "work": str(directory), "json": str(directory / "out.json")}
    given |= {"steps": args.steps, "batch": args.batch, "seq_len": args.seq_len, "seed": args.seed, "minutes": None}
    # What is measured must not depend on what was trained on: the target's own greedy text is always measured.
    given |= {"loss": loss, "init": init, "head_type": head_type, "self_generate": windows, "measure_greedy": True}
    given["generator"] = "transformers"
    return argparse.Namespace(**given)


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """Return the new rows and those of the old ones that no new one replaces."""
    fields = ("exit_layer", "head", "loss", "init", "data")
    return list({tuple(row[field] for field in fields): row for row in (*old, *new)}.values())


def markdown(rows: list[dict], model: str | None) -> str:
    """Return the table; with a model, ordered by N and head, with the share of its weights that a draft step reads."""
    head = (
        "| N | head | loss | init | data | agreement (text) | overlap (text) | agreement (greedy) | tokens per round |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    if model is not None:
        lines = [f"{head} draft step / forward |", f"{lines[1]}---|"]
        rows = sorted(rows, key=lambda row: (row["exit_layer"], row["head"]))
    for r in rows:
        named = f"| {r['exit_layer']} | {r['head']} | {r['loss']} | {r['init']} | {r['data']} | "
        measured = (r["text_agreement"], r["text_overlap"], r["greedy_agreement"])
        line = named + " | ".join(f"{m:.3f}" for m in measured) + f" | {r['greedy_tokens_per_round']:.2f} |"
        lines.append(line if model is None else f"{line} {draft_share(model, r['exit_layer'], r['head']):.3f} |")
    return "\n".join(lines)


def draft_share(model: str, exit_layer: int, head_type: str) -> float:
    """Return the weights of a draft step over those of a forward; what deep context adds is not run in a step."""
    target = read_config(model)

    def size(head_type: str) -> int:
        head = ExitHeadConfig(
            exit_layer=exit_layer,
            head_type=head_type,
            verifier=target_verifier(target, model),
            transformer_layer_config=layer_config(target),
        )
        return sum(math.prod(shape) for name, shape in expected_shapes(head).items() if not name.startswith("deep."))

    layer, lm_head = size("transformer"), target.vocab_size * target.hidden_size
    return (exit_layer * layer + size(head_type) + lm_head) / (target.num_hidden_layers * layer + lm_head)


if __name__ == "__main__":
    main()
