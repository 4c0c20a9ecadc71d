"""What holds for every policy and any feedback."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import outcome

from vllm_eesd.policy import POLICIES, BetaPosterior, build_policy, expected_gain, posterior
from vllm_eesd.round.draft import DraftRound, draft_tokens
from vllm_eesd.round.slots import RequestSlots

NUM_SLOTS, LONGEST = 5, 8
# Examples are seeded by the test's own name: the same ones every time, on every machine.
SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)

#: One round: for every slot the limit, how many drafts are cut before verification, and how many match.
rounds = st.lists(
    st.lists(
        st.tuples(st.integers(0, LONGEST), st.integers(0, 2), st.integers(0, LONGEST), st.booleans()),
        min_size=NUM_SLOTS,
        max_size=NUM_SLOTS,
    ),
    max_size=30,
)
confidence_seeds = st.integers(0, 2**32 - 1)
priors = st.tuples(st.floats(0.01, 100), st.floats(0.01, 100))


class RandomDrafts:
    """Drafts zeros with random confidences, extremes included, or none."""

    def __init__(self, seed, known):
        self._generator, self._known = np.random.default_rng(seed), known

    def step(self, rows, offset, token_ids):
        shown = self._generator.choice([0.0, 1.0, 0.5, self._generator.random()], len(rows)).astype(np.float32)
        return np.zeros(len(rows), dtype=np.int64), shown if self._known else None


def play(policy, script, seed, known=True):
    """Run rounds; return every round's draft lengths."""
    drafts, slots, lengths = RandomDrafts(seed, known), np.arange(NUM_SLOTS), []
    policy.reset(slots)
    for row in script:
        limits, cut, matches, shared = (np.array(column) for column in zip(*row, strict=True))
        round_ = DraftRound(policy, slots, limits)
        drafted = np.array([len(draft) for draft in draft_tokens(round_, drafts, np.zeros(NUM_SLOTS, int))])
        verified = np.maximum(drafted - cut, 0)
        policy.costs.observe_verify(NUM_SLOTS, NUM_SLOTS + int(verified.sum()), 1.0 + 0.01 * verified.sum())
        accepted = np.minimum(matches, verified)
        policy.observe(outcome(slots, verified, accepted, round_.confidences, updates_shared_prior=shared))
        lengths.append(drafted)
        assert (drafted >= 0).all() and (drafted <= limits).all()
        assert_proper(policy.posterior)
    return lengths


def assert_proper(posterior):
    parameters = posterior.parameters(np.arange(NUM_SLOTS))
    assert np.isfinite(parameters).all() and (parameters > 0).all()


@pytest.mark.parametrize("name", POLICIES)
@SETTINGS
@given(script=rounds, seed=confidence_seeds, prior=priors, known=st.booleans())
def test_posteriors_stay_proper_and_lengths_within_limits(name, script, seed, prior, known):
    play(build_policy(name, BetaPosterior(NUM_SLOTS, *prior), 0, {}), script, seed, known)


@pytest.mark.parametrize("name", POLICIES)
@SETTINGS
@given(script=rounds, seed=confidence_seeds)
def test_the_same_seed_decides_the_same(name, script, seed):
    first, second = (play(build_policy(name, BetaPosterior(NUM_SLOTS), 7, {}), script, seed) for _ in range(2))
    assert [lengths.tolist() for lengths in first] == [lengths.tolist() for lengths in second]


#: Arrays over slots that are working memory of the round at hand: `begin` sets them before they are read.
OF_THE_ROUND = {"_beliefs"}


def per_slot_state(policy):
    """Every array over slots that a policy or its posterior holds, but `OF_THE_ROUND`, by name."""
    held = {**vars(policy), **{f"posterior.{name}": value for name, value in vars(policy.posterior).items()}}
    return {
        name: value
        for name, value in held.items()
        if isinstance(value, np.ndarray) and NUM_SLOTS in value.shape and name not in OF_THE_ROUND
    }


@pytest.mark.parametrize("name", POLICIES)
@SETTINGS
@given(script=rounds, seed=confidence_seeds)
def test_a_reused_slot_remembers_nothing_of_its_last_request(name, script, seed):
    policy, fresh = (build_policy(name, BetaPosterior(NUM_SLOTS), 0, {}) for _ in range(2))
    play(policy, script, seed)
    policy.reset(np.array([2]))
    fresh.reset(np.array([2]))
    ours, theirs = per_slot_state(policy), per_slot_state(fresh)
    assert "posterior._counts" in ours
    for key, value in ours.items():
        axis = value.shape.index(NUM_SLOTS)
        np.testing.assert_array_equal(value.take(2, axis), theirs[key].take(2, axis), err_msg=key)


@SETTINGS
@given(script=rounds, seed=confidence_seeds)
def test_requests_that_do_not_share_leave_no_trace(script, seed):
    script = [[(limit, cut, matches, False) for limit, cut, matches, _ in row] for row in script]
    policy = build_policy("goodput", BetaPosterior(NUM_SLOTS, 3, 2), 0, {})
    play(policy, script, seed)
    policy.reset(np.arange(NUM_SLOTS))
    untouched = build_policy("goodput", BetaPosterior(NUM_SLOTS, 3, 2), 0, {})
    np.testing.assert_array_equal(policy.posterior.mean(np.arange(NUM_SLOTS)), untouched.posterior.mean(np.arange(5)))
    assert policy.calibration.state() == untouched.calibration.state()


@SETTINGS
@given(steps=st.lists(st.sets(st.integers(0, 12), max_size=4), max_size=60))
def test_slots_are_distinct_and_kept(steps):
    slots, kept = RequestSlots(4), {}
    for running in steps:
        names = [f"r{number}" for number in sorted(running)]
        assigned, new = slots.assign(names)
        assert len(set(assigned.tolist())) == len(names) and len(slots) <= 4
        for name, slot, is_new in zip(names, assigned.tolist(), new.tolist(), strict=True):
            assert is_new or kept[name] == slot
            kept[name] = slot


def test_nothing_is_compiled_while_requests_wait():
    """Compiled functions are compiled when a policy is built, for the arguments that rounds bring."""
    policy = build_policy("goodput", BetaPosterior(NUM_SLOTS), 0, {})
    gain = expected_gain
    compiled = (gain.begin, gain.survive, gain.rows_to_extend, gain.ngrams_to_take, gain.round_cost)
    compiled += (posterior._learn,)
    before = [len(function.signatures) for function in compiled]
    play(policy, [[(LONGEST, 0, LONGEST, True)] * NUM_SLOTS] * 5, seed=0)
    assert all(before) and [len(function.signatures) for function in compiled] == before
