"""docs/results.md: every number is from a file, and the page is the one those files give."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page_of():
    return load("results_page")


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
        "policy": "goodput",
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
        "acceptance_per_position": [0.9, 0.5],
    }
    rows = [row("plain", 1), row("eesd", 1, **eesd), row("plain", 8), row("eesd", 8, identical=False)]
    rows[-1] |= {"speedup_vs_plain": None, "speedup_spread": None}
    (tmp_path / "latency-easy_text.json").write_text(json.dumps(rows))
    arriving = {"rate": 2.0, "requests": 9, "seed": 4, "latency_s": 1.5, "latency_p95_s": 2.25, "first_token_s": 0.125}
    arriving |= {"ms_per_token": 8.5, "latency_ratio": 1.75, "latency_ratio_interval": [1.5, 2.0]}
    (tmp_path / "throughput-easy_text.json").write_text(json.dumps([row("eesd", 1) | arriving]))
    header, figures = "kernel,method,ms,bytes,hardware,versions,git_sha", "fill,ours,0.123,99,GPU,torch=2,fff"
    (tmp_path / "kernels.csv").write_text(f"{header}\n{figures}\n")
    published = {"method": "M", "target": "T", "workload": "W", "speedup": "up to 9x", "source": "arXiv 1"}
    (tmp_path / "published.json").write_text(json.dumps([published]))
    return tmp_path


def test_the_page_says_what_the_files_say(page_of, results):
    page_of.main(results, results / "results.md")
    text = (results / "results.md").read_text()
    assert "| 1 | eesd | 111 | 2.34x (2.21-2.56) | 3.21 | 4.50 | 66% | yes |" in text
    assert "| 8 | eesd | 111 | - | - | - | - | **no** |" in text
    assert "6 prompts, 77 new tokens each, 3 rounds. Some CPU, 2 cores; vllm-eesd 9.9; commit abcdef." in text
    command = "eesd bench latency --model 'a model' --prompts p.jsonl --methods plain,eesd --batch 1,8 --max-tokens 77"
    assert f"{command} --rounds 3 --dtype float32 --policy goodput" in text
    assert "| 2 | eesd | 111 | 1.50 | 2.25 | 0.125 | 8.50 | 1.75x (1.50-2.00) |" in text
    assert "throughput --model 'a model' --prompts p.jsonl --methods eesd --rate 2 --requests 9" in text
    assert "| fill | ours | 0.123 |" in text and "GPU; torch=2; commit fff." in text
    assert text.index("## Published by others") < text.index("| M | T | W | up to 9x | arXiv 1 |")


def test_the_plots_are_pictures_of_the_intervals(page_of, results):
    from matplotlib.image import imread

    page_of.main(results, results / "results.md")
    for name in re.findall(r"\((results-.*?\.png)\)", (results / "results.md").read_text()):
        assert len({tuple(pixel) for pixel in imread(results / name)[::5, ::5].reshape(-1, 4).tolist()}) > 3
    before = (results / "results-speedup.png").read_bytes()
    rows = json.loads((results / "latency-easy_text.json").read_text())
    rows[1]["speedup_interval"] = [1.5, 2.56]
    (results / "latency-easy_text.json").write_text(json.dumps(rows))
    page_of.main(results, results / "results.md")
    assert (results / "results-speedup.png").read_bytes() != before


def test_the_committed_page_is_the_one_its_files_give(page_of, tmp_path):
    page_of.main(page=tmp_path / "results.md")
    committed = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == committed, "run python benchmarks/results_page.py"


def test_the_readmes_table_is_too():
    assert load("readme_table").figures() in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_what_is_measured_exists():
    measured = load("measure_all")
    for workload in measured.WORKLOADS:
        words = measured.latency(workload, quick=True)
        prompts = REPOSITORY / words[words.index("--prompts") + 1]
        assert len(prompts.read_text(encoding="utf-8").splitlines()) == measured.QUICK[0]
        num_prompts, batches, _ = measured.WORKLOADS[workload]
        assert max(map(int, batches.split(","))) <= num_prompts
    words = measured.throughput(quick=False)
    assert len((REPOSITORY / words[words.index("--prompts") + 1]).read_text(encoding="utf-8").splitlines()) == 16
