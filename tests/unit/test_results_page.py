"""docs/results.md and its tables: every number is from a file, and the pages are the ones those files give."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from vllm_eesd.bench.prompts import CHATS, COMPLETIONS, read_prompts, workload_file
from vllm_eesd.bench.vllm_engine import each_limit

REPOSITORY = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)  # dataclasses look their module up
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page_of():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))  # the page's plots are imported when they are drawn
        yield load("pages")


def row(method, batch, **more):
    base = {
        "method": method,
        "batch": batch,
        "tokens_per_s": 111.4,
        "speedup_vs_plain": 1.0,
        "speedup_spread": [1.0, 1.0],
        "acceptance_length": None,
        "acceptance_rate": None,
        "mean_draft_length": None,
        "acceptance_per_position": None,
        "identical": True,
        "model": "a model",
        "dtype": "float32",
        "max_tokens": 77,
        "rounds": 3,
        "hardware": "Some CPU, 2 cores",
        "versions": {"vllm-eesd": "9.9", "vllm": "0.32.0"},
        "git_sha": "abcdef",
        "prompts": "p.jsonl",
        "num_prompts": 6,
        "refilled": True,
        "policy": "goodput",
        "head": None,
        "temperature": 0.0,
    }
    return base | more


@pytest.fixture
def results(tmp_path):
    eesd = {
        "speedup_vs_plain": 2.34,
        "speedup_spread": [2.0, 3.0],
        "speedup_interval": [2.21, 2.56],
        "acceptance_length": 3.21,
        "acceptance_rate": 0.66,
        "mean_draft_length": 4.5,
        "ngram_share": 0.25,
        "looping_share": 0.13,
        "acceptance_per_position": [0.9, 0.5],
    }
    rows = [row("plain", 1), row("eesd", 1, **eesd), row("plain", 8), row("eesd", 8, identical=False)]
    rows[-1] |= {"speedup_vs_plain": None, "speedup_spread": None}
    (tmp_path / "latency-easy_text.json").write_text(json.dumps(rows))
    pieces = {"model forward": 3.0, "draft forward": 0.0, "unnamed": 0.125}
    plain = {"step_ms": 3.125, "pieces": pieces, "explained": 0.96, "tokens": 2}
    drafting = plain | {"step_ms": 6.5, "pieces": pieces | {"draft forward": 1.5}, "explained": 0.98, "tokens": 6.5}
    more = {"measured_speedup": 1.5625, "ideal_speedup": 2.1964, "efficiency": 0.7115, "prompts": 5, "tokens": 44}
    more |= {"draft_step_ratio": 0.91, "overhead_ratio": 1.24, "idle_ratio": 1.017}
    more |= {"waterfall": [["plain step", 3.125], ["draft forward", 1.5], ["forward of the drafts", 1.875]]}
    (tmp_path / "waterfall.json").write_text(json.dumps([row("", 2) | {"plain": plain, "eesd": drafting} | more]))
    peers = {"plain": {}, "suffix": {"left_out": "not built"}}
    peers |= {"eagle": {"tokens": 7_500_000, "lr_factor": 2.0, "minutes_together": 41.7}}
    (tmp_path / "methods.json").write_text(json.dumps(peers))
    header, figures = "kernel,method,ms,bytes,hardware,versions,git_sha", "fill,ours,0.123,99,GPU,torch=2,fff"
    (tmp_path / "kernels_cpu.csv").write_text(f"{header}\n{figures}\n")
    published = {"method": "M", "target": "T", "workload": "W", "speedup": "up to 9x", "source": "arXiv 1"}
    (tmp_path / "published.json").write_text(json.dumps([published]))
    return tmp_path


def test_the_page_says_what_the_files_say(page_of, results):
    page_of.results(results, results / "results.md")
    text = (results / "tables" / "results.md").read_text()
    assert "| 1 | eesd | 111 | 2.34x (2.21-2.56) | 3.21 | 4.50 | 66% | 25% | 13% | yes |" in text
    assert "| 8 | eesd | 111 | - | - | - | - | - | - | **no** |" in text
    assert "6 prompts, 77 new tokens each, 3 rounds. Some CPU, 2 cores; vllm-eesd 9.9; commit abcdef." in text
    command = "eesd bench latency --model 'a model' --prompts p.jsonl --methods plain,eesd --batch 1,8 --max-tokens 77"
    assert f"{command} --rounds 3 --dtype float32 --policy goodput" in text
    assert "| 2 | 3.12 | 6.50 | 3.25 | 1.56x | 2.20x | 71% | 96% and 98% |" in text
    assert "| draft forward | 0.000 | 1.500 |" in text and "5 held-out prompts, 44 new tokens each" in text
    assert "- `suffix` is left out: not built." in text
    assert "| 2 | 0.91 | 1.24 | 1.017 |" in text
    assert "- `eagle` of the same budget was trained on 7.50 M tokens at a rate of 2 (`eesd" in text
    assert "(`eesd distill` learns at 2), in 42 minutes with the others." in text
    assert "| fill | ours | 0.123 |" in text and "GPU; torch=2; commit fff." in text
    conclusions = (results / "results.md").read_text()
    assert conclusions.index("## Published by others") < conclusions.index("| M | T | W | up to 9x | arXiv 1 |")
    assert "| easy text | 2.34x | - |" in conclusions and "At batch 2 a round takes 6.5 ms" in conclusions


def test_sampled_rows_and_fewer_prompts_at_batch_1_are_said_to_be(page_of, results):
    rows = [row(m, b, temperature=2.0, identical=None) for b in (1, 8) for m in ("plain", "eesd")]
    rows = [r | {"num_prompts": 2, "prompts": "p-2.jsonl"} if r["batch"] == 1 else r for r in rows]
    rows[0]["refilled"] = False  # of an earlier version
    (results / "latency-random_tokens.json").write_text(json.dumps(rows))
    page_of.results(results, results / "results.md")
    text = (results / "tables" / "results.md").read_text()
    told = "Random token ids as prompts. 6 prompts (2 at batch 1), 77 new tokens each at temperature 2, 3 rounds, the"
    assert told in text and "| 8 | eesd | 111 | 1.00x (1.00-1.00) | - | - | - | - | - | - |" in text
    first, second = re.findall(r"^eesd bench latency .*--temperature 2 .*$", text, re.MULTILINE)
    assert "p-2.jsonl" in first and "--batch 1 " in first and "p.jsonl" in second and "--batch 8 " in second


@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_every_workload_that_was_measured_gets_a_panel(page_of, tmp_path, monkeypatch, number):
    names = list(page_of.WORKLOADS)[:number]
    for name in names:
        rows = [row("plain", 1), row("eesd", 1, speedup_vs_plain=2.0, speedup_spread=[1.0, 3.0])]
        (tmp_path / f"latency-{name}.json").write_text(json.dumps(rows))
    import plots

    figures, save = [], plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    page_of.results(tmp_path, tmp_path / "results.md")
    panels = [axes for axes in figures[0].axes if axes.axison]
    assert [axes.get_title() for axes in panels] == [name.replace("_", " ") for name in sorted(names)]
    assert all(axes.patches for axes in panels)
    public, *headings = re.findall(r"^## (.*)$", (tmp_path / "tables" / "results.md").read_text(), re.MULTILINE)
    assert public == "A public chat model"
    assert headings == [name.replace("_", " ").capitalize() for name in sorted(names)]


def test_the_plots_are_pictures_of_the_intervals(page_of, results):
    from matplotlib.image import imread

    page_of.results(results, results / "results.md")
    for name in re.findall(r"\((results-.*?\.png)\)", (results / "results.md").read_text()):
        assert len({tuple(pixel) for pixel in imread(results / name)[::5, ::5].reshape(-1, 4).tolist()}) > 3
    before = (results / "results-speedup.png").read_bytes()
    rows = json.loads((results / "latency-easy_text.json").read_text())
    rows[1]["speedup_interval"] = [1.5, 2.56]
    (results / "latency-easy_text.json").write_text(json.dumps(rows))
    page_of.results(results, results / "results.md")
    assert (results / "results-speedup.png").read_bytes() != before


def test_the_committed_page_is_the_one_its_files_give(page_of, tmp_path):
    page_of.results(page=tmp_path / "results.md")
    for name in ("results.md", "tables/results.md"):
        committed = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == committed, "run python benchmarks/pages.py results"


def test_the_readmes_figures_are_too(page_of):
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert page_of.readme_headline() in readme and page_of.readme_figures() in readme, "run benchmarks/pages.py readme"


def test_enough_is_measured_of_the_public_model(page_of):
    """80 questions at batch 1 in bfloat16, both ways to choose tokens; every workload has prompts enough and a page."""
    measured = load("measure_public")
    for sizes in (*measured.SIZES.values(), *measured.QUICK_SIZES.values()):
        for name, size in sizes.items():
            assert name in page_of.page_public.WORKLOADS and name in CHATS
            assert all(count >= batch for batch, count in size.prompts.items())
            if name != "human_eval":
                assert len(read_prompts(workload_file(name))) >= size.longest()
    for name in ("chat", "human_eval"):
        size = measured.SIZES["bfloat16"][name]
        assert size.prompts[1] >= 80 and 8 in size.prompts and size.samplings == ((0.0, 1.0), (0.7, 0.95))
        assert measured.GREEDY in measured.SIZES["float32"][name].samplings


def test_what_is_measured_exists(page_of, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    measured = load("measure_all")
    for workload, size in measured.WORKLOADS.items():
        assert len(read_prompts(measured.source_of(workload))) >= max(size.prompts.values())
        assert workload in page_of.WORKLOADS and all(count >= batch for batch, count in size.prompts.items())
    files = {Path(measured.source_of(workload)).stem for workload in measured.WORKLOADS}
    assert files == set(COMPLETIONS)
    subprocess.run([*measured.WATERFALL_SCRIPT, "--help"], check=True, stdout=subprocess.DEVNULL)
    # A third of each kind, also of those at batch 1.
    assert all(count % 3 == 0 for count in measured.WORKLOADS["mixed"].prompts.values())


class FakeEngine:
    """Answers every prompt with its own tokens, and says what was asked of it."""

    def __init__(self, asked):
        self._asked = asked

    def generate(self, prompts, max_tokens, at_once=None):
        self._asked.append(each_limit(max_tokens, len(prompts)))
        return [[7] * limit for limit in each_limit(max_tokens, len(prompts))]

    def stream(self, prompts, max_tokens, at_once=None):
        yield [(n, [7] * limit) for n, limit in enumerate(each_limit(max_tokens, len(prompts)))]

    def statistics(self):
        return None

    def at(self, temperature, top_p=1.0):
        self._asked.append(temperature)
        return self

    forget_prefixes = reset_statistics = lambda self: None


def test_one_session_measures_everything_the_page_shows(page_of, tmp_path, monkeypatch):
    """What is missing is named with its reason; engines of a dtype are started once."""
    monkeypatch.chdir(REPOSITORY)
    measured, asked, started = load("measure_all"), [], []

    @contextmanager
    def engines(methods, settings, max_model_len, progress):
        started.append((settings.dtype, methods))
        yield {method: FakeEngine(asked) for method in methods}

    lacking = {"suffix": "not built", "eagle": "not trained"}
    monkeypatch.setattr(measured.EngineSettings, "missing", lambda self, method: lacking.get(method))
    monkeypatch.setattr(measured, "running_engines", engines)
    sizes = {
        measured.HELD_OUT: measured.Size({1: 4, 2: 4, 4: 4}, head_alone=True),
        "random_tokens": measured.Size({1: 1, 2: 2}, max_tokens=5, temperature=2.0),
        measured.HELD_OUT + measured.UP_TO_LOOPS: measured.Size({2: 2}, up_to_loops=True),
        "held_out_code_sampled_bfloat16": measured.Size({2: 2}, temperature=0.8, dtype="bfloat16"),
    }
    assert measured.measure_all(sizes, tmp_path, Console(file=io.StringIO()), lambda text: None) == 0
    methods = ["plain", "eesd", "eesd-head", "ngram"]
    assert started == [("float32", methods), ("bfloat16", methods)]
    rows = json.loads((tmp_path / "latency-held_out_code.json").read_text())
    assert [(r["batch"], r["method"]) for r in rows] == [(batch, method) for batch in (1, 2, 4) for method in methods]
    half = json.loads((tmp_path / "latency-held_out_code_sampled_bfloat16.json").read_text())
    assert {r["dtype"] for r in half} == {"bfloat16"} and {r["dtype"] for r in rows} == {"float32"}
    other = json.loads((tmp_path / "latency-random_tokens.json").read_text())
    assert [(row["method"], row["num_prompts"]) for row in other] == [
        (method, count) for count in (1, 2) for method in ("plain", "eesd", "ngram")
    ]
    assert {(row["temperature"], row["identical"], row["max_tokens"]) for row in other} == {(2.0, None, 5)}
    assert 2.0 in asked and [5] in asked
    short = json.loads((tmp_path / "latency-held_out_code_up_to_loops.json").read_text())
    assert all(row["up_to_loops"] for row in short) and [1, 1] in asked  # all that an engine says here is a loop
    page_of.results(tmp_path, tmp_path / "results.md")
    text = (tmp_path / "tables" / "results.md").read_text()
    assert "- `suffix` is left out: not built." in text and "- `eagle` is left out: not trained." in text
    assert "held_out_code.jsonl --num-prompts 4 --methods plain,eesd,eesd-head,ngram --batch 1,2,4 " in text


def test_prompts_of_earlier_commits_files_are_named_by_their_workload(page_of):
    rows = [row("eesd", 8, prompts="build/bench/held_out_code-32.jsonl")]
    assert " --workload held_out_code --num-prompts 32 --methods eesd " in page_of.FILTERS["latency_commands"](rows)


def test_the_gpu_page_is_what_the_results_say(page_of):
    committed = (REPOSITORY / "docs" / "tables" / "gpu.md").read_text(encoding="utf-8")
    assert page_of.gpu_text() == committed, "run python benchmarks/pages.py gpu"


def test_of_several_gpu_runs_the_last_one_counts_and_shapes_stay_apart(page_of):
    runs = [("8b", "1.5"), ("1b", "9.9"), ("8b", "1.8")]
    rows = [{"shape": shape, "batch": "1", "method": "eesd", "speedup": speedup} for shape, speedup in runs]
    last = page_of.page_gpu.last_runs(rows)
    assert [row["speedup"] for row in last] == ["1.8", "9.9"]
    assert page_of.page_gpu.by_batch(last, "8b") == {"1": {"eesd": rows[2]}}
