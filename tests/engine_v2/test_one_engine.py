"""What one engine can show: the exit layer is a clone of the target's last, so every draft is right and accepted.

Drafting machinery that is right reproduces the target when the draft model IS the target; after a fault it still does,
so `accepted == drafted` is a test of the KV that a fault left behind.
"""

import contextlib
import itertools
import pkgutil

import numpy as np
import pytest
import torch

from vllm_eesd.host.circuit_breaker import MAX_FAULTS, CircuitBreaker
from vllm_eesd.traces.read import read as read_rounds

K = 4
#: Short, so that there are few steps; prompts come in chunks.
OPTIONS = {"max_num_batched_tokens": 48, "async_scheduling": True, "per_request_spec_decode_metrics": "detailed"}
MAX_TOKENS = 14
fault = pytest.mark.fault
#: Where faults are planted: a function, the numbers of its calls that raise, and whether after it did all it does.
PLACES = {
    "admission and outcomes": [
        ("vllm_eesd.round.requests:RunningRequests.admit", (0,), False),
        ("vllm_eesd.host.v2.readback:HostCopy.__init__", (2,), True),
    ],
    "the beginning": [("vllm_eesd.host.v2.lengths:Rounds.begin", (0, 3), True)],
    "learning and lengths": [
        ("vllm_eesd.round.session:Session._observe", (0,), False),
        ("vllm_eesd.round.draft:DraftRound.decide_ahead", (1,), False),
    ],
    "draft steps": [
        ("vllm_eesd.host.v2.draft_steps:DraftSteps._prepare", (1,), True),
        ("vllm_eesd.host.v2.draft_steps:DraftSteps._draft", (5,), False),
    ],
    "behind draft steps": [("vllm_eesd.host.v2.draft_steps:DraftSteps._draft", (2, 9), True)],
}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(0, 512, n).tolist() for n in (5, 17, 33, 64, 3)]


@pytest.fixture(scope="module")
def served(engine, random_target, cloned_head, tmp_path_factory):
    """(engine, its round trace's file), used by all tests of this module."""
    path = tmp_path_factory.mktemp("traces") / "rounds.jsonl"
    spec = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed", "trace_file": str(path)}
    with engine(random_target, spec | {"model": cloned_head(random_target, 7, 7)}, **OPTIONS) as llm:
        yield llm, path


@pytest.fixture
def llm(served, runner_of):
    """The engine, with a closed breaker and zero counters."""
    runner_of(served[0]).speculator.breaker = CircuitBreaker()
    served[0].collective_rpc("eesd_reset_stats")
    return served[0]


@pytest.fixture(scope="module")
def expected(served, greedy, prompts):
    """What the engine says of some of the prompts without drafting."""
    return greedy(served[0], prompts[:3], max_tokens=MAX_TOKENS, extra_args={"eesd_enabled": False})


def test_costs_are_known_before_the_first_request(llm, runner_of):
    costs = runner_of(llm).speculator.policy.costs
    assert not costs.state()["verify_ms"]
    one, nine = costs.verify_curve(1, 8)[[0, 8]]
    assert 0 < one <= nine and one != 1.0  # ms, not the default unit
    assert 0 < costs.draft_curve(1)[1]


