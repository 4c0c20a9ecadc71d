"""The round loop and the request slots, with a draft model that only counts."""

import numpy as np

from vllm_eesd.policy import BetaPosterior, DraftLengthPolicy, build_policy
from vllm_eesd.round.draft import DraftRound, draft_tokens
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.round.slots import PendingDrafts, RequestSlots


class Counting:
    """Drafts the input plus one, and remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def step(self, rows, offset, token_ids):
        self.calls.append((rows.tolist(), offset))
        return token_ids + 1, (0.1 * token_ids).astype(np.float32)


class Scripted(DraftLengthPolicy):
    """A policy that lets slot s draft `lengths[s]` tokens."""

    needs_confidence = True

    def __init__(self, lengths):
        super().__init__(BetaPosterior(len(lengths)), seed=0)
        self.lengths, self.seen = np.array(lengths), []

    def more(self, slots, num_drafted, confidence):
        self.seen.append(None if confidence is None else confidence.tolist())
        return self.lengths[slots] > num_drafted


def run(lengths, limits, slots=None):
    model, policy = Counting(), Scripted(lengths)
    slots = np.arange(len(limits)) if slots is None else np.array(slots)
    round_ = DraftRound(policy, slots, np.array(limits))
    drafts = draft_tokens(round_, model, np.arange(len(limits)) * 100)
    assert round_.lengths.tolist() == list(map(len, drafts))
    return drafts, model, policy


def test_ragged_lengths():
    drafts, model, _ = run(lengths=[3, 0, 1, 2], limits=[8, 8, 8, 8])
    assert drafts == [[1, 2, 3], [], [201], [301, 302]]
    assert model.calls == [([0, 2, 3], 0), ([0, 3], 1), ([0], 2)]


def test_limits_bind_before_the_policy():
    drafts, _, _ = run(lengths=[9, 9, 9], limits=[2, 0, 1])
    assert drafts == [[1, 2], [], [201]]


def test_the_policy_sees_the_slots_not_the_rows():
    drafts, _, _ = run(lengths=[0, 0, 2], limits=[8, 8], slots=[2, 0])
    assert drafts == [[1, 2], []]


def test_a_row_that_stopped_has_no_say_in_the_confidences():
    _, _, policy = run(lengths=[2, 1], limits=[8, 8])
    np.testing.assert_allclose(policy.seen[1], [0.0, 10.0], rtol=1e-6)
    np.testing.assert_allclose(policy.seen[2], [0.1], rtol=1e-6)


def test_rows_with_an_ngram_draft_run_no_draft_step():
    texts = np.array([[5, 6, 7, 5, 0], [1, 2, 3, 4, 0], [8, 9, 8, 9, 8]], dtype=np.int32)
    ngrams, every = NgramDrafter(3, 4), np.arange(3)
    ngrams.update(every, texts, every, np.array([4, 4, 5]), np.ones(3, dtype=bool))

    class TakingNgrams(Scripted):
        def take_ngrams(self, slots, chances, limits):
            return np.where(chances[:, 1] > 0, 4, 0)

    model, policy = Counting(), TakingNgrams([2, 2, 2])
    round_ = DraftRound(policy, every, np.array([8, 8, 3]), ngrams)
    drafts = draft_tokens(round_, model, np.array([0, 100, 200]))
    assert round_.from_ngrams.tolist() == [True, False, True] and round_.lengths.tolist() == [4, 2, 3]
    assert np.isnan(round_.confidences[[0, 2]]).all() and not np.isnan(round_.confidences[1, :2]).any()
    assert drafts == [[6, 7, 5, 6], [101, 102], [9, 8, 9]]
    assert model.calls == [([1], 0), ([1], 1)]


def test_a_row_that_may_not_draft_may_have_an_ngram_draft():
    texts = np.array([[1, 2, 1, 0], [1, 2, 1, 0]], dtype=np.int32)
    ngrams, both = NgramDrafter(2, 4), np.arange(2)
    ngrams.update(both, texts, both, np.array([3, 3]), np.ones(2, dtype=bool))

    class TakingNgrams(Scripted):
        def take_ngrams(self, slots, chances, limits):
            assert limits.tolist() == [3, 2]
            return np.array([4, 0])

    model, policy = Counting(), TakingNgrams([4, 4])
    round_ = DraftRound(policy, both, np.zeros(2, int), ngrams, np.array([3, 2]))
    assert draft_tokens(round_, model, np.array([0, 100])) == [[2, 1, 2], []] and not model.calls
    round_ = DraftRound(policy, both, np.array([0, 1]), ngrams, np.array([3, 2]))
    assert draft_tokens(round_, model, np.array([0, 100])) == [[2, 1, 2], [101]]


def test_any_second_drafter_will_do():
    """One that always proposes the same: what a round wants of it is in `SecondDrafter`."""

    class Same:
        matched, tokens = np.ones(2, dtype=np.int64), np.array([[7, 8, 9], [4, 5, 6]])

        def chances(self, slots):
            return np.tile(np.array([1.0, 0.9, 0.8, 0.7]), (len(slots), 1))

    class TakingTheSecond(Scripted):
        def take_ngrams(self, slots, chances, limits):
            assert chances.shape == (2, 4)
            return np.array([0, 2])

    model = Counting()
    round_ = DraftRound(TakingTheSecond([1, 1]), np.array([1, 0]), np.array([8, 8]), Same())
    assert draft_tokens(round_, model, np.array([100, 0])) == [[101], [7, 8]]
    assert model.calls == [([0], 0)]


def test_the_policy_is_told_of_every_drafted_token():
    """Also of the last one a row may draft: calibration counts it."""
    _, model, policy = run(lengths=[9, 9], limits=[2, 3])
    assert [len(seen or ()) for seen in policy.seen] == [0, 2, 2, 1]
    assert len(model.calls) == 3


def test_nothing_to_draft_runs_nothing():
    drafts, model, _ = run(lengths=[5], limits=[0])
    assert (drafts, model.calls) == ([[]], [])
    assert run(lengths=[], limits=[])[0] == []


def test_no_draft_is_longer_than_its_limit_under_beta_ts():
    policy = build_policy("beta_ts", BetaPosterior(6, 50, 1), 0, {})
    limits = np.array([0, 1, 2, 3, 5, 8])
    for _ in range(50):
        drafts = draft_tokens(DraftRound(policy, np.arange(6), limits), Counting(), np.zeros(6, dtype=np.int64))
        assert all(len(draft) <= limit for draft, limit in zip(drafts, limits, strict=False))
        assert all(drafts[row] for row in range(1, 6))


def test_confidences_stay_with_the_row_that_drafted():
    round_ = DraftRound(Scripted([2, 0, 1]), np.arange(3), np.full(3, 8))
    draft_tokens(round_, Counting(), np.array([1, 2, 3]))
    np.testing.assert_allclose(round_.confidences[:, :2], [[0.1, 0.2], [np.nan] * 2, [0.3, np.nan]], rtol=1e-6)


def test_a_driver_may_run_a_step_ahead_of_what_it_tells():
    """Model Runner V2's: rows that go on are known one step late, lengths come out the same."""
    round_ = DraftRound(Scripted([3, 0, 1, 2]), np.arange(4), np.full(4, 8))
    assert round_.rows.tolist() == [0, 2, 3] and round_.lengths.tolist() == [1, 0, 1, 1]
    steps = 1
    while len(round_.rows):
        steps += 1  # it runs before the confidence of the one before is told
        round_.tell(np.zeros(len(round_.rows), dtype=np.float32))
    assert steps == 4 and round_.lengths.tolist() == [3, 0, 1, 2]


