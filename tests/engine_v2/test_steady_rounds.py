"""A whole round on V2 (policy, draft steps, verification, feedback) never makes the host wait for the device.

On a CPU nothing waits, so what would is counted instead: operators and methods that read a device tensor on the host,
called from this package's frames, and waits for events, which a stand-in for CUDA's notes. `numpy()` needs no counting:
a CUDA tensor refuses it. Every policy is held to it, those that look at confidences too.
"""

import collections
import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import vllm_eesd.kernels
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_eesd

OURS = (str(Path(vllm_eesd.__file__).parent), str(Path(vllm_eesd.kernels.__file__).parent))
NEITHERS = (str(Path(torch.__file__).parent), __file__)
#: Operators behind `item`, `bool`, `int`, boolean indexing and the like.
READING = ("_local_scalar_dense", "aten.item", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")
#: What reads or makes a tensor without an operator that could be seen, or copies from the host while it waits.
METHODS = [(torch.Tensor, "tolist"), (torch.Tensor, "cpu"), (torch.cuda, "synchronize")]
METHODS += [(torch, "from_numpy"), (torch, "as_tensor"), (torch, "tensor")]
SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "beta_ts"}
OPTIONS = {"max_model_len": 96, "block_size": 32, "max_num_seqs": 4, "async_scheduling": True}


def our_frame():
    """Where this package called what is running, "file:line"; None if somebody else did."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NEITHERS):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(OURS):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Watch(TorchDispatchMode):
    """Notes in `reads` what would wait, and in `waits` who waited for which event, and how far behind it was.

    Attributes:
        reads: [(what, where)].
        waits: [(function that waits, draft steps begun since the event, rounds begun since)].
    """

    def __init__(self):
        super().__init__()
        self.reads, self.waits, self.clock = [], [], collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        reads = any(reading in name for reading in READING)
        if "aten.index.Tensor" in name:
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if reads:
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, what):
        if (where := our_frame()) is not None:
            self.reads.append((what, where))

    def event(self):
        return Event(self, self.clock["draft steps"], self.clock["rounds"])


class Event:
    """Stands in for the CUDA event behind a copy to the host; the device runs as far behind as the host allows."""

    def __init__(self, watch, steps, rounds):
        self.watch, self.steps, self.rounds = watch, steps, rounds

    def synchronize(self):
        clock, who = self.watch.clock, sys._getframe(2).f_code.co_name  # past `HostCopy.numpy`
        self.watch.waits.append((who, clock["draft steps"] - self.steps, clock["rounds"] - self.rounds))

    def query(self):
        from vllm_eesd.round.outcome import READBACK_DELAY

        return self.watch.clock["rounds"] - self.rounds >= READBACK_DELAY


@contextlib.contextmanager
def watching(patch):
    from vllm_eesd.host.v2.draft_steps import DraftSteps
    from vllm_eesd.host.v2.lengths import Rounds
    from vllm_eesd.host.v2.readback import HostCopy

    watch = Watch()

    def noted(original, name):
        def call(*args, **kwargs):
            watch.note(name)
            return original(*args, **kwargs)

        return call

    def ticking(original, name):
        def call(*args, **kwargs):
            watch.clock[name] += 1
            return original(*args, **kwargs)

        return call

    begin_copy = HostCopy.__init__

    def noted_copy(self, source):
        begin_copy(self, source)
        self._event = watch.event()

    for owner, name in METHODS:
        patch.setattr(owner, name, noted(getattr(owner, name), name))
    patch.setattr(HostCopy, "__init__", noted_copy)
    patch.setattr(DraftSteps, "_run_step", ticking(DraftSteps._run_step, "draft steps"))
    patch.setattr(Rounds, "begin", ticking(Rounds.begin, "rounds"))
    with watch:
        yield watch


@pytest.fixture(scope="module")
def llm(engine, random_target, cloned_head, tmp_path_factory):
    trace = {"trace_file": str(tmp_path_factory.mktemp("traces") / "rounds.jsonl")}
    spec = SPEC | {"model": cloned_head(random_target, 5, 5), "policy_args": trace}
    with engine(random_target, spec, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def watched(llm, greedy, monkeypatch):
    """Return run(policy): the Watch of a few requests' rounds under that policy."""
    generator = np.random.default_rng(4)
    prompts = [generator.integers(0, 512, n).tolist() for n in (4, 30, 9)]

    # Whether drafting pays must not follow from how long this machine's steps take.
    from vllm_eesd.policy import CostModel

    monkeypatch.setattr(CostModel, "verify_curve", lambda self, num_reqs, most: np.ones(most + 1))
    monkeypatch.setattr(CostModel, "draft_curve", lambda self, most: np.append(0.0, np.full(most, 0.01)))

    def run(policy):
        greedy(llm, prompts[:1], max_tokens=3)  # what is made once is made
        llm.collective_rpc("eesd_use_policy", args=(policy,))
        with pytest.MonkeyPatch.context() as patch, watching(patch) as watch:
            greedy(llm, prompts, max_tokens=12)
        assert watch.clock["rounds"] > 6 and watch.clock["draft steps"] > 6
        return watch

    return run


@pytest.mark.parametrize("policy", ["beta_ts", "confidence", "goodput"])
def test_nothing_waits_but_for_steps_long_over(watched, policy):
    from vllm_eesd.round.outcome import READBACK_DELAY

    watch = watched(policy)
    assert not watch.reads
    who_waited = {who for who, _, _ in watch.waits}
    assert who_waited - {"confidences_of"} == {"_observe", "_take_confidences"}  # `confidences_of`: the round trace
    assert all(rounds >= READBACK_DELAY for _, _, rounds in watch.waits)


def test_a_planted_wait_for_the_round_under_way_is_noticed(watched, monkeypatch):
    from vllm_eesd.host.v2.lengths import Rounds
    from vllm_eesd.round.outcome import READBACK_DELAY

    end = Rounds.end

    def end_and_look(self, confidences):
        end(self, confidences)
        self._drafted.confidences.numpy()

    monkeypatch.setattr(Rounds, "end", end_and_look)
    assert any(rounds < READBACK_DELAY for _, _, rounds in watched("goodput").waits)


PLANTS = {
    "item": "step.num_sampled.max().item()",
    "int": "int(step.num_sampled[0])",
    "tolist": "step.num_sampled.tolist()",
    "cpu": "step.num_sampled.cpu()",
    "boolean index": "step.num_sampled[step.num_sampled > 0]",
    "a tensor from the host": "__import__('torch').tensor([1])",
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_wait_is_noticed(watched, monkeypatch, plant):
    from vllm_eesd.host.v2.lengths import Rounds

    body = f"{PLANTS[plant]}\n    return original(self, step, *rest)\n"
    source = f"def begin(self, step, *rest):\n    {body}"
    scope = {"original": Rounds.begin}
    exec(compile(source, f"{OURS[0]}/planted.py", "exec"), scope)
    monkeypatch.setattr(Rounds, "begin", scope["begin"])
    assert {where for _, where in watched("beta_ts").reads} == {"planted.py:2"}
