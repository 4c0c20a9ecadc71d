"""docs/reliability.md and docs/compatibility.md are what the results in the repository give, and nothing else."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: How a row may end. A "no" is a refusal, in a line that the row's test has read.
OUTCOMES = (
    "the same", "the new weights' answers", "every request served", "starts", "works", "refused", "not in this vLLM",
    "drafted and accepted", "computed anew", "no step has taken it", "a series of each engine", "one of each engine",
)  # fmt: skip


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")  # as running it does
    spec = importlib.util.spec_from_file_location("pages", REPOSITORY / "benchmarks" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def features():
    path = REPOSITORY / "benchmarks" / "results" / "features.json"
    return json.loads(path.read_text(encoding="utf-8"))["features"]


@pytest.mark.parametrize("name", ["reliability", "compatibility"])
def test_the_page_is_what_the_results_give(page, name):
    written = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert written == getattr(page, f"{name}_text")(), "run `make reliability`"
    assert "FAILS" not in written


def test_every_row_was_decided_by_a_test_that_exists(features):
    assert len(features) > 40
    for entry in features:
        file, _, rest = entry["test"].partition("::")
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert rest.partition("[")[0] in functions, entry
        assert entry["result"] in ("passed", "skipped") and entry["outcome"].startswith(OUTCOMES), entry


@pytest.mark.parametrize(
    "results, shown",
    [
        (["passed", "passed"], "the same answers"),
        (["skipped"], "not tested here"),
        (["passed", "failed"], "**FAILS**"),
        (["passed", "skipped"], "the same answers"),
    ],
)
def test_a_row_says_what_its_tests_saw(page, tmp_path, results, shown):
    entries = [
        {"feature": "a feature", "outcome": "the same answers", "test": f"tests/a.py::test[{number}]", "result": result}
        for number, result in enumerate(results)
    ]
    (tmp_path / "features.json").write_text(json.dumps({"counts": {}, "features": entries}))
    assert page.compatibility_text(tmp_path).splitlines()[-1] == f"| a feature | {shown} | `a.py::test` |"


def test_faults_are_shown_by_kind(page, tmp_path):
    counts = {"inputs: trace": 9, "refused: trace": 7, "faults planted: NaN": 4, "faults survived: NaN": 3}
    (tmp_path / "fuzz.json").write_text(json.dumps({"counts": counts, "features": []}))
    lines = page.reliability_text(tmp_path).splitlines()
    assert "| trace | 9 | 7 |" in lines and lines[-1] == "| NaN | 4 | 3 |"
    assert "Not run yet: `make soak`." in lines


def test_pairs_of_options_are_shown_by_outcome(page, tmp_path):
    counts = {"inputs: trace": 9, "pairs: tried": 20, "pairs: wrong": 0, "pairs: same answer": 13}
    (tmp_path / "fuzz.json").write_text(json.dumps({"counts": counts, "features": []}))
    lines = page.reliability_text(tmp_path).splitlines()
    assert {"| tried | 20 |", "| wrong | 0 |", "| same answer | 13 |"} <= set(lines)
    (tmp_path / "fuzz.json").write_text(json.dumps({"counts": {"inputs: trace": 9}, "features": []}))
    assert "| pairs | |" not in page.reliability_text(tmp_path)


GOOD = {
    "minutes": 20,
    "failures": [],
    "idle": {"requests_running": 0.0, "kv_cache_usage": 0.0, "slots": 1, "faults_met": 3},
    "drafter_faults": 3,
    "speculation_off": False,
    "accepted": 9,
    "mib_per_hour": 100.0,
    "plain_mib_per_hour": 90.0,
    "objects_per_hour": 0,
    "worker_killed": {"all_processes_gone": True, "request_in_flight": "status 500"},
}


@pytest.mark.parametrize("wrong, said", [([], "Found wrong: nothing."), (["a", "b"], "Found wrong: a; b.")])
def test_the_page_with_a_soak(page, tmp_path, wrong, said):
    counted = {"clients": 10, "requests": {"greedy": 5, "aborted": 2}, "tokens_compared": 99, "drafted": 12}
    seen = {"hardware": "a machine", "git_sha": "abc", "mismatches_and_errors": 0, "mib": [1, 2, 3], "wrong": wrong}
    (tmp_path / "soak.json").write_text(json.dumps(GOOD | counted | seen))
    text = page.reliability_text(tmp_path)
    assert said in text and "20 minutes, 10 clients, on a machine," in text and "Not run yet: `make soak`" not in text
    assert "| requests | 7 (5 greedy, 2 aborted) |" in text and "status 500, none |" in text


@pytest.mark.parametrize(
    "change, found",
    [
        ({}, ""),
        ({"failures": ["greedy: 'a' is not 'b'"]}, "is not 'b'"),
        ({"idle": GOOD["idle"] | {"kv_cache_usage": 0.1}}, "KV cache"),
        ({"idle": GOOD["idle"] | {"slots": 4}}, "4 request slots"),
        ({"drafter_faults": 4}, "4 faults were counted"),
        ({"speculation_off": True}, "speculation was switched off"),
        ({"accepted": 0}, "nothing was ever drafted"),
        ({"mib_per_hour": 700.0}, "memory rises by 700 MiB"),
        ({"objects_per_hour": 90_000}, "objects rise by 90000"),
        ({"worker_killed": {"all_processes_gone": False, "request_in_flight": "status 500"}}, "did not end cleanly"),
    ],
)
def test_the_soak_finds_what_is_wrong(monkeypatch, change, found):
    monkeypatch.syspath_prepend(str(REPOSITORY / "tests" / "soak"))
    import soak

    wrong = soak.judge(GOOD | change)
    assert len(wrong) == bool(found) and found in "".join(wrong)
