"""N-gram continuations: the tokens found, and the chances learned of them, against the slow and obvious way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_eesd.round.ngram import MAX_MATCH, NgramDrafter, NgramRates

LONGEST = 6
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def update(continuations: NgramDrafter, text: list[int], slot: int = 0, shares: bool = True) -> None:
    one = np.array([slot])
    texts = np.array([text], dtype=np.int32)
    continuations.update(one, texts, np.zeros(1, int), np.array([len(text)]), np.array([shares]))


def chances(continuations: NgramDrafter, slot: int = 0) -> list[float]:
    return continuations.chances(np.array([slot]))[0].tolist()


def searched_naively(text: list[int]) -> list[int]:
    """The tokens behind the latest of the longest matches, copied one by one onto the text."""
    for length in range(min(MAX_MATCH, len(text) - 1), 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                copy = list(text)
                for j in range(LONGEST):
                    copy.append(copy[start + length + j])
                return copy[len(text) :]
    return []


@settings(max_examples=300, deadline=None)
@given(text=tokens)
def test_continues_the_latest_of_the_longest_matches(text):
    continuations = NgramDrafter(2, LONGEST)
    update(continuations, text)
    expected = searched_naively(text)
    assert (chances(continuations)[1] > 0) == bool(expected)
    if expected:
        assert continuations.tokens[0].tolist() == expected


@settings(max_examples=100, deadline=None)
@given(text=tokens, steps=st.lists(tokens, max_size=6), shares=st.booleans())
def test_chances_fall_from_one_and_stay_proper(text, steps, shares):
    continuations = NgramDrafter(2, LONGEST)
    for more in [[], *steps]:
        text = text + more
        update(continuations, text, shares=shares)
        shown = chances(continuations)
        assert shown[0] == 1.0 and all(0.0 <= b <= a for a, b in zip(shown, shown[1:], strict=False))
        assert max(shown[1:]) < 1.0


def test_learns_from_every_emitted_token_whoever_drafted_it():
    repeating = [1, 2, 3] * 30
    wandering = [token for new in range(4, 20) for token in (1, 2, 3, new)]
    shown = {}
    for name, text in (("repeating", repeating), ("wandering", wandering)):
        continuations = NgramDrafter(1, LONGEST)
        for end in range(8, len(text) - 1):
            update(continuations, text[:end])
        update(continuations, text[: len(text) - 1])  # behind a match of three tokens
        shown[name] = chances(continuations)[1]
    assert shown["repeating"] > 0.9
    assert shown["wandering"] < 0.5


def test_one_request_teaches_the_others_unless_it_may_not():
    text = [1, 2, 3] * 30
    fresh = NgramDrafter(2, LONGEST)
    update(fresh, text[:9], slot=1)
    for shares in (True, False):
        continuations = NgramDrafter(2, LONGEST)
        for end in range(8, len(text)):
            update(continuations, text[:end], shares=shares)
        update(continuations, text[:9], slot=1)
        learned = chances(continuations, slot=1)[1] - chances(fresh, slot=1)[1]
        assert learned > 0.02 if shares else learned == 0.0
        assert chances(continuations)[1] > chances(fresh, slot=1)[1]  # its own outcomes count for itself


def test_a_new_request_in_a_slot_starts_afresh():
    text = [1, 2, 3] * 30
    continuations = NgramDrafter(2, LONGEST)
    for end in range(8, len(text)):
        update(continuations, text[:end], shares=False)
    continuations.reset(np.array([0]))
    assert chances(continuations)[1:] == [0.0] * LONGEST
    untouched = NgramDrafter(2, LONGEST)
    for other in (continuations, untouched):
        update(other, text[:9])
    assert chances(continuations) == chances(untouched)


def test_a_text_is_searched_no_further_back_than_the_limit():
    continuations = NgramDrafter(1, LONGEST)
    text = [7, 8, 9] + list(range(100, 40000)) + [7, 8]
    update(continuations, text)
    assert chances(continuations)[1] == 0.0


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_too_short_to_repeat_has_no_continuation(length):
    continuations = NgramDrafter(1, LONGEST)
    update(continuations, list(range(length)))
    assert chances(continuations)[1:] == [0.0] * LONGEST


def test_texts_that_repeat_nothing_are_told_from_texts_that_do():
    """Two requests by turns: a chance match in one is no reason to copy, whatever matches are worth in the other."""
    repeating = [1, 2, 3] * 60
    novel = list(range(100, 1900))
    novel[9::10] = [100] * 180  # stood there before, and is followed by something else each time
    continuations = NgramDrafter(2, LONGEST)
    believed = []
    for end in range(8, len(repeating)):
        update(continuations, repeating[:end])
        update(continuations, novel[: 10 * end], slot=1)
        believed.append(chances(continuations, slot=1)[1])
    assert believed[0] > 0.2 and believed[-1] < 0.05
    continuations.reset(np.array([1]))
    update(continuations, novel[: 10 * end], slot=1)
    assert chances(continuations, slot=1)[1] < 0.1  # the next one of its kind need not learn it again
    continuations.reset(np.array([1]))
    update(continuations, [*repeating[:90], 7, 1], slot=1)
    assert chances(continuations, slot=1)[1] > 0.3  # nor has it taught the others


def rates_after(outcomes, rounds=200):
    """Chances of the first tokens where matched lengths are known late; outcomes: {matched: (judged, right)}."""
    rates = NgramRates(2, LONGEST, delayed=True)
    slot, shared = np.array([0]), np.ones(1, dtype=bool)
    for _ in range(rounds):
        for matched, (judged, right) in outcomes.items():
            rates.see(slot, np.array([matched]))
            rates.learn(slot, np.array([matched]), np.array([judged]), np.array([right]), shared)
    shown = {}
    for matched in outcomes:
        rates.see(slot, np.array([matched]))
        shown[matched] = rates.chances(slot)[0]
    return shown


def test_a_match_known_late_may_have_begun_or_ended_since():
    """First tokens have rates of their own, also where nothing matched; the tokens after them those of their match."""
    shown = rates_after({0: (6, 0), 1: (6, 0)})
    assert shown[0][1] < 0.05 and shown[1][1] < 0.05
    shown = rates_after({0: (6, 6)})
    assert shown[0][1] > 0.8 and shown[0][6] > 0.4
    shown = rates_after({1: (6, 0), 8: (6, 6)})
    assert shown[1][1] < 0.05 and shown[8][1] > 0.8
