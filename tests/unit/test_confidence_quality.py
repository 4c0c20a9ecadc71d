"""benchmarks/confidence_quality.py: what is counted, and how well it is foretold."""

import importlib.util
import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("confidence_quality", REPOSITORY / "benchmarks/confidence_quality.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def test_auc_counts_pairs_and_half_the_ties(script):
    foretold = np.array([0.1, 0.4, 0.4, 0.8, 0.3, 0.9, 0.2, 0.4])
    accepted = np.array([0, 1, 0, 1, 0, 1, 1, 1], dtype=bool)
    pairs = [(a > b) + (a == b) / 2 for a, b in product(foretold[accepted], foretold[~accepted])]
    assert script.auc(foretold, accepted) == pytest.approx(np.mean(pairs))
    assert script.auc(foretold, np.ones(8, dtype=bool)) is None


def test_tokens_after_a_rejected_one_are_not_judged(script):
    tokens = script.judged_tokens([[([0.9, 0.8, 0.7, 0.6], 1), ([0.5, 0.4], 2)], [([0.3], 0)]])
    assert tokens["known"][:, 0].tolist() == [0.9, 0.8, 0.5, 0.4, 0.3]
    assert tokens["accepted"].tolist() == [True, False, True, True, False]
    assert tokens["position"].tolist() == [0, 1, 0, 1, 0] and tokens["request"].tolist() == [0, 0, 0, 0, 1]
    means = tokens["known"][:, 1]
    assert means[0] == means[1] != means[2] == means[3]  # one belief a round, moved by the first round's outcome


def test_a_dense_trace_is_walked_in_drafts_of_four(script):
    matches, confidences = np.array([6, 0, 0, 0, 0, 2, 0, 0, 1]), np.arange(9 * 8).reshape(9, 8) / 100
    found = list(script.walked(matches, confidences.astype(np.float64)))
    assert [accepted for _, accepted in found] == [4, 2, 1] and [c[0] for c, _ in found] == [0.0, 0.4, 0.64]
    assert all(len(shown) == 4 for shown, _ in found)


def test_the_shipped_trace_is_foretold_best_by_both(script):
    """Confidence knows the token, the posterior the request; neither all."""
    path = REPOSITORY / "models" / "traces" / "repetitive_code.jsonl.gz"
    rows = {row["forecast"]: row for row in script.quality(script.rounds_of(path))}
    assert rows["position alone"]["brier"] > max(rows[name]["brier"] for name in ("confidence", "posterior"))
    assert rows["both"]["brier"] < min(rows[name]["brier"] for name in ("confidence", "posterior"))
    assert rows["both"]["auc"] > rows["confidence"]["auc"] > rows["posterior"]["auc"] > 0.7


def test_noise_foretells_nothing_on_requests_it_was_not_fitted_to(script):
    rng = np.random.default_rng(0)
    requests = [[(rng.random(4).tolist(), int(rng.integers(0, 5))) for _ in range(60)] for _ in range(40)]
    rows = {row["forecast"]: row for row in script.quality(requests)}
    # The standard error of an AUC of so many pairs of tokens is below 0.01.
    assert abs(rows["confidence"]["auc"] - rows["position alone"]["auc"]) < 0.03


def write_rounds(path):
    one = {"request": "r", "at_s": 0.0, "draft": [1, 2], "confidences": [0.5, 0.25], "copied": False, "accepted": 1}
    one |= {"emitted": [1, 9], "batch": 1, "draft_steps_ms": [1.0], "draft_rest_ms": 1.0, "verify_ms": 1.0}
    one |= {"plain_ms": 1.0, "draft_step_ms": 1.0, "posterior_mean": 0.5, "posterior_interval": [0.1, 0.9]}
    lines = [{"format": "eesd-rounds", "version": 1, "num_speculative_tokens": 4}]
    lines += [one, one | {"request": "s"}, one | {"copied": True}, one | {"confidences": [None, None]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_servers_rounds_are_read_by_request_without_ngram_drafts(script, tmp_path):
    path = write_rounds(tmp_path / "rounds.jsonl")
    assert script.rounds_of(path) == [[([0.5, 0.25], 1)], [([0.5, 0.25], 1)]]


def test_what_cannot_be_judged_is_refused_in_one_line(script, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="requests=1 are too few"):
        script.quality([[([0.5], 1)]])
    empty = tmp_path / "rounds.jsonl"
    empty.write_text('{"format": "eesd-rounds", "version": 1}\n')
    monkeypatch.setattr(sys, "argv", ["confidence_quality.py", str(empty)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("no round has confidences; allowed: traces of a policy that computes them")
