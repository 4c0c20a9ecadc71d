"""What vLLM's runner and worker ask of the speculator, without an engine."""

import contextlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

K = 3


@pytest.fixture(scope="module")
def v2():
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
    from vllm_eesd.host.v2 import speculator as v2

    return v2


@pytest.fixture
def speculator(v2):
    """A speculator that records its calls instead of making them; `wanted` draft steps are wanted in a round."""
    self, calls = object.__new__(v2.EarlyExitSpeculator), []

    def begin(step, asynchronous, counts, tokens, longest):
        calls.append(("begin", longest))
        self.wanted = K if longest is None else longest
        return SimpleNamespace(mark=lambda: None)

    self.calls, self.wanted = calls, K
    self.num_speculative_tokens, self._asynchronous = K, True
    self.draft_tokens = torch.zeros(4, K, dtype=torch.int64)
    self.breaker = v2.CircuitBreaker()
    nobody = np.zeros(2, dtype=bool)
    round_ = type("", (), {"from_ngrams": nobody, "num_steps": property(lambda round_: self.wanted)})()
    self.rounds = SimpleNamespace(
        round_trace=None,
        stats=SimpleNamespace(recording=False),
        policy=SimpleNamespace(uses_ngrams=False),
        skips=lambda step: False,
        begin=begin,
        round=round_,
        drawing=SimpleNamespace(kind=lambda round_: 0, certain=lambda round_: nobody),
        back_off=lambda step, decision_ms: None,
    )
    for name in ("_prepare", "_without_adapters", "_run_round"):
        setattr(self, name, lambda *args, name=name, **kwargs: calls.append(name))
    self._graph_for = lambda step: SimpleNamespace(num_tokens=step.num_reqs)
    return self


def arguments(num_reqs=2):
    """The positional arguments of vLLM's call after a step with requests."""
    batch = SimpleNamespace(num_reqs=num_reqs, idx_mapping=torch.arange(num_reqs), seq_lens_cpu_upper_bound=None)
    return [batch, {}, {}, *(torch.zeros(num_reqs) for _ in range(8))]


def test_the_arguments_are_those_of_vllms_speculators(v2):
    """Called by position and by name: a parameter more, or in another place, would be taken for something else."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    ours, theirs = (inspect.signature(c.propose).parameters for c in (v2.EarlyExitSpeculator, BaseSpeculator))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_an_argument_nobody_knows_is_an_error(speculator):
    with pytest.raises(TypeError, match="beam_width"):
        speculator.propose(*arguments(), num_speculative_tokens=K, beam_width=2)
    with pytest.raises(TypeError):
        speculator.propose(*arguments(), None, False, False, None, False, K, "one more")
    assert not speculator.calls


def test_costs_are_timed_while_vllm_counts_no_experts(v2, speculator, monkeypatch):
    """vLLM 0.33 has its runner ignore warm-up forwards; 0.32's has nothing of the kind."""
    calls = speculator.calls

    @contextlib.contextmanager
    def suppress():
        calls.append("suppress")
        yield
        calls.append("count again")

    monkeypatch.setattr(v2, "profile_costs", lambda *args: calls.append("time"))
    speculator.warm_up = lambda runner: calls.append("compile")
    speculator.rounds = SimpleNamespace(forget_requests=lambda: None, learns=False, policy=SimpleNamespace(costs=None))
    speculator.profile_costs(SimpleNamespace(eplb=SimpleNamespace()))
    assert calls == ["compile", "time"] and speculator.rounds.learns
    speculator.profile_costs(SimpleNamespace(eplb=SimpleNamespace(suppress=suppress)))
    assert calls[2:] == ["compile", "suppress", "time", "count again"]


@pytest.mark.parametrize("num_speculative_tokens", [None, K])
def test_a_round(speculator, num_speculative_tokens):
    speculator.propose(*arguments(), num_speculative_tokens=num_speculative_tokens, dp_sync_state=None, mm_inputs=None)
    begin = ("begin", num_speculative_tokens)
    assert speculator.calls == [begin, "_prepare", "_without_adapters", "_run_round"]


def test_where_no_request_can_use_a_draft_the_round_is_learned_from_and_nothing_prepared(speculator):
    """vLLM 0.33 calls so for prompt chunks and for requests that are sure to end."""
    speculator.propose(*arguments(), num_speculative_tokens=0, dp_sync_state=None, mm_inputs=None)
    assert speculator.calls == [("begin", 0)]


def test_a_round_that_is_skipped_asks_the_device_nothing(speculator):
    speculator.rounds.skips = lambda step: True
    speculator.propose(*arguments())
    assert not speculator.calls


@pytest.mark.parametrize("draws", [False, True])
def test_a_sampling_request_under_a_grammar_drafts_greedily_and_is_verified_as_one_hot(v2, speculator, draws):
    """Beside one whose draft is drawn, and alone, when nothing is drawn in its round."""
    logits, temperature = torch.zeros(4, K, 8), torch.tensor([0.8, 0.9, 0.7, 0.6])
    states = SimpleNamespace(draft_tokens=torch.zeros(4, K, dtype=torch.int64))
    speculator.draft_logits, speculator.temperature, speculator.device = logits, temperature, "cpu"
    speculator.ngrams = v2.DeviceNgrams(v2.RequestStates(states))
    speculator.draft_tokens[:2] = torch.arange(2 * K).view(2, K)
    drawn = {"kind": lambda round_: int(draws), "certain": lambda round_: np.array([False, True])}
    speculator.rounds.drawing = SimpleNamespace(**drawn)
    given = arguments()
    given[0].idx_mapping, given[0].idx_mapping_np = torch.tensor([3, 2]), np.array([3, 2])
    speculator.propose(*given)
    assert temperature.tolist() == pytest.approx([0.8, 0.9, 0.0 if draws else 0.7, 0.6])
    assert logits[2].softmax(-1).argmax(-1).tolist() == list(range(K, 2 * K))
    assert (logits[2].softmax(-1).amax(-1) == 1).all()
    assert not logits[[0, 1, 3]].any()
