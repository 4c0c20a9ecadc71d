"""What docs/tables/gpu.md shows: rows of results in the order and the units of its tables."""

from __future__ import annotations

from typing import Any

from page_filters import Rows
from roofline import GPUS, Roofline, Shape

#: Engines whose output was compared with plain's, and what their gpu_lossless*.json are called.
ENGINES = {
    "as vLLM starts it: compiled, CUDA graphs": "",
    "piecewise graphs": "_piecewise",
    "eager": "_eager",
    "control, compiled": "_control",
    "compiled, CUDA graphs": "_float32",
    "full graphs of decode batches, not compiled": "_graphs_alone",
}
GPU = GPUS["h200"]
#: Batch sizes whose steps are shown (128 requests share a cell with 148), and a request's tokens meanwhile.
BATCHES, CONTEXT = (1, 8, 32, 34, 64, 71, 128, 148), 192


def last_runs(rows: Rows) -> Rows:
    """Return the rows of gpu_end_to_end.csv, to which every run appends, of the last run of each."""
    return list({(row["shape"], row["batch"], row["method"]): row for row in rows}.values())


def by_batch(rows: Rows, shape: str) -> dict[str, dict[str, Any]]:
    """Return a shape's rows by batch size and method."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["shape"] == shape:
            found.setdefault(row["batch"], {})[row["method"]] = row
    return found


def by_kernel(rows: Rows) -> Rows:
    """Return the rows of kernels_cuda.csv, one for a shape, with our time and the others', us."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        shape = f"{row['vocab_size']} x {row['hidden_size']}".removesuffix(" x 0").removeprefix("0 x ")
        empty = {"kernel": row["kernel"], "shape": shape, "batch": row["batch"], "others": {}}
        shown = found.setdefault((row["kernel"], shape, row["batch"]), empty)
        us = 1e3 * float(row["ms"])
        shown |= {"us": us} if row["method"] == "ours" else {"others": shown["others"] | {row["method"]: us}}
    return list(found.values())


def steps_of_8b(costs: dict[str, Any]) -> Rows:
    """Return measured times of an 8B shape's steps beside their roofline.

    Args:
        costs: `CostModel.state`.
    """
    head = {"exit_layer": 1, "head_layers": 2, "fill_states": 5}
    roofline = Roofline(Shape.of(32, 4096, 128256), gpu=GPU, context=CONTEXT, **head)
    rows = []
    for size, points in costs["verify_ms"].items():
        for drafts, ms in points if int(size) in BATCHES else ():
            kind, drafts = "verification" if drafts else "no drafts", round(drafts)
            rows.append({"kind": kind, "requests": int(size), "drafts": drafts, "ms": ms})
            rows[-1]["roofline"] = roofline.verify_ms(int(size), drafts)
    for size, ms in costs["draft_step_ms"]:
        if size in BATCHES:
            rows.append({"kind": "draft step", "requests": round(size), "drafts": "-", "ms": ms})
            rows[-1]["roofline"] = roofline.draft_step_ms(round(size))
    return sorted(rows, key=lambda row: (row["kind"] == "draft step", row["requests"]))
