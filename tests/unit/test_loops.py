"""Which tokens of a text lie in a loop."""

import pytest

from vllm_eesd.bench.loops import LOOP_TOKENS, MAX_PERIOD, in_loops, share_in_loops, tokens_before_loops


@pytest.mark.parametrize("period", [1, 5, MAX_PERIOD])
def test_a_run_that_repeats_what_stood_before_it_is_a_loop(period):
    start = list(range(100, 140))
    looping = start + (list(range(period)) * 50)[: LOOP_TOKENS + period]
    assert in_loops(looping).tolist() == [False] * (40 + period) + [True] * LOOP_TOKENS
    assert not in_loops(looping[:-1]).any()
    assert in_loops([*looping, 999]).tolist() == [*in_loops(looping).tolist(), False]


def test_a_longer_period_and_a_short_text_are_no_loops():
    assert not in_loops(list(range(MAX_PERIOD + 1)) * 10).any()
    assert not in_loops([7] * LOOP_TOKENS).any()
    assert in_loops([7] * (LOOP_TOKENS + 1)).sum() == LOOP_TOKENS
    assert not len(in_loops([]))


def test_a_text_up_to_its_first_loop():
    assert tokens_before_loops([*range(100, 140), *[7] * 40]) == 41  # the first 7 repeats nothing
    assert tokens_before_loops(list(range(50))) == 50
    assert tokens_before_loops([7] * 40) == 1


def test_the_share_is_of_all_tokens():
    assert share_in_loops([[7] * 33, list(range(31))]) == 0.5
    assert share_in_loops([[7] * 20, [7] * 20]) == 0  # each text by itself
    assert share_in_loops([[]]) is None
