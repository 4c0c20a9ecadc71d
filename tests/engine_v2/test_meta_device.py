"""What a round does to the device's buffers, with every one of them on torch's `meta` device.

`meta` tensors have no values, so reading one on the host fails; and an operator that mixes in a tensor of the CPU
fails as it would with CUDA's. Neither shows where the device is the CPU itself.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vllm_eesd.kernels.reference import draft_inputs as reference

MAX_REQS, K, NUM_REQS, HIDDEN_SIZE, VOCAB_SIZE = 4, 3, 3, 16, 32
META = torch.device("meta")


class OnlyMeta(TorchDispatchMode):
    """Fails on operators that touch a tensor of the CPU: torch lets those of no dimension pass, a graph does not."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device == META for tensor in tensors), f"{function} touches a tensor of the host"
        return result


@pytest.fixture(scope="module")
def steps():
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
    from vllm_eesd.host.v2 import draft_steps as v2_draft_steps

    return v2_draft_steps


def model(input_ids, positions, context):
    """A draft step that reads all it is given."""
    hidden_states = torch.zeros(len(input_ids), VOCAB_SIZE, device=META) + positions[:, None] + input_ids[:, None]
    if context is not None:
        hidden_states = hidden_states + context.sum(dim=1, keepdim=True)
    best = hidden_states.max(dim=-1)
    return best.indices, best.values, hidden_states


model.round_context = lambda hidden_states: hidden_states * 2
model.whole = lambda logits: logits


@pytest.fixture(params=["one head", "deep_context", "drawn"])
def drafting(request, steps, monkeypatch):
    """DraftSteps whose buffers have no values."""
    monkeypatch.setattr(steps, "set_forward_context", lambda *args, **kwargs: contextlib.nullcontext())
    members = {"load_draft_model": None, "propose": None, "max_model_len": 20}  # a property in vLLM 0.33
    self = object.__new__(type("Concrete", (steps.DraftSteps,), members))
    self.max_num_reqs, self.num_speculative_steps = MAX_REQS, K
    self.vllm_config, self._graphs, self.supports_decode_metadata_update = None, None, False
    self.model, self._kv_group, self.use_fp64_gumbel = model, 0, False
    empty = {"device": META, "dtype": torch.int64}
    ints = {"device": META, "dtype": torch.int32}
    self.idx_mapping, self.seeds = torch.zeros(MAX_REQS, **empty), torch.zeros(MAX_REQS, **empty)
    self._inputs = self.input_buffers = steps.DraftInputs(
        input_ids=torch.zeros(8, **ints),
        positions=torch.zeros(8, **empty),
        seq_lens=torch.zeros(MAX_REQS, **ints),
        query_start_loc=torch.zeros(MAX_REQS + 1, **ints),
        idx_mapping=self.idx_mapping,
        position_limit=torch.zeros(MAX_REQS, **empty),
        columns=torch.zeros(MAX_REQS, **empty),
        last_rows=torch.zeros(MAX_REQS, **empty),
    )
    self._no_blocks = torch.zeros(MAX_REQS, **ints)
    num_blocks = torch.zeros(1, MAX_REQS, device=META, dtype=torch.int32)
    self.block_tables = SimpleNamespace(num_blocks=SimpleNamespace(gpu=num_blocks), block_sizes=[4])
    self.temperature = torch.zeros(MAX_REQS, device=META)
    self.draft_tokens = torch.zeros(MAX_REQS, K, **empty)
    self.draft_token_confidence_probs = torch.zeros(MAX_REQS, K, device=META)
    self._drafts = steps.Drafts(self.draft_tokens, self.draft_token_confidence_probs)
    # What the kernels do, as operators: a kernel is given these tensors and a few numbers, and no others.
    for name in ("prepare_draft_inputs", "advance_draft_inputs"):
        monkeypatch.setattr(steps, name, getattr(reference, name))
    deep = request.param == "deep_context"
    self._round_context = torch.zeros(MAX_REQS, HIDDEN_SIZE, device=META) if deep else None
    self.draft_logits = None
    if request.param == "drawn":
        self.draws = True
        self.draft_logits = torch.zeros(MAX_REQS, K, VOCAB_SIZE, device=META)
        monkeypatch.setattr(steps, "gumbel_sample", lambda logits, *args, **kwargs: logits.argmax(dim=-1))
    return self


