"""Faults while drafting: greedy output stays plain vLLM's, later rounds draft as before, one line is logged.

The exit head is a clone of the target's last layer: as long as the target's and the exit layer's KV are right, every
draft is accepted. So `accepted == drafted` after a fault is a test of the KV it left behind.
"""

import contextlib
import itertools
import json
import pkgutil
import shutil
from pathlib import Path

import numpy as np
import pytest

from vllm_eesd.host.circuit_breaker import FORGIVEN_AFTER_ROUNDS, MAX_FAULTS, CircuitBreaker
from vllm_eesd.policy import POLICIES

MAX_TOKENS = 40
fault = pytest.mark.fault
#: Where a fault is planted: a function, and the numbers of its calls that raise. Draft steps run several to a round.
PLACES = {
    "vllm_eesd.round.session:Session.verdict": (0, 9),
    "vllm_eesd.round.outcome:Learner.learn_times": (1, 9),
    "vllm_eesd.round.outcome:Learner.report": (1, 9),
    "vllm_eesd.round.requests:RunningRequests.admit": (0,),
    "vllm_eesd.round.requests:RunningRequests.draft_limits": (2, 3),
    "vllm_eesd.host.v1.draft_rows:DraftRows.allocated_tokens": (2, 9),
    "vllm_eesd.host.v1.draft_rows:DraftRows.round": (2, 9),
    "vllm_eesd.host.v1.draft_rows:DraftRows.step": (3, 14),
    "vllm_eesd.host.model.exit_head:ExitHead.forward": (5, 16),
    "vllm_eesd.round.slots:RequestSlots.assign": (0, 2),  # called when the batch changes
    "vllm_eesd.round.draft:DraftRound.__init__": (0, 7),
    "vllm_eesd.round.draft:DraftRound.tell": (4, 15),
    "vllm_eesd.policy:BetaPosterior.observe": (1, 7),
    "vllm_eesd.policy:CostModel.observe_verify": (0, 7),
    "vllm_eesd.round.counters:DraftStats.count_lengths": (8, 30),
}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(11)
    return [generator.integers(0, 512, n).tolist() for n in (40, 7, 90, 1, 64, 23)]


@pytest.fixture(scope="module")
def expected(plain_answers, random_target, prompts):
    return plain_answers(random_target, (prompts, MAX_TOKENS))[0]


@pytest.fixture(scope="module")
def served(engine, random_target, cloned_head, drafter_of, tmp_path_factory, expected):
    """(engine, its drafter, its head's directory, its state file), used by all tests of this module."""
    directory = tmp_path_factory.mktemp("served")
    head = shutil.copytree(cloned_head(random_target, 7, 7), directory / "head")
    (directory / "state").mkdir()
    state_file = directory / "state" / "state.json"
    state_file.write_text("[[[not a state")  # damaged from the start: ignored
    spec = {
        "method": "eesd",
        "model": str(head),
        "num_speculative_tokens": 5,
        "policy": "beta_ts",
        "state_file": str(state_file),
    }
    with engine(random_target, spec) as llm:
        yield llm, drafter_of(llm), Path(head), state_file


@pytest.fixture(autouse=True)
def fresh(request):
    """Every test begins with a closed breaker and zero counters."""
    if "served" in request.fixturenames:
        llm, drafter, *_ = request.getfixturevalue("served")
        drafter.breaker = CircuitBreaker()
        llm.collective_rpc("eesd_reset_stats")


@contextlib.contextmanager
def raising(place, calls, after=False):
    """Make these calls of a function raise, before it does anything or after it did all."""
    name, _, attribute = place.rpartition(".")
    owner, count = pkgutil.resolve_name(name), itertools.count()
    original = owner.__dict__[attribute]

    def faulty(*args, **kwargs):
        fails = next(count) in calls
        if fails and not after:
            raise RuntimeError("injected\nfault")
        result = original(*args, **kwargs)
        if fails:
            raise RuntimeError("injected\nfault")
        return result

    setattr(owner, attribute, faulty)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def stats_of(llm):
    (stats,) = llm.collective_rpc("eesd_stats")
    json.dumps(stats, allow_nan=False)
    return stats


@pytest.mark.feature("a fault while drafting", "the same answers; that round drafts nothing")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=fault("drafting raises somewhere", len(calls))) for place, calls in PLACES.items()],
)
def test_a_fault_anywhere_costs_one_round_of_drafts(served, greedy, prompts, expected, log_lines, place, after):
    llm, drafter, *_ = served
    with raising(place, PLACES[place], after):
        assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected
    assert drafter.breaker.num_faults == len(PLACES[place]), "the planted faults were not met"
    assert stats_of(llm)["drafter_faults"] == len(PLACES[place]) and not stats_of(llm)["speculation_off"]
    assert len(log_lines) == len(PLACES[place]) and all("injected fault" in line for line in log_lines)

    llm.collective_rpc("eesd_reset_stats")
    assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected  # over prefix-cache blocks written through the fault
    stats = stats_of(llm)
    assert stats["accepted"] == stats["drafted"] > 100
    assert len(drafter._slots) <= len(prompts)


@fault("drafting raises until speculation is off", MAX_FAULTS)
def test_repeated_faults_switch_speculation_off(served, greedy, prompts, expected, log_lines):
    llm, drafter, *_ = served
    with raising("vllm_eesd.host.v1.draft_rows:DraftRows.step", range(10**6), after=True):
        assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected
    assert drafter.breaker.num_faults == MAX_FAULTS
    assert ["speculation is off" in line for line in log_lines] == [False] * (MAX_FAULTS - 1) + [True]
    assert not any("\n" in line for line in log_lines)
    llm.collective_rpc("eesd_reset_stats")
    assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected  # the cause is gone, but nobody tries again
    stats = stats_of(llm)
    assert stats["drafted"] == 0 and stats["speculation_off"]
    assert len(drafter._slots) == 0