def test_everything_is_accepted_and_traced(llm, greedy, prompts, runner_of, served):
    answers = greedy(llm, prompts, max_tokens=20)
    (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["accepted"] == stats["drafted"] >= 60
    runner = runner_of(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context
    exit_kv = layers["eesd_exit.layers.8.self_attn.attn"].kv_cache
    layer_kv = layers["model.layers.7.self_attn.attn"].kv_cache
    written = layer_kv != 0
    assert written.sum() > 10_000
    # The two are computed in batches of different shapes, so the last bits may differ.
    torch.testing.assert_close(exit_kv[written], layer_kv[written], atol=1e-5, rtol=1e-5)

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the last round's tokens are on their way to the host
    runner.speculator.rounds.round_trace._flush()
    rounds, written = read_rounds(served[1]), {}
    for record in rounds:
        assert record["accepted"] == len(record["draft"]) == len(record["confidences"]) <= K
        assert record["draft"] == record["emitted"][:-1]
        assert len(record["draft_steps_ms"]) >= len(record["draft"]) and record["verify_ms"] > 0
        assert set(record["confidences"]) <= {None}  # this policy does not ask for them
        written.setdefault(record["request"], []).extend(record["emitted"])
    # The first token comes from the prompt's forward pass, which is no round; a last round may pass a request's end.
    assert len(written) == len(answers)
    for tokens, answer in zip(sorted(written.values()), sorted(list(answer[1:]) for answer in answers), strict=True):
        assert tokens[: len(answer)] == answer
    assert [r["at_s"] for r in rounds] == sorted(r["at_s"] for r in rounds)


def test_recorded_rounds_are_those_that_ran(llm, greedy, prompts, expected):
    llm.collective_rpc("eesd_take_rounds")
    assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    (rounds,) = llm.collective_rpc("eesd_take_rounds", args=(True,))
    written = {}
    for record in rounds:
        written.setdefault(record["request_id"], []).extend(record["emitted"])
        assert record["draft"][: record["num_accepted"]] == record["emitted"][:-1]
    assert sum(record["num_accepted"] for record in rounds) > 0
    for tokens, answer in zip(sorted(written.values()), sorted(list(answer[1:]) for answer in expected), strict=True):
        assert tokens[: len(answer)] == answer
    greedy(llm, prompts[:1], max_tokens=MAX_TOKENS)
    assert llm.collective_rpc("eesd_take_rounds", args=(True,)) == [[]]


@pytest.mark.feature("--per-request-spec-decode-metrics (Model Runner V2)", "drafted and accepted, placeholders aside")
def test_the_drafts_of_each_request_as_vllm_counts_them(llm, prompts):
    """Asynchronous scheduling books the longest draft for each request in every round."""
    from vllm import SamplingParams

    wishes = [{}, {"eesd_max_draft_tokens": 2}, {"eesd_enabled": False}]
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": MAX_TOKENS}
    params = [SamplingParams(extra_args=wish, **common) for wish in wishes]
    llm.collective_rpc("eesd_take_rounds")
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts[:3]], params, use_tqdm=False)
    (rounds,) = llm.collective_rpc("eesd_take_rounds", args=(True,))
    for output in outputs:
        text = list(output.outputs[0].token_ids)
        of_request = {}
        for round_ in rounds:
            of_request.setdefault(round_["request_id"], []).append(round_)
        (its_own,) = (
            its
            for its in of_request.values()
            if [token for round_ in its for token in round_["emitted"]][: len(text) - 1] == text[1:]
        )
        drafted = [round_ for round_ in its_own if round_["draft"]]
        metrics = output.outputs[0].spec_decode_metrics
        # A step that was under way when the request ended is no longer counted.
        num_steps = len(metrics.per_step_drafted)
        assert metrics.per_step_drafted == [len(round_["draft"]) for round_ in drafted[:num_steps]]
        assert metrics.per_step_accepted == [round_["num_accepted"] for round_ in drafted[:num_steps]]
        assert len(drafted) - num_steps <= 1 and sum(metrics.histogram) == num_steps
        assert (num_steps > 0) is (output is not outputs[2])
    assert max(outputs[1].outputs[0].spec_decode_metrics.per_step_drafted) == 2


@pytest.mark.feature("logprobs of named tokens (Model Runner V2)", "the same answers; no request drafts meanwhile")
def test_the_logprobs_of_tokens_that_a_request_names(llm, prompts):
    """Without drafts vLLM's sampler answers; its rejection sampler would give the likeliest tokens' (issue 42592)."""
    from vllm import SamplingParams

    def ask(**extra_args):
        common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "extra_args": extra_args}
        wishes = {"logprob_token_ids": [5, 6, 400], "max_tokens": 5}, {"max_tokens": MAX_TOKENS}, {"max_tokens": 12}
        params = [SamplingParams(**common | wish) for wish in wishes]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts[:3]], params, use_tqdm=False)
        (named, *others) = [output.outputs[0] for output in outputs]
        assert all(other.logprobs is None for other in others)
        positions = [{token: entry.logprob for token, entry in position.items()} for position in named.logprobs]
        return [tuple(output.outputs[0].token_ids) for output in outputs], positions

    answers, positions = ask()
    (stats,) = llm.collective_rpc("eesd_stats")
    expected, known = ask(eesd_enabled=False)
    assert answers == expected
    for position, plain in zip(positions, known, strict=True):
        assert position == pytest.approx(plain, abs=1e-4) and {5, 6, 400} <= position.keys()
    assert stats["accepted"] == stats["drafted"] > 0  # by the others, once it had ended