def run_a_round(drafting, steps, mode=None):
    """All that a round does to the device, but for the model and the attention's metadata."""
    ints = {"device": META, "dtype": torch.int32}
    batch = SimpleNamespace(
        num_reqs=NUM_REQS,
        idx_mapping=torch.zeros(NUM_REQS, device=META, dtype=torch.int64),
        seq_lens=torch.zeros(NUM_REQS, **ints),
        query_start_loc=torch.zeros(NUM_REQS + 1, **ints),
    )
    last_sampled = torch.zeros(MAX_REQS, 1, device=META, dtype=torch.int64)
    counts = torch.zeros(NUM_REQS, **ints), torch.zeros(NUM_REQS, **ints)
    step = steps.TargetStep(batch, torch.zeros(8, HIDDEN_SIZE, device=META), *counts, last_sampled)
    temperature, seeds = torch.zeros_like(drafting.temperature), torch.zeros_like(drafting.seeds)
    with torch.inference_mode(), mode or OnlyMeta():
        for dummy_run in (False, True):
            drafting._prepare(step, temperature, seeds, dummy_run)
            for num_tokens in (NUM_REQS, MAX_REQS):  # as many as there are requests, and a graph's padded batch
                drafting._draft(num_tokens, num_tokens, None, None, None, None)


def test_a_round_needs_no_value_on_the_host_and_nothing_of_the_host(drafting, steps):
    run_a_round(drafting, steps)


class Launches(TorchDispatchMode):
    """Counts operators that launch something: neither views nor the reserving of memory."""

    def __init__(self):
        super().__init__()
        self.launched = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in function.overloadpacket.__name__:
            self.launched.append(function.overloadpacket.__name__)
        return result


def test_launches_outside_the_models_own(drafting, steps, monkeypatch, request):
    """The goal is six a round and three a draft step; a kernel counts as one."""
    head = request.node.callspec.params["drafting"]
    launches = Launches()

    def alone(function, name=None):
        def call(*args, **kwargs):
            if name:
                launches.launched.append(name)
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    counted_model = alone(model)
    counted_model.round_context, counted_model.whole = alone(model.round_context), model.whole
    drafting.model = counted_model
    for name in ("prepare_draft_inputs", "advance_draft_inputs", "gumbel_sample"):
        monkeypatch.setattr(steps, name, alone(getattr(steps, name), name))
    monkeypatch.setattr(type(drafting), "_prepare", noting(type(drafting)._prepare, launches, "round"))
    monkeypatch.setattr(type(drafting), "_draft", noting(type(drafting)._draft, launches, "step"))
    run_a_round(drafting, steps, launches)
    rounds = " ".join(launches.launched).split("round ")[1:]
    prepared, *drafted = rounds[0].split("step ")
    samples = ["add", "gumbel_sample"] if head == "drawn" else []
    assert all(step.split() == [*samples, "advance_draft_inputs"] for step in drafted)
    first = {"one head": [], "deep_context": [], "drawn": ["copy_", "copy_"]}[head]
    last = ["index", "copy_"] if head == "deep_context" else []
    assert prepared.split() == [*first, "prepare_draft_inputs", *last]


def noting(original, launches, what):
    def call(*args, **kwargs):
        launches.launched.append(what)
        return original(*args, **kwargs)

    return call


PLANTS = {
    "item": (lambda self: self._inputs.columns[0].item(), "meta"),
    "bool": (lambda self: bool(self.idx_mapping[0] < 0), "meta"),
    "tolist": (lambda self: self.input_buffers.seq_lens.tolist(), "meta"),
    "mask": (lambda self: self.idx_mapping[self.idx_mapping >= 0], "meta"),
    "operand": (lambda self: self.idx_mapping.add_(torch.ones(MAX_REQS, dtype=torch.int64)), "(meta|host)"),
    "scalar operand": (lambda self: self.idx_mapping.add_(torch.ones((), dtype=torch.int64)), "host"),
    "index": (lambda self: self.idx_mapping[torch.zeros(2, dtype=torch.int64)], "(meta|host)"),
}


