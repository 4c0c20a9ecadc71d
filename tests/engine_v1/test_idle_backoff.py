"""Rounds whose draft decision is skipped: they must count, and end when anything changes."""

import numpy as np
import pytest

from vllm_eesd.policy import CostModel
from vllm_eesd.policy.goodput import Goodput
from vllm_eesd.round.idle import IdleBackoff

#: Drafts by two layers of a random target are hardly ever accepted: soon nothing is worth drafting.
SPEC = {"method": "eesd", "exit_layer": 2, "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(11)
    return [generator.integers(0, 512, n).tolist() for n in (12, 30, 7)]


@pytest.fixture
def decisions(monkeypatch, step_times):
    """Make a decision as expensive as it can be, and a draft step as ten forwards; list the batch size of every one."""
    step_times(draft_step_ms=20)
    seen, begin = [], Goodput.begin

    def counting(self, slots, limits):
        seen.extend([len(slots)] if len(slots) else [])
        begin(self, slots, limits)

    monkeypatch.setattr(Goodput, "begin", counting)
    monkeypatch.setattr(CostModel, "decision_ms", lambda self, num_reqs: 1e9)
    return seen


def test_the_back_off_ends_when_the_batch_or_the_step_is_another():
    idle = IdleBackoff()
    step = {"request_ids": ["a", "b"], "only_decoded": True}
    others = {"request_ids": ["a", "c"]}, {"request_ids": ["b", "a"]}, {"only_decoded": False}
    assert not idle.goes_on(**step)
    for other in others:
        idle.begin(3, ["a", "b"])
        assert idle.goes_on(**step)
        assert not idle.goes_on(**step | other)
        assert not idle.goes_on(**step)  # once over, it is over
        assert idle.take() == 1 and idle.take() == 0
    idle.begin(2, ["a", "b"])
    assert [idle.goes_on(**step) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_the_same_output_and_every_round_counted(
    engine, greedy, plain_answers, random_target, prompts, decisions, max_num_seqs
):
    (expected,) = plain_answers(random_target, (prompts * 2, 60), max_num_seqs=max_num_seqs)
    with engine(random_target, SPEC, max_num_seqs=max_num_seqs) as llm:
        assert greedy(llm, prompts * 2, max_tokens=60) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["emitted"] == 6 * 59 == stats["rounds"] + stats["accepted"]
    assert stats["draft_length_histogram"][0] <= stats["rounds"] == sum(stats["draft_length_histogram"])
    assert sum(decisions) < 0.7 * stats["rounds"]


def test_requests_that_may_not_draft_are_not_asked(engine, greedy, plain_answers, random_target, prompts, decisions):
    (expected,) = plain_answers(random_target, (prompts, 30))
    with engine(random_target, SPEC) as llm:
        assert greedy(llm, prompts, max_tokens=30, extra_args={"eesd_enabled": False}) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
        assert stats["rounds"] == stats["emitted"] == 3 * 29 and not decisions
        assert greedy(llm, prompts, max_tokens=30) == expected
        assert decisions


def test_recorded_rounds_are_complete(engine, greedy, random_target, prompts, decisions):
    with engine(random_target, SPEC) as llm:
        llm.collective_rpc("eesd_take_rounds")
        greedy(llm, prompts, max_tokens=40)
        (rounds,) = llm.collective_rpc("eesd_take_rounds")
    assert sum(len(a_round["emitted"]) for a_round in rounds) == 3 * 39
