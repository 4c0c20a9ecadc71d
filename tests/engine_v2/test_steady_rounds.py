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
import triton
import vllm_eesd.kernels
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import vllm_eesd
from vllm_eesd.policy import POLICIES

PACKAGE = Path(vllm_eesd.__file__).parent
OURS = (str(PACKAGE), str(Path(vllm_eesd.kernels.__file__).parent))
NEITHERS = (str(Path(torch.__file__).parent), str(Path(triton.__file__).parent), __file__)
#: Operators behind `item`, `bool`, `int`, boolean indexing and the like.
READING = ("_local_scalar_dense", "aten.item", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")
#: What reads or makes a tensor without an operator that could be seen, or copies from the host while it waits.
METHODS = [(torch.Tensor, "tolist"), (torch.Tensor, "cpu"), (torch.cuda, "synchronize")]
METHODS += [(torch, "from_numpy"), (torch, "as_tensor"), (torch, "tensor")]
FILES_OF_THE_MODEL = tuple(path.name for path in (PACKAGE / "host" / "model").glob("*.py"))
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

    def noted_copy(self, source, stream=None):
        begin_copy(self, source, stream)
        self._event = watch.event()

    for owner, name in METHODS:
        patch.setattr(owner, name, noted(getattr(owner, name), name))
    patch.setattr(HostCopy, "__init__", noted_copy)
    patch.setattr(DraftSteps, "_run_step", ticking(DraftSteps._run_step, "draft steps"))
    patch.setattr(Rounds, "begin", ticking(Rounds.begin, "rounds"))
    with watch:
        yield watch


def generate(llm, prompts, temperatures=(0.0, 0.8, 0.0)):
    """Run requests of twelve tokens at these temperatures."""
    from vllm import SamplingParams

    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(temperature=temperature, **common) for temperature in temperatures]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def llm(engine, random_target, cloned_head, tmp_path_factory):
    trace = {"trace_file": str(tmp_path_factory.mktemp("traces") / "rounds.jsonl")}
    spec = SPEC | {"model": cloned_head(random_target, 5, 5)} | trace
    with engine(random_target, spec, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def watched(llm, greedy, monkeypatch):
    """Return run(policy): the Watch of a few requests' rounds under that policy; one of them samples."""
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
            generate(llm, prompts)
        assert watch.clock["rounds"] > 6 and watch.clock["draft steps"] > 6
        return watch

    return run


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_waits_but_for_steps_long_over(watched, policy):
    from vllm_eesd.round.outcome import READBACK_DELAY

    watch = watched(policy)
    assert not watch.reads
    who_waited = {who for who, _, _ in watch.waits}
    late = {"_observe", "num_not_finite", "known_confidences", "confidences_of"}  # the last: the round trace
    assert {"_observe", "num_not_finite"} <= who_waited <= late
    assert all(rounds >= READBACK_DELAY for _, _, rounds in watch.waits)


def test_a_planted_wait_for_the_round_under_way_is_noticed(watched, monkeypatch):
    from vllm_eesd.host.v2.lengths import Rounds
    from vllm_eesd.round.outcome import READBACK_DELAY

    end = Rounds.end

    def end_and_look(self, confidences):
        end(self, confidences)
        self.session.drafted.confidences.numpy()

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


class Launches(TorchDispatchMode):
    """Lists what each round launches, but for the model's own, its attention's, and what vLLM's functions launch.

    Views and the reserving of memory launch nothing. One copy to the device is `async_tensor_h2d`.

    Attributes:
        rounds: [(DraftRound, whether a row draws, names outside draft steps, names in them)].
    """

    def __init__(self):
        super().__init__()
        self.rounds, self.names = [], None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not function.is_view and "empty" not in name:
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, name):
        where = our_frame()
        if self.names is not None and where is not None and not where.startswith(FILES_OF_THE_MODEL):
            self.names.append(name)


@contextlib.contextmanager
def launching(patch):
    from triton.runtime.interpreter import GridExecutor

    from vllm_eesd.host.v2 import draft_steps, ngrams, speculator

    launches = Launches()

    def alone(original, name=None):
        def call(*args, **kwargs):
            launches.note(name or args[0].fn.__name__)
            with _disable_current_modes():
                return original(*args, **kwargs)

        return call

    def in_steps(original):
        def call(*args, **kwargs):
            outside, launches.names = launches.names, []
            original(*args, **kwargs)
            launches.steps.append(launches.names)
            launches.names = outside

        return call

    propose = speculator.EarlyExitSpeculator.propose

    def proposing(self, *args, **kwargs):
        launches.names, launches.steps = [], []
        drafts = propose(self, *args, **kwargs)
        launches.rounds.append((self.rounds.round, self.draws, launches.names, launches.steps))
        launches.names = None
        return drafts

    patch.setattr(GridExecutor, "__call__", alone(GridExecutor.__call__))
    for module in (ngrams, speculator):
        patch.setattr(module, "async_tensor_h2d", alone(module.async_tensor_h2d, "async_tensor_h2d"))
    patch.setattr(draft_steps.DraftSteps, "_run_step", in_steps(draft_steps.DraftSteps._run_step))
    patch.setattr(speculator.EarlyExitSpeculator, "propose", proposing)
    with launches:
        yield launches


#: What a round begins with: how much was emitted; with n-gram drafts, a search of every text.
COUNTS, SEARCH = ["copy_"], ["_scan_kernel", "_finish_kernel"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of the interpreter, and a graph has none to see")
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_launches_of_a_round(llm, runner_of, monkeypatch, policy):
    """The goal is six a round outside its draft steps, and three a draft step."""
    generator = np.random.default_rng(4)
    prompts = [generator.integers(0, 512, n).tolist() for n in (4, 30, 9)]
    llm.collective_rpc("eesd_use_policy", args=(policy,))
    rounds = runner_of(llm).speculator.rounds
    monkeypatch.setattr(rounds, "round_trace", None)
    if policy == "goodput":
        take = lambda slots, chances, limits: np.where(generator.random(len(slots)) < 0.5, limits, 0)  # noqa: E731
        monkeypatch.setattr(rounds.policy, "take_ngrams", take)
        monkeypatch.setattr(rounds.policy, "more", lambda slots, *told: generator.random(len(slots)) < 0.5)
    kinds = collections.Counter()
    for temperatures in ((0.0, 0.0, 0.0), (0.8, 0.0, 0.8)):
        with pytest.MonkeyPatch.context() as patch, launching(patch) as launches:
            generate(llm, prompts, temperatures)
        for round_, draws, outside, steps in launches.rounds:
            drafts, copies = bool(round_.num_steps), bool(round_.from_ngrams.any())
            drawn = drafts and draws
            expected = (SEARCH if policy == "goodput" else []) + COUNTS
            expected += ["copy_", "copy_"] * drawn  # temperatures and seeds
            expected += ["_prepare_kernel", "copy_"] * drafts  # the confidences
            expected += ["async_tensor_h2d", "_put_kernel"] * copies
            assert outside == expected
            # Where drafts are drawn, what the noise is counted by.
            assert all(step == ["add"] * draws + ["_advance_kernel"] for step in steps)
            kinds[drafts, copies, drawn] += 1
    assert {(True, False, False), (True, False, True)} <= set(kinds)
    assert policy == "fixed" or {(False, True, False), (True, True, False), (True, True, True)} <= set(kinds)