@pytest.mark.parametrize("drafting", ["one head"], indirect=True)
@pytest.mark.parametrize("place", ["_prepare", "_draft"])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_one_is_noticed(drafting, steps, monkeypatch, plant, place):
    does, says = PLANTS[plant]
    original = getattr(type(drafting), place)

    def planted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        does(self)

    monkeypatch.setattr(type(drafting), place, planted)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError), match=says):
        run_a_round(drafting, steps)


class DeviceCopy:
    """Stands in for `HostCopy`: what is copied is the device's."""

    def __init__(self, source):
        assert source.device == META


def rest_of_a_round(monkeypatch):
    """What a round does to the device outside `DraftSteps`: n-gram drafts, and its confidences on their way."""
    from vllm_eesd.host.v2 import lengths, ngrams
    from vllm_eesd.round import session

    ints = {"device": META, "dtype": torch.int64}

    def kernel(*arguments):
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device == META for tensor in tensors), "a kernel is given a tensor of the host"
        return torch.zeros(NUM_REQS, 3, device=META, dtype=torch.int32)

    for name in ("find_ngrams", "put_ngrams"):
        monkeypatch.setattr(ngrams, name, kernel)
    copied = lambda array, device: torch.empty(array.shape, device=device)  # noqa: E731  # the one copy that is allowed
    monkeypatch.setattr(ngrams, "async_tensor_h2d", copied)
    states = SimpleNamespace(
        draft_tokens=torch.zeros(MAX_REQS, K, **ints),
        all_token_ids=SimpleNamespace(gpu=torch.zeros(MAX_REQS, 20, **ints)),
        total_len=SimpleNamespace(gpu=torch.zeros(MAX_REQS, **ints)),
    )
    step = SimpleNamespace(idx_mapping=torch.zeros(NUM_REQS, **ints), num_sampled=torch.zeros(NUM_REQS, **ints))
    made = torch.zeros(NUM_REQS, K, **ints), torch.zeros(MAX_REQS, K, VOCAB_SIZE, device=META)
    rounds = object.__new__(lengths.Rounds)
    rounds.session = object.__new__(session.Session)
    rounds.session.round = SimpleNamespace(slots=np.arange(NUM_REQS), num_steps=K)
    rounds.session.generations = np.zeros(MAX_REQS)
    rounds._to_host = SimpleNamespace(copy=DeviceCopy)
    device_ngrams = ngrams.DeviceNgrams(ngrams.RequestStates(states))
    with torch.inference_mode(), OnlyMeta():
        device_ngrams.find(step)
        device_ngrams.put(np.ones(NUM_REQS, dtype=bool), step.idx_mapping, *made)
        device_ngrams.make_certain(np.ones(NUM_REQS, dtype=bool), step.idx_mapping, *made)
        rounds.end(torch.zeros(NUM_REQS, K, device=META))


def test_ngrams_and_confidences_need_no_value_on_the_host(steps, monkeypatch):
    rest_of_a_round(monkeypatch)


@pytest.mark.parametrize("name", ["find", "put", "make_certain", "end"])
@pytest.mark.parametrize("plant", ["item", "operand", "scalar operand"])
def test_a_planted_one_outside_draft_steps_is_noticed(steps, monkeypatch, name, plant):
    from vllm_eesd.host.v2 import lengths, ngrams

    does, says = PLANTS[plant]
    owner = lengths.Rounds if name == "end" else ngrams.DeviceNgrams
    original = getattr(owner, name)
    empty = torch.zeros(MAX_REQS, device=META, dtype=torch.int64)
    drafting = SimpleNamespace(idx_mapping=empty, _inputs=SimpleNamespace(columns=empty))

    def planted(self, *args):
        does(drafting)
        return original(self, *args)

    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError), match=says):
        rest_of_a_round(monkeypatch)
