"""A client has step t's tokens before the draft steps of t + 1 are over, in vLLM's own loop with its queue of batches.

The device is a clock that a draft step moves on and that nothing reaches by itself: it has done no more than what
somebody waited for. So whatever waits for a later moment than an answer needs is seen in the answer's own time.
"""

import numpy as np
import pytest

SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "fixed"}
OPTIONS = {"max_model_len": 96, "block_size": 32, "max_num_seqs": 4, "async_scheduling": True}


class Device:
    """Moments of a device that runs as far behind its host as waits allow.

    Attributes:
        launched: moments launched so far: a target step, a draft step.
        done: the last moment that somebody waited for.
    """

    def __init__(self):
        self.launched = self.done = 0

    def event(self):
        """Stands in for a CUDA event recorded now."""
        return Event(self, self.launched)


class Event:
    def __init__(self, device, moment):
        self.device, self.moment = device, moment

    def synchronize(self):
        self.device.done = max(self.device.done, self.moment)

    def query(self):
        return self.device.done >= self.moment


@pytest.fixture
def device(monkeypatch):
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_eesd.host.v2.draft_steps import DraftSteps
    from vllm_eesd.host.v2.readback import HostCopy

    device = Device()

    def launching(original):
        def call(*args, **kwargs):
            device.launched += 1
            return original(*args, **kwargs)

        return call

    def recorded(original, name):
        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            setattr(self, name, device.event())

        return init

    monkeypatch.setattr(GPUModelRunner, "sample", launching(GPUModelRunner.sample))
    monkeypatch.setattr(DraftSteps, "_run_step", launching(DraftSteps._run_step))
    monkeypatch.setattr(HostCopy, "__init__", recorded(HostCopy.__init__, "_event"))
    monkeypatch.setattr(AsyncOutput, "__init__", recorded(AsyncOutput.__init__, "copy_event"))
    return device


@pytest.fixture
def answers(engine, greedy, random_target, cloned_head, device, monkeypatch):
    """Return run(): of each answer with a step under way, how many moments it came before that step's last."""
    from vllm.v1.engine.core import EngineCore

    original, ahead = EngineCore.step_with_batch_queue, []

    def step_with_batch_queue(self):
        before = device.launched
        outputs, executed = original(self)
        if outputs and device.launched - before > SPEC["num_speculative_tokens"]:  # a target step with its draft steps
            ahead.append(device.launched - device.done)
        return outputs, executed

    def run():
        monkeypatch.setattr(EngineCore, "step_with_batch_queue", step_with_batch_queue)
        generator = np.random.default_rng(4)
        prompts = [generator.integers(0, 512, n).tolist() for n in (4, 30, 9)]
        with engine(random_target, SPEC | {"model": cloned_head(random_target, 5, 5)}, **OPTIONS) as llm:
            ahead.clear()
            greedy(llm, prompts, max_tokens=12)
        return ahead

    return run


def test_an_answer_waits_for_no_later_step(answers):
    """The step under way has launched its target step and K draft steps; none of them is over."""
    ahead = answers()
    assert len(ahead) > 4
    assert min(ahead) > SPEC["num_speculative_tokens"]


def test_a_drafter_that_waits_is_noticed(answers, monkeypatch):
    from vllm_eesd.host.v2.lengths import Rounds

    end = Rounds.end

    def end_and_look(self, confidences):
        end(self, confidences)
        self.session.drafted.confidences.numpy()

    monkeypatch.setattr(Rounds, "end", end_and_look)
    assert min(answers()) == 0