def test_a_pending_draft_is_kept_by_slot_until_it_is_cleared():
    pending = PendingDrafts(4)
    round_ = DraftRound(Scripted([0, 2, 0, 1]), np.array([3, 1]), np.full(2, 8))
    draft_tokens(round_, Counting(), np.array([4, 6]))
    pending.keep(round_, round_.confidences)
    assert pending.lengths.tolist() == [0, 2, 0, 1]
    np.testing.assert_allclose(pending.confidences[3, :2], [0.4, np.nan], rtol=1e-6)
    pending.clear(1)
    assert pending.lengths.tolist() == [0, 0, 0, 1] and np.isnan(pending.confidences[1]).all()
    pending.clear()
    assert not pending.lengths.any()


def test_slots_stay_with_their_request_and_are_reused():
    slots = RequestSlots(3)
    first, new = slots.assign(["a", "b"])
    assert new.all() and len(set(first)) == 2
    again, new = slots.assign(["b", "a"])
    assert not new.any() and again.tolist() == first[::-1].tolist()
    slots.release(["a", "unknown"])
    assert len(slots) == 1
    third, new = slots.assign(["b", "c", "d"])
    assert new.tolist() == [False, True, True] and len(set(third)) == 3


def test_slots_do_not_grow_with_the_requests_served():
    """A preempted request does not announce its end: its slot goes to one that runs."""
    slots = RequestSlots(4)
    for number in range(1000):
        assigned, new = slots.assign([f"request-{number}-{i}" for i in range(4)])
        assert new.all() and sorted(assigned) == [0, 1, 2, 3]
    assert len(slots) == 4
