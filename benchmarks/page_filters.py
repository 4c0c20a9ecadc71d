"""What the templates of benchmarks/pages show of rows of results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

#: As the benchmarks write them.
Rows = list[dict[str, Any]]


def show(value: Any, pattern: str = "") -> str:
    """Return a value in a format, a dash for None."""
    return "-" if value is None else format(value, pattern)


def spaced(name: str) -> str:
    return name.replace("_", " ")


def ratio(value: float | None, ends: Sequence[float] | None) -> str:
    """Return "1.62x (1.58-1.66)"."""
    return "-" if value is None else f"{value:.2f}x" + (f" ({ends[0]:.2f}-{ends[1]:.2f})" if ends else "")


def identical(row: dict[str, Any]) -> str:
    """Return whether a row's outputs are plain's; where rounding may change them, how many of its texts are."""
    if row["dtype"] != "float32" and row.get("identical_share") is not None:
        return f"{row['identical_share']:.0%} of the texts"
    return {True: "yes", False: "**no**", None: "-"}[row["identical"]]


def origin(row: dict[str, Any]) -> str:
    """Return on what a row was measured."""
    versions = row["versions"]
    shown = versions if isinstance(versions, str) else ", ".join(f"{n} {v}" for n, v in versions.items() if n != "vllm")
    return f"{row['hardware']}; {shown}; commit {row['git_sha']}."


def count_prompts(rows: Rows) -> str:
    """Return "16 prompts", or "8 prompts (4 at batch 1)" where batch sizes differ in that."""
    count_of = {row["batch"]: row["num_prompts"] for row in rows}
    most = max(count_of.values())
    fewer = ", ".join(f"{count} at batch {batch}" for batch, count in count_of.items() if count < most)
    return f"{most} prompts" + (f" ({fewer})" if fewer else "")


def prompts_chosen(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags that choose a row's prompts; of earlier commits, a file held a workload's first ones."""
    if found := re.fullmatch(r"build/bench/(\w+)-(\d+)\.jsonl", row["prompts"]):
        return "--workload", found[1], "--num-prompts", found[2]
    count = row["num_prompts"]
    few = ("--num-prompts", str(count)) if row.get("out_of", count) != count else ()
    return "--prompts", row["prompts"], *few


def latency_commands(rows: Rows) -> str:
    """Return the `eesd bench latency` that measure these rows: one for each set of methods and file of prompts."""
    what_of: dict[int, tuple[Any, ...]] = {}
    for row in rows:
        what_of[row["batch"]] = (*what_of.get(row["batch"], (prompts_chosen(row),)), row["method"])
    first, lines = rows[0], []
    for what in dict.fromkeys(what_of.values()):
        prompts, *methods = what
        words = ["eesd", "bench", "latency", "--model", first["model"], *prompts]
        words += ["--head", first["head"]] if first["head"] else []
        batches = [str(batch) for batch, some in what_of.items() if some == what]
        words += ["--methods", ",".join(methods), "--batch", ",".join(batches)]
        words += ["--max-tokens", str(first["max_tokens"]), "--rounds", str(first["rounds"]), "--dtype", first["dtype"]]
        words += ["--temperature", f"{first['temperature']:g}"] if first["temperature"] else []
        words += ["--up-to-loops"] if first.get("up_to_loops") else []
        lines.append(shlex.join([*words, "--policy", first["policy"]]))
    return "\n".join(lines)


def batches_of(tables: dict[str, Rows]) -> list[int]:
    """Return every batch size of these tables of rows."""
    return sorted({row["batch"] for rows in tables.values() for row in rows})


def speedup_of(rows: Rows, method: str, batch: int) -> float | None:
    """Return a method's speedup at a batch size; of one measured at several draft lengths, `METHOD@K`, the best."""
    found = [row for row in rows if row["batch"] == batch and row["method"].partition("@")[0] == method]
    return max((row["speedup_vs_plain"] for row in found if row["speedup_vs_plain"]), default=None)


def speedup_cell(rows: Rows, method: str, batch: int) -> str:
    """Return `speedup_of` as "1.62x"."""
    return ratio(speedup_of(rows, method, batch), None)


def by_method(rows: Rows) -> list[dict[str, Any]]:
    """Return, for each workload and batch size, its rows by method; `best_fixed` is the fastest of fixed lengths."""
    tables = []
    for place in dict.fromkeys((row["workload"], row["batch"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["workload"], row["batch"]) == place}
        fixed = [row for method, row in found.items() if method.startswith("fixed")]
        tables.append(found | {"best_fixed": max(fixed, key=lambda row: row["vs_plain"], default=None)})
    return tables


def groupby_in_order(items: Iterable[Any], attribute: str) -> list[tuple[Any, list[Any]]]:
    """Return (value, its items) in the order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(getattr(item, attribute), []).append(item)
    return list(groups.items())


FILTERS = {
    function.__name__: function
    for function in (
        show,
        spaced,
        ratio,
        identical,
        origin,
        count_prompts,
        latency_commands,
        batches_of,
        speedup_cell,
        by_method,
        groupby_in_order,
    )
}
