"""What is remembered between rounds, without an engine: when a verdict teaches, and whom."""

import numpy as np
import pytest

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.ngram import NgramRates
from vllm_eesd.round.session import Session
from vllm_eesd.round.step import Known, Step

K = 4
DELAYS = pytest.mark.parametrize("delay", [0, 2])


def make_session(delay, ngrams=None):
    return Session(build_policy("fixed", BetaPosterior(3), 0, {}), DraftStats(K), K, delay, ngrams)


def run(session, slots, num_emitted, ngram_counts=(), **step):
    """A step of these slots, and a round after it whose drafts have confidence 0.5; what is known to have grown."""
    slots, emitted = np.array(slots), np.array(num_emitted)
    counts = np.column_stack([emitted, *map(np.array, ngram_counts)])
    judged = Step(slots, emitted > 0, session.drafts.lengths[slots], Known(counts))._replace(**step)
    grown = session.verdict(judged)
    session.begin(slots, np.full(len(slots), K), session.ngrams)
    if session.delay:
        session.end(Known(np.full((len(slots), K), 0.5, dtype=np.float32)))
    else:
        while len(session.round.rows):
            session.round.tell(np.full(len(session.round.rows), 0.5, dtype=np.float32))
        session.end()
    return grown


def successes(session, slot):
    return session.policy.posterior.parameters(np.array([slot]))[0, 0]


@DELAYS
def test_a_verdict_teaches_as_many_steps_later_as_the_delay_says(delay):
    session = make_session(delay)
    session.admit(np.array([1]))
    known = []
    for _ in range(5):
        before = successes(session, 1)
        grown = run(session, [1], [3])
        known.append((grown is not None, successes(session, 1) > before))
    # The first step has no draft to judge.
    read = [number >= delay for number in range(5)]
    assert known == [(is_read, is_read and number > delay) for number, is_read in enumerate(read)]
    assert session.counters.rounds == sum(read)
    assert session.counters.draft_length_histogram == [1, 0, 0, 0, sum(read) - 1]


@DELAYS
def test_what_is_read_late_says_how_much_longer_texts_are(delay):
    session = make_session(delay)
    session.admit(np.array([0, 2]))
    grown = [run(session, [2, 0], [3, 1]) for _ in range(delay + 1)][-1]
    assert (grown.slots.tolist(), grown.num_tokens.tolist()) == ([2, 0], [2, 0])  # beside the one of each step


def test_a_request_that_ended_teaches_nothing_to_the_one_in_its_slot():
    """Neither of the exit head's drafts nor of n-gram drafts: its last verdicts are read when it is gone."""
    session = make_session(2, NgramRates(3, K, delayed=True))
    session.admit(np.array([0]))
    for _ in range(4):
        run(session, [0], [3], ([2], [16]))
    assert session.ngrams.matched[0] == 16
    session.admit(np.array([0]))
    prior, chances = successes(session, 0), session.ngrams.chances(np.array([0])).tolist()
    for _ in range(2):
        assert len(session.learn_oldest().slots) == 0
    assert session.ngrams.matched[0] == 0 and successes(session, 0) == prior
    assert session.ngrams.chances(np.array([0])).tolist() == chances


@DELAYS
def test_drafts_of_which_nobody_knows_what_was_judged_are_counted_and_teach_nothing(delay):
    session = make_session(delay)
    session.admit(np.array([0]))
    prior = successes(session, 0)
    for _ in range(delay + 3):
        run(session, [0], [3], unobserved=np.ones(1, dtype=bool))
    assert successes(session, 0) == prior and session.counters.draft_length_histogram[K] == 2


@DELAYS
def test_made_up_requests_teach_and_count_nothing(delay):
    session = make_session(delay)
    session.admit(np.array([0]))
    prior = successes(session, 0)
    session.verdict(Step(np.array([0]), np.ones(1, dtype=bool), np.array([K]), Known(np.array([[3]]))), learns=False)
    while session.learn_oldest(learns=False) is not None:
        pass
    assert successes(session, 0) == prior and session.counters.rounds == 0


@DELAYS
def test_after_a_fault_no_request_has_a_draft_and_no_verdict_is_awaited(delay):
    session = make_session(delay)
    session.admit(np.array([0]))
    run(session, [0], [1])
    assert session.drafts.lengths[0] == K
    session.start_afresh()
    assert not session.drafts.lengths.any() and session.learn_oldest() is None
