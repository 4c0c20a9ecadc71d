"""The cost model: medians, interpolation, and sensible answers before anything is measured."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_eesd.policy.costs import MIN_SAMPLES, WINDOW, CostModel
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.outcome import Learner, StepTimes


def fed(costs, num_reqs=1, plain=4.0, growth=0.5, drafts=(0, 1, 2, 4, 8), times=5):
    for _ in range(times):
        for k in drafts:
            costs.observe_verify(num_reqs, num_reqs + k, plain + growth * k)
    return costs


def test_before_any_measurement_costs_are_relative_to_a_plain_step():
    costs = CostModel(draft_ratio=0.2)
    verify, draft = costs.verify_curve(4, 8), costs.draft_curve(4)
    assert verify[0] == 1.0 and (np.diff(verify) > 0).all()
    assert draft.tolist() == [0.0, 0.2, 0.2, 0.2, 0.2]


def test_the_draft_ratio_bridges_what_was_not_measured():
    costs = fed(CostModel(draft_ratio=0.25))
    assert costs.draft_curve(1)[1] == pytest.approx(1.0)
    costs = CostModel(draft_ratio=0.25)
    for _ in range(MIN_SAMPLES):
        costs.observe_draft_step(1, 1.0)
    assert costs.verify_curve(1, 0)[0] == pytest.approx(4.0)


def test_measured_points_are_met_and_those_between_interpolated():
    costs = fed(CostModel())
    costs.observe_draft_round(1, 0.0)
    np.testing.assert_allclose(costs.verify_curve(1, 12), 4.0 + 0.5 * np.arange(13))


def test_a_drafted_round_costs_its_fixed_part_and_a_plain_one_does_not():
    costs = fed(CostModel())
    for _ in range(MIN_SAMPLES):
        costs.observe_draft_round(1, 0.75)
    np.testing.assert_allclose(costs.verify_curve(1, 2), [4.0, 5.25, 5.75])


def test_a_first_round_that_waits_for_a_compiler_does_not_end_drafting():
    """It would cost more than any draft is worth, and without a draft there is no other time."""
    costs = fed(CostModel(draft_ratio=0.25))
    costs.observe_draft_step(1, 900.0)
    costs.observe_draft_round(1, 100.0)
    costs.observe_decision(1, 5000.0)
    assert costs.draft_curve(1)[1] == pytest.approx(1.0)
    assert (costs.round_ms(1), costs.decision_ms(1)) == (0.0, 0.0)
    for _ in range(MIN_SAMPLES - 1):
        costs.observe_draft_step(1, 0.5)
        costs.observe_draft_round(1, 0.1)
        costs.observe_decision(1, 0.2)
    assert costs.draft_curve(1)[1] == 0.5
    assert (costs.round_ms(1), costs.decision_ms(1)) == (0.1, 0.2)


def test_outliers_do_not_move_a_median():
    """A compilation takes a thousand times a step: less than half of the window may be such."""
    costs = fed(CostModel(), times=WINDOW)
    for _ in range((WINDOW - 1) // 2):
        costs.observe_verify(1, 1, 4000.0)
        costs.observe_verify(1, 3, 4000.0)
    assert costs.verify_curve(1, 2)[0] == pytest.approx(4.0)


def test_drift_is_followed():
    costs = fed(CostModel(), times=WINDOW)
    fed(costs, plain=8.0, times=WINDOW)
    assert costs.verify_curve(1, 0)[0] == pytest.approx(8.0)


def test_curves_ascend_however_noisy_the_times():
    costs, generator = CostModel(), np.random.default_rng(0)
    for _ in range(400):
        k = int(generator.integers(0, 20))
        costs.observe_verify(2, 2 + k, float(5 + 0.1 * k + generator.normal()))
        costs.observe_draft_step(int(generator.integers(1, 9)), float(1 + 0.1 * generator.normal()))
    assert (np.diff(costs.verify_curve(2, 40)) >= -1e-12).all()
    assert (np.diff(costs.draft_curve(16)) >= -1e-12).all()


def test_a_staircase_stays_one():
    """Padded batch sizes: 1-4 extra tokens cost the same, the fifth a whole step more."""
    costs = CostModel()
    for _ in range(5):
        for k in range(9):
            costs.observe_verify(1, 1 + k, 4.0 if k <= 4 else 6.0)
    costs.observe_draft_round(1, 0.0)
    assert costs.verify_curve(1, 8).round(9).tolist() == [4.0] * 5 + [6.0] * 4


def test_growth_is_borrowed_from_the_nearest_batch_size():
    costs = fed(fed(CostModel(), num_reqs=4, plain=4.0, growth=0.5), num_reqs=32, plain=9.0, growth=3.0)
    for _ in range(5):
        costs.observe_verify(5, 5, 4.2)
    curve = costs.verify_curve(5, 2)
    assert curve[2] - curve[1] == pytest.approx(0.5)


def test_plain_steps_are_asked_for_only_where_others_were_timed():
    costs = CostModel()
    assert not costs.lacks_plain(2)
    costs.observe_verify(2, 4, 5.0)
    assert costs.lacks_plain(2)
    fed(costs, num_reqs=2)
    assert not costs.lacks_plain(2)
    for num_reqs, lacks in ((3, False), (4, True)):  # a size near one that is known is inferred
        costs.observe_verify(num_reqs, num_reqs + 1, 5.0)
        assert costs.lacks_plain(num_reqs) == lacks


def test_a_plain_step_of_another_batch_size_grows_as_the_profile_does():
    costs = CostModel()
    costs.start_from([(1, 3.0), (4, 4.0), (8, 6.0)], [(1, 0.6)])
    for size, ms in ((4, 5.0), (8, 7.5)):
        for _ in range(MIN_SAMPLES):
            costs.observe_verify(size, size, ms)
    # What an engine adds to a forward: 1 ms at 4 requests, 1.5 at 8.
    found = [costs.verify_curve(size, 0)[0] for size in (1, 4, 6, 8)]
    np.testing.assert_allclose(found, [4.0, 5.0, 5.0 + 1.25, 7.5])


def test_ranks_that_exchange_their_state_agree():
    ours, theirs = fed(CostModel()), fed(CostModel(), plain=7.0)
    ours.observe_draft_step(1, 0.5)
    theirs.restore(ours.state())
    np.testing.assert_array_equal(theirs.verify_curve(1, 20), ours.verify_curve(1, 20))
    np.testing.assert_array_equal(theirs.draft_curve(3), ours.draft_curve(3))


def test_memory_does_not_grow_with_the_steps():
    costs = CostModel()
    for step in range(20_000):
        costs.observe_verify(1 + step % 300, 1 + step % 300 + step % 2000, 1.0)
    assert sum(len(medians.points) for medians in costs._verify.values()) < 1500


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0, 0.0, 1e12])
def test_times_that_no_clock_shows_teach_nothing(ms):
    costs = CostModel()
    for _ in range(5):
        costs.observe_verify(2, 2, 4.0)
        costs.observe_verify(2, 2, ms)
        costs.observe_draft_step(2, ms)
        costs.observe_draft_round(2, ms)
    assert costs.verify_curve(2, 4)[0] == 4.0
    assert np.isfinite(costs.verify_curve(2, 4)).all() and np.isfinite(costs.draft_curve(4)).all()


def test_a_profile_is_the_truth_until_steps_are_timed():
    costs = CostModel(draft_ratio=0.5)
    costs.start_from([(9, 5.0), (1, 3.0), (2, 4.0)], [(8, 0.8), (1, 0.6)])
    costs.observe_draft_round(1, 0.0)
    np.testing.assert_allclose(costs.verify_curve(1, 8)[[0, 1, 8]], [3.0, 4.0, 5.0])
    np.testing.assert_allclose(costs.verify_curve(2, 7)[[0, 7]], [4.0, 5.0])
    np.testing.assert_allclose(costs.draft_curve(8)[[0, 1, 8]], [0.0, 0.6, 0.8])


def test_a_profile_says_how_measured_steps_grow():
    """An engine step takes more than its forward: the profile's difference is added to what was measured."""
    costs = CostModel()
    costs.start_from([(1, 3.0), (9, 5.0)], [(1, 0.6)])
    costs.observe_draft_round(1, 0.0)
    for _ in range(5):
        costs.observe_verify(1, 1, 10.0)
    np.testing.assert_allclose(costs.verify_curve(1, 8)[[0, 8]], [10.0, 12.0])
    for _ in range(5):
        costs.observe_verify(1, 9, 14.0)
    np.testing.assert_allclose(costs.verify_curve(1, 8)[[0, 8]], [10.0, 14.0])


