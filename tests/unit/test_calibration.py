"""Calibration: counting, smoothing, files."""

import json

import numpy as np
import pytest

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.calibration import EDGES, FILE_NAME, NUM_BINS, Calibration, margin_confidence
from vllm_eesd.policy.costs import WINDOW
from vllm_eesd.policy.source import DRAWN, GREEDY, SHARED_NOISE

#: Five standard errors of a share of 4000 outcomes, and the pull of the pseudo-counts.
TOLERANCE = 0.06


def taught(true_acceptance, rounds=4000, num_drafted=4, seed=0, updates_shared_prior=None, kind=GREEDY):
    """A calibration that saw drafts whose token j with confidence c is accepted with `true_acceptance(c, j)`."""
    generator, calibration, kinds = np.random.default_rng(seed), Calibration(), np.array([kind], dtype=np.int8)
    for _ in range(rounds):
        confidences = np.full((1, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        confidences[0, :num_drafted] = generator.random(num_drafted)
        chance = true_acceptance(confidences[0, :num_drafted], np.arange(num_drafted))
        accepted = np.cumprod(generator.random(num_drafted) < chance).sum()
        calibration.observe(confidences, np.array([num_drafted]), np.array([accepted]), updates_shared_prior, kinds)
    return calibration


def at(calibration, confidence, position=0, kind=GREEDY):
    return calibration.acceptance(np.array([confidence], dtype=np.float32), position, kind)[0]


def test_before_any_outcome_a_confidence_is_believed():
    for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True):
        middle = (low + high) / 2
        assert at(Calibration(), middle) == pytest.approx(middle, abs=1e-6)


def test_overconfidence_is_learned():
    calibration = taught(lambda c, j: c**2)
    for confidence in (0.25, 0.55, 0.85):
        assert at(calibration, confidence) == pytest.approx(confidence**2, abs=TOLERANCE)
    assert calibration.expected_calibration_error() > 0.1
    assert taught(lambda c, j: c).expected_calibration_error() < 0.03


def test_positions_differ():
    calibration = taught(lambda c, j: np.where(j == 1, 0.3, 0.9))
    assert at(calibration, 0.5, 0) == pytest.approx(0.9, abs=TOLERANCE)
    assert at(calibration, 0.5, 1) == pytest.approx(0.3, abs=TOLERANCE)
    assert calibration.exponents[0, 1] > calibration.exponents[0, 0]


@pytest.mark.parametrize("kind", [DRAWN, SHARED_NOISE])
def test_each_kind_of_draft_has_a_table_of_its_own(kind):
    calibration = taught(lambda c, j: 0 * c + 0.6, kind=kind)
    assert at(calibration, 0.35, kind=kind) == pytest.approx(0.6, abs=TOLERANCE)
    assert at(calibration, 0.35) == at(Calibration(), 0.35), "they say nothing of greedy drafts"
    other = DRAWN + SHARED_NOISE - kind
    assert at(calibration, 0.35, kind=other) == at(Calibration(), 0.35, kind=other)
    assert calibration.mean_rate[[GREEDY, kind]] == pytest.approx([0.5, 0.6], abs=TOLERANCE)
    all_three = np.array([0.35, 0.35, 0.35], dtype=np.float32)
    rates = calibration.acceptance(all_three, 0, np.arange(3))
    assert rates.tolist() == [at(calibration, 0.35, kind=each) for each in (GREEDY, DRAWN, SHARED_NOISE)]


def test_before_any_drawn_outcome_greedy_ones_say_what_to_expect():
    calibration = taught(lambda c, j: c**2)
    assert at(calibration, 0.55, kind=DRAWN) == pytest.approx(0.55**2, abs=TOLERANCE)
    assert at(calibration, 0.55, kind=SHARED_NOISE) == pytest.approx(0.55, abs=1e-6), "margins are on another scale"


def test_the_confidence_of_a_margin_is_uniform_where_nothing_is_known():
    """Of many tokens that are equally likely; it grows with the margin, and a lone token's is 1."""
    scores = np.sort(np.random.default_rng(0).gumbel(size=(4000, 500)))
    shares = np.histogram(margin_confidence(scores[:, -1] - scores[:, -2]), bins=5, range=(0, 1))[0] / 4000
    assert shares == pytest.approx(np.full(5, 0.2), abs=0.04)
    assert margin_confidence(np.array([0.0, 1.0, 2.0, np.inf])).tolist() == [0.0, 1 - np.exp(-1), 1 - np.exp(-2), 1.0]


def test_tokens_behind_a_rejection_do_not_count():
    calibration = Calibration()
    confidences = np.full((1, MAX_SPECULATIVE_TOKENS), 0.5, dtype=np.float32)
    calibration.observe(confidences, np.array([5]), np.array([2]))
    state = calibration.state()
    assert [sum(row) for row in state["observed"][:5]] == [1, 1, 1, 0, 0]
    assert [sum(row) for row in state["accepted"][:5]] == [1, 1, 0, 0, 0]


def test_requests_that_do_not_share_teach_nothing():
    calibration = taught(lambda c, j: 0 * c, rounds=200, updates_shared_prior=np.array([False]))
    assert at(calibration, 0.5) == at(Calibration(), 0.5)


def test_an_unknown_confidence_means_the_position():
    calibration = Calibration()
    unknown = np.full((1, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
    for _ in range(50 * WINDOW):
        calibration.observe(unknown, np.array([1]), np.array([1]))
    assert at(calibration, np.nan) > 0.9
    assert at(calibration, 0.15) < 0.5, "outcomes without a confidence say nothing of any confidence"


@pytest.mark.parametrize("kind", [GREEDY, DRAWN, SHARED_NOISE])
def test_what_was_counted_survives_a_file(tmp_path, kind):
    calibration = taught(lambda c, j: c**2, rounds=500, kind=kind)
    (tmp_path / FILE_NAME).write_text(json.dumps(calibration.state()))
    loaded = Calibration.load(tmp_path)
    confidences = np.linspace(0, 1, 30, dtype=np.float32)
    for other in (GREEDY, DRAWN, SHARED_NOISE):
        expected = calibration.acceptance(confidences, 0, other)
        np.testing.assert_allclose(loaded.acceptance(confidences, 0, other), expected)


@pytest.mark.parametrize("unknown", [("drawn", "shared"), ("shared",), ("drawn",)], ids=str)
def test_a_file_that_does_not_know_every_kind_of_draft_is_read(tmp_path, unknown):
    calibration = taught(lambda c, j: c**2, rounds=500)
    old = {name: value for name, value in calibration.state().items() if not name.startswith(unknown)}
    (tmp_path / FILE_NAME).write_text(json.dumps(old))
    loaded = Calibration.load(tmp_path)
    for kind in (GREEDY, DRAWN, SHARED_NOISE):
        assert at(loaded, 0.55, kind=kind) == pytest.approx(at(calibration, 0.55, kind=kind))


def test_a_head_without_a_file_starts_empty(tmp_path):
    assert at(Calibration.load(tmp_path), 0.75) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"edges": [0.5]}, "edges"),
        ({"observed": [[1] * NUM_BINS], "accepted": [[2] * NUM_BINS]}, "0 <= accepted <= observed"),
        ({"observed": [[1, 2]], "accepted": [[1, 2]]}, "positions"),
        ({"drawn_observed": [[1] * NUM_BINS], "drawn_accepted": [[2] * NUM_BINS]}, "drawn_accepted <= drawn_observed"),
        ({"shared_noise_observed": [[1, 2]], "shared_noise_accepted": [[1, 2]]}, "shared_noise_observed"),
        ({"observed": [[float("nan")] * NUM_BINS]}, "accepted"),
        ({"accepted": "x"}, ""),
        ({"accepted": None}, ""),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, named):
    (tmp_path / FILE_NAME).write_text(json.dumps(Calibration().state() | change))
    with pytest.raises(ValueError, match=FILE_NAME) as error:
        Calibration.load(tmp_path)
    assert named in str(error.value) and "\n" not in str(error.value)