def test_verified_tokens_are_those_of_vllms_sampler(llm, prompts, runner_of, monkeypatch):
    """Greedy and sampled requests in one batch, judged by EESD's kernels and by vLLM's.

    Without seeds of their own, which would have them judged by shared noise: vLLM draws some from numpy's generator.
    """
    from vllm import SamplingParams

    from vllm_eesd.host.v2.verification import Verification

    calls = []
    judge = Verification.verify
    monkeypatch.setattr(Verification, "verify", lambda self, *args: (calls.append(1), judge(*args))[1])
    # Drafts drawn from the target's own distribution would all be accepted; these come from a sharper one.
    model = runner_of(llm).speculator.model
    monkeypatch.setattr(model, "whole", lambda logits, whole=model.whole: 1.5 * whole(logits))
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}
    sampling = [SamplingParams(temperature=t, **common) for t in (0.0, 1.0, 0.6)]

    def generate():
        np.random.seed(7)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts[:3]], sampling, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    ours, num_calls = generate(), len(calls)
    (stats,) = llm.collective_rpc("eesd_stats")
    assert num_calls and 0 < stats["accepted"] < stats["drafted"]
    monkeypatch.setattr(runner_of(llm).speculator.verification, "is_ours", lambda *args: False)
    assert generate() == ours
    assert len(calls) == num_calls


def test_steps_for_which_vllm_wants_no_drafts(llm, greedy, prompts, expected, monkeypatch):
    """As vLLM 0.33 calls after steps of which no request can use a draft: -1 then takes the place of every draft."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    # What the test before it rejected is read some rounds late: here, before anything is counted.
    greedy(llm, prompts[:1], max_tokens=4, extra_args={"eesd_enabled": False})
    llm.collective_rpc("eesd_reset_stats")
    propose, asked = EarlyExitSpeculator.propose, itertools.cycle([K, 0, 2])

    def propose_fewer(self, *args, dummy_run=False, num_speculative_tokens=None, **kwargs):
        longest = next(asked)
        drafts = propose(self, *args, dummy_run=dummy_run, num_speculative_tokens=longest, **kwargs)
        drafts[:, longest:] = -1
        return drafts

    monkeypatch.setattr(EarlyExitSpeculator, "propose", propose_fewer)
    assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["accepted"] == stats["drafted"] > 0 and not stats["drafter_faults"]
    lengths = stats["draft_length_histogram"]
    assert lengths[0] and lengths[2] and lengths[K]


def test_drafts_that_are_not_finite_are_counted(llm, greedy, prompts, expected, monkeypatch):
    """This policy looks at no confidence; the counts are read some rounds late."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    draft = EarlyExitSpeculator._draft

    def not_finite(self, *args, **kwargs):
        draft(self, *args, **kwargs)
        self.draft_token_confidence_probs.fill_(float("nan"))

    monkeypatch.setattr(EarlyExitSpeculator, "_draft", not_finite)
    assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    (stats,) = llm.collective_rpc("eesd_stats")
    assert 0 < stats["drafted_not_finite"] <= stats["drafted"] + 3 * K  # a last round is verified by nobody


@contextlib.contextmanager
def raising(place, calls, after):
    """Make these calls of a function raise, before it does anything or after it did all."""
    name, _, attribute = place.rpartition(".")
    owner, count = pkgutil.resolve_name(name), itertools.count()
    original = owner.__dict__[attribute]

    def faulty(*args, **kwargs):
        fails = next(count) in calls
        result = None if fails and not after else original(*args, **kwargs)
        if fails:
            raise RuntimeError("injected\nfault")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, faulty)
        yield


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(name, marks=fault("drafting raises somewhere (V2)", sum(len(calls) for _, calls, _ in places)))
        for name, places in PLACES.items()
    ],
)
def test_a_fault_anywhere_costs_one_round_of_drafts(llm, greedy, prompts, expected, runner_of, places):
    with contextlib.ExitStack() as planted:
        for place, calls, after in PLACES[places]:
            planted.enter_context(raising(place, calls, after))
        assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    (stats,) = llm.collective_rpc("eesd_stats")
    num_planted = sum(len(calls) for _, calls, _ in PLACES[places])
    assert runner_of(llm).speculator.breaker.num_faults == stats["drafter_faults"] == num_planted
    assert stats["accepted"] == stats["drafted"] > 0 and not stats["speculation_off"]


@fault("drafting raises until speculation is off (V2)", MAX_FAULTS)
def test_repeated_faults_switch_speculation_off(llm, greedy, prompts, expected):
    with raising("vllm_eesd.host.v2.draft_steps:DraftSteps._draft", range(10**6), after=True):
        assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["speculation_off"] and stats["drafter_faults"] == MAX_FAULTS
    assert greedy(llm, prompts[:3], max_tokens=MAX_TOKENS) == expected
    assert llm.collective_rpc("eesd_stats")[0]["rounds"] == stats["rounds"]