def test_a_profile_says_what_a_plain_step_takes_while_only_drafted_ones_were_timed():
    costs = CostModel()
    costs.start_from([(1, 3.0), (9, 5.0)], [(1, 0.6)])
    for _ in range(5):
        costs.observe_verify(1, 9, 14.0)
    assert costs.verify_curve(1, 8)[0] == pytest.approx(12.0)


def observed(truth, noise, seed=0, sizes=range(10, 60, 5)):
    """A cost model that saw steps of one batch size at these true times, with noise, and its error in tokens' worth."""
    costs, generator = CostModel(), np.random.default_rng(seed)
    for _ in range(15):
        for size in sizes:
            costs.observe_verify(8, 8 + size, truth(size) * float(np.exp(noise * generator.standard_normal())))
    return np.array([costs.verify_curve(8, 60)[size] - costs.round_ms(8) for size in sizes])


def test_what_a_token_more_costs_is_not_left_to_noise(monkeypatch):
    """Differences of neighbouring medians are mostly noise; leaning on a line halves their error or better."""

    def error():
        found = [np.diff(observed(lambda size: 10 + 0.15 * size, 0.2, seed)) for seed in range(20)]
        return float(np.sqrt(np.mean((np.array(found) - 0.75) ** 2)))

    leaning = error()
    monkeypatch.setattr("vllm_eesd.policy.costs.leaning_on_a_line", lambda sizes, times, errors: times)
    assert leaning < 0.5 * error()


