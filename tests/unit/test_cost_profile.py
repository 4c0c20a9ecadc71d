"""Start-up costs on Model Runner V2: of a device that works through a queue while the host prepares the next step."""

from types import SimpleNamespace

import pytest
import torch

from vllm_eesd.host import cost_profile
from vllm_eesd.host.v2 import cost_profile as v2_cost_profile
from vllm_eesd.host.v2 import readback

#: What the host takes to prepare a step, and the device to run the target's and a draft step.
HOST_MS, FORWARD_MS, DRAFT_MS = 1.0, 4.0, 0.7


class Machine:
    """The time on a host, and the time at which its device will have done all it was given."""

    def __init__(self):
        self.host_ms = self.device_ms = 0.0

    def launch(self, host_ms, device_ms):
        self.host_ms += host_ms
        self.device_ms = max(self.device_ms, self.host_ms) + device_ms

    def synchronize(self):
        self.host_ms = max(self.host_ms, self.device_ms)

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, machine):
        self.machine = machine

    def record(self):
        self.at_ms = max(self.machine.host_ms, self.machine.device_ms)

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    clock = SimpleNamespace(perf_counter=lambda: machine.host_ms / 1e3)
    monkeypatch.setattr(cost_profile, "time", clock)
    monkeypatch.setattr(readback, "time", clock)
    monkeypatch.setattr(cost_profile, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(torch.cuda, "Event", machine.event)
    monkeypatch.setattr(torch.cuda, "synchronize", machine.synchronize)
    return machine


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_forwards_and_draft_steps_are_timed_by_the_same_clock(machine, device):
    """By the host's clock a plain step would look dearer than it is by what the host takes, and a draft step not."""
    on_gpu, started = device == "cuda", {}
    runner = SimpleNamespace(device=SimpleNamespace(type=device), max_num_reqs=8, lora_config=None)
    runner.scheduler_config = SimpleNamespace(max_num_batched_tokens=64)
    runner.model = SimpleNamespace(compute_logits=lambda hidden_states: None)
    speculator = SimpleNamespace(skips_dummy_runs=False, num_speculative_tokens=3)

    def launch(host_ms, device_ms):
        machine.launch(host_ms, device_ms)
        if not on_gpu:  # does one thing after the other
            machine.synchronize()

    def dummy_run(num_tokens):
        launch(HOST_MS, FORWARD_MS)
        if not speculator.skips_dummy_runs:
            speculator.dummy_times = readback.Timestamps(runner.device)
            speculator.dummy_times.mark()
            launch(0.1, DRAFT_MS)
            speculator.dummy_times.mark()
        return torch.zeros(num_tokens, 2), None

    runner._dummy_run = dummy_run
    costs = SimpleNamespace(start_from=lambda forwards, drafts: started.update(forwards=forwards, drafts=drafts))
    v2_cost_profile.profile_costs(runner, speculator, costs)
    hidden = on_gpu  # the host's work is hidden behind the device's
    assert {n for n, _ in started["forwards"]} >= {1, 9} and {n for n, _ in started["drafts"]} >= {1, 8}
    for _, ms in started["forwards"]:
        assert ms == pytest.approx(FORWARD_MS + (0 if hidden else HOST_MS))
    for _, ms in started["drafts"]:
        assert ms == pytest.approx(DRAFT_MS + (0 if hidden else 0.1))