def test_rare_faults_are_forgiven(log_lines):
    breaker = CircuitBreaker()
    breaker_of_one_rank(breaker, faults=MAX_FAULTS - 1)
    for _ in range(FORGIVEN_AFTER_ROUNDS):
        breaker.passed()
    breaker_of_one_rank(breaker, faults=MAX_FAULTS - 1)
    assert not breaker.is_open
    breaker_of_one_rank(breaker, faults=1)
    assert breaker.is_open and breaker.num_faults == 2 * MAX_FAULTS - 1


def breaker_of_one_rank(breaker, faults, world_size=1):
    from types import SimpleNamespace
    from unittest import mock

    with mock.patch("vllm_eesd.host.circuit_breaker.get_tp_group", lambda: SimpleNamespace(world_size=world_size)):
        for _ in range(faults):
            try:
                raise RuntimeError("injected")
            except RuntimeError as error:
                breaker.fault(error)


@fault("drafting raises on one of several ranks", 1)
def test_one_of_several_ranks_ends_its_process(log_lines):
    """Its peers wait in a collective: going on would pair that with another one."""
    with pytest.raises(SystemExit):
        breaker_of_one_rank(CircuitBreaker(), faults=1, world_size=2)
    assert len(log_lines) == 1 and "one of several ranks" in log_lines[0]


@fault("hidden states are NaN or infinite", 1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["norm", "layer.input_layernorm"])
def test_hidden_states_that_are_not_finite(served, greedy, prompts, expected, log_lines, where, value):
    """Drafts are worthless, under every policy; the posteriors, the calibration and the output are not touched."""
    llm, drafter, *_ = served
    weight = drafter._step._head[0].get_submodule(where).weight.data
    right = weight.clone()
    weight.fill_(value)
    llm.reset_prefix_cache()
    for name in POLICIES:
        llm.collective_rpc("eesd_use_policy", args=(name,))
        assert greedy(llm, prompts[:2], max_tokens=MAX_TOKENS) == expected[:2]
        assert np.isfinite(drafter.policy.posterior.parameters(np.arange(4))).all()
        json.dumps([drafter.policy.posterior.state(), drafter.policy.calibration.state()], allow_nan=False)
    llm.collective_rpc("eesd_use_policy", args=("beta_ts",))
    weight.copy_(right)
    llm.reset_prefix_cache()  # blocks computed with the damaged weights
    # vLLM's CPU attention also multiplies what stands behind a sequence's end, by zero: NaN would stay NaN.
    drafter._step._head[0].layer.self_attn.attn.kv_cache.zero_()
    stats = stats_of(llm)
    assert stats["drafted_not_finite"] > 0 and stats["drafter_faults"] == 0
    assert len(log_lines) == 1 and "not finite" in log_lines[0]


def test_drafts_are_right_again_afterwards(served, greedy, prompts, expected):
    llm, *_ = served
    assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected
    stats = stats_of(llm)
    assert stats["drafted_not_finite"] == 0 and stats["accepted"] == stats["drafted"] > 100


@fault("the clock jumps, back too, or says NaN", 1)
def test_a_clock_that_jumps(served, greedy, prompts, expected, monkeypatch):
    from vllm_eesd.host.v1 import draft_rows
    from vllm_eesd.host.v1 import proposer as v1
    from vllm_eesd.round import outcome

    llm, drafter, *_ = served
    llm.collective_rpc("eesd_use_policy", args=("goodput",))
    generator = np.random.default_rng(1)

    class Clock:
        @staticmethod
        def perf_counter():
            return float(generator.choice([0.0, -1e9, 1e9, 1.0, 1.001, float("nan"), float("inf")]))

    for module in (v1, draft_rows, outcome):
        monkeypatch.setattr(module, "time", Clock)
    assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected
    monkeypatch.undo()
    assert stats_of(llm)["drafter_faults"] == 0
    for num_reqs in (1, 6):
        curve = drafter.policy.costs.verify_curve(num_reqs, 30)
        assert np.isfinite(curve).all() and (np.diff(curve) >= 0).all() and curve[0] > 0
    llm.collective_rpc("eesd_use_policy", args=("beta_ts",))


@fault("the state file is damaged, then its directory gone", 2)
def test_a_state_file_that_can_no_longer_be_written(served, greedy, prompts, expected, log_lines, monkeypatch):
    from vllm_eesd.round import outcome

    llm, _, _, state_file = served
    monkeypatch.setattr(outcome, "REPORT_EVERY_S", 0.0)
    assert greedy(llm, prompts[:1], max_tokens=MAX_TOKENS) == expected[:1]
    assert json.loads(state_file.read_text())["format"] == "eesd-policy-state"  # the damaged one was replaced
    shutil.rmtree(state_file.parent)
    for _ in range(2):
        assert greedy(llm, prompts[:1], max_tokens=MAX_TOKENS) == expected[:1]
    assert len(log_lines) == 1 and "state_file cannot be written" in log_lines[0]
    assert stats_of(llm)["drafter_faults"] == 0


@fault("the head's directory is gone after the start", 1)
def test_a_head_that_vanishes_after_the_start(served, greedy, prompts, expected):
    llm, _, head, _ = served
    shutil.rmtree(head)
    assert greedy(llm, prompts, max_tokens=MAX_TOKENS) == expected
    stats = stats_of(llm)
    assert stats["accepted"] == stats["drafted"] > 100
