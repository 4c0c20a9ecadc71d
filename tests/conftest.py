"""What every test may rely on: the environment of a CPU engine, the `gpu` marker, the embedded model."""

import collections
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the repository root there, where kernels/ would hide Hugging Face's `kernels` package.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPOSITORY]

# vLLM reads these when it is imported; `make test` sets the same, a bare pytest relies on this.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Engine processes must not find the folder kernels/ in place of Hugging Face's `kernels` package.
os.environ.setdefault("PYTHONSAFEPATH", "1")


def pytest_addoption(parser):
    parser.addoption("--fuzz-examples", type=int, default=0, help="inputs per fuzz target; 0: few, the same every time")
    parser.addoption("--report", default=None, help="write counts and the features' outcomes to this JSON file")


def pytest_configure(config):
    config.addinivalue_line("markers", "feature(name, outcome): a row of docs/compatibility.md that this test decides")
    config.addinivalue_line("markers", "fault(kind, number): so many faults are planted; if it passes, survived")
    examples = config.getoption("--fuzz-examples")
    settings.register_profile(
        "fuzz",
        max_examples=examples or 40,
        derandomize=not examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none")
        for item in marked:
            item.add_marker(skip)


#: What `--report` writes: how many inputs were tried and faults planted; test by test, the features they decide.
COUNTS: collections.Counter[str] = collections.Counter()
FEATURES: list[dict] = []


@pytest.fixture(scope="session")
def counts() -> collections.Counter[str]:
    """Counters that end up in the report."""
    return COUNTS


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    for kind, number in (marker.args for marker in item.iter_markers("fault") if report.when == "call"):
        COUNTS[f"faults planted: {kind}"] += number
        COUNTS[f"faults survived: {kind}"] += number * report.passed
    markers = list(item.iter_markers("feature"))
    if markers and (report.when == "call" or report.outcome != "passed" and report.when == "setup"):
        for name, outcome in (marker.args for marker in markers):
            FEATURES.append({"feature": name, "outcome": outcome, "test": item.nodeid, "result": report.outcome})
        write_report(item.config)  # now: whoever ends a long run early keeps what it has seen


def pytest_sessionfinish(session):
    write_report(session.config)


def write_report(config):
    """Bring the file named by `--report` up to date; what this run did not touch stays: it may be run in pieces."""
    if not config.getoption("--report"):
        return
    from vllm_eesd.bench.hardware import hardware, versions

    path = Path(config.getoption("--report"))
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"counts": {}, "features": []}
    decided = {(entry["feature"], entry["test"]): entry for entry in [*old["features"], *FEATURES]}
    content = {
        "hardware": hardware(),
        "versions": versions(),
        "counts": dict(sorted((old["counts"] | COUNTS).items())),
        "features": list(decided.values()),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded target; its exit head is in `eesd/` beneath."""
    directory = REPOSITORY / "models" / "eesd-code-10m"
    for name in ("config.json", "model.safetensors", "eesd/config.json"):
        assert (directory / name).is_file(), f"{directory / name} is missing: check out models/ again"
    return directory