def test_a_staircase_seen_clearly_stays():
    staircase = lambda size: 10.0 if size < 32 else 16.0  # noqa: E731
    sizes = range(10, 60, 10)  # each in a cell of its own
    curve = observed(staircase, 0.01, sizes=sizes)
    assert curve == pytest.approx([staircase(size) for size in sizes], rel=0.03)


def test_a_pause_of_a_minute_is_no_step():
    """While requests wait in a paused engine, or its process is stopped, the clock goes on."""
    costs, counters = CostModel(), DraftStats(4)
    learner = Learner(SimpleNamespace(costs=costs), counters)
    for _ in range(20):
        learner.learn_times(StepTimes(2, 2, 2, 1.0))
        learner.learn_times(StepTimes(2, 4, 4, 1.5))
    speedup, curve = counters.speedup(), costs.verify_curve(2, 2).tolist()
    assert speedup > 1.0
    for num_tokens in (2, 4):
        learner.learn_times(StepTimes(2, num_tokens, num_tokens, 60_000.0))
    assert counters.speedup() == pytest.approx(speedup)
    assert costs.verify_curve(2, 2).tolist() == pytest.approx(curve, rel=0.1)
    learner.learn_times(StepTimes(2, 4, 4, 3.0))  # a slow one is one
    assert counters.speedup() < speedup


def test_pauses_are_not_learned_however_often_they_come():
    """A trainer pauses after each of its steps, and what runs next is always of one kind."""
    costs, counters = CostModel(), DraftStats(4)
    learner = Learner(SimpleNamespace(costs=costs), counters)
    for _ in range(20):
        learner.learn_times(StepTimes(2, 2, 2, 1.0))
    for _ in range(20):
        learner.learn_times(StepTimes(2, 5, 5, 60_000.0))
        learner.learn_times(StepTimes(2, 2, 2, 1.0))
    assert costs.verify_curve(2, 3).max() < 2.0
    assert counters.decode_ms == pytest.approx(40.0, abs=3.0)


def test_a_pause_before_any_step_was_timed():
    """The profile made at the start says what steps take."""
    costs, counters = CostModel(), DraftStats(4)
    costs.start_from([(1, 4.0), (8, 6.0)], [(1, 1.0)])
    learner = Learner(SimpleNamespace(costs=costs), counters)
    learner.learn_times(StepTimes(2, 2, 2, 60_000.0))
    assert counters.decode_ms == 0 and costs.verify_curve(2, 0)[0] < 6.0
    assert not costs.state()["verify_ms"]


def test_steps_that_have_become_long_are_no_pauses():
    costs, counters = CostModel(), DraftStats(4)
    learner = Learner(SimpleNamespace(costs=costs), counters)
    for ms in [1.0] * 20 + [15.0] * 40:
        learner.learn_times(StepTimes(2, 2, 2, ms))
    assert costs.verify_curve(2, 0)[0] == pytest.approx(15.0)
    assert counters.decode_ms > 20 * 15.0


def test_a_plain_step_right_after_a_drafted_one_is_not_taken_for_a_usual_one():
    costs = CostModel()
    learner = Learner(SimpleNamespace(costs=costs), DraftStats(4))
    for num_tokens, ms in [(2, 1.0)] * 4 + [(4, 3.0), (2, 1.5)] * 8 + [(2, 1.0)]:
        learner.learn_times(StepTimes(2, num_tokens, 2, ms))
    assert costs.verify_curve(2, 2).tolist() == [1.0, pytest.approx(2.0), 3.0]
