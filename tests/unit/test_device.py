"""The replay of a device whose host runs ahead of it: what a round costs there, and when outcomes are known."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from device_replay import READBACK_DELAY, Device, DeviceDrafter, HostTimes

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.replay import Batch, replay
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World

TRACE = Path(__file__).resolve().parents[2] / "models" / "traces" / "held_out_code.jsonl.gz"
PLAIN_MS, DRAFT_MS, STEPS = 4.0, 0.5, 3
COSTS = {
    "verify_ms": {"1": [[0, PLAIN_MS], [8, PLAIN_MS]]},
    "draft_step_ms": [[1, DRAFT_MS]],
    "draft_round_ms": [[1, 0]],
}
HOST = HostTimes(step_ms=1.0, request_ms=0.0, inputs_host_ms=0.0, inputs_device_ms=0.25, launch_ms=0.0, tail_ms=0.0)


def batch(matches=8, new=False, confidence=0.9):
    one = np.ones(1, dtype=np.int64)
    confidences = np.full((1, 8), confidence, dtype=np.float32)
    texts = np.zeros((1, 0), dtype=np.int32)
    return Batch(one * 0, np.array([new]), one * 8, one * matches, confidences, texts, one * 0)


def run(drafter, world, rounds, **kwargs):
    """Return each round's time."""
    times = []
    for number in range(rounds):
        now = batch(new=number == 0, **kwargs)
        drafted, verified = drafter.draft(now, world)
        drafter.observe(now, verified, np.minimum(verified, now.matches))
        times.append(world.round_ms(1, drafted, verified))
    return times


def drafts_of(length):
    policy = build_policy("fixed", BetaPosterior(1), 0, {})
    policy.more = lambda slots, num_drafted, confidence: np.full(len(slots), num_drafted < length)
    return policy


@pytest.mark.parametrize(
    ("host_ms", "expected"),
    [
        (1.0, PLAIN_MS + 0.25 + STEPS * DRAFT_MS),  # the host is hidden behind the device
        (50.0, 50.0),  # the device waits for the host, and drafting costs nothing
    ],
)
def test_a_round_takes_as_long_as_the_slower_of_host_and_device(host_ms, expected):
    world = Device(COSTS, HostTimes(**{**vars(HOST), "step_ms": host_ms}))
    times = run(DeviceDrafter(drafts_of(STEPS)), world, 12)
    assert times[4:] == pytest.approx([expected] * 8)
    assert world.plain_ms(1) == max(PLAIN_MS, host_ms)


def test_the_host_launches_a_rounds_steps_in_order_and_waits_for_none_of_them():
    world, launched = Device(COSTS, HOST), []
    launch = world.launch
    world.launch = lambda host_ms, device_ms: launched.append(device_ms) or launch(host_ms, device_ms)
    world.wait = lambda end: pytest.fail("the host waited")
    run(DeviceDrafter(drafts_of(STEPS)), world, 3)
    assert launched == [HOST.inputs_device_ms, *[DRAFT_MS] * STEPS, PLAIN_MS] * 3


def test_a_wait_costs_what_the_host_would_have_done_meanwhile():
    world, waiting = Device(COSTS, HOST), Device(COSTS, HOST)
    for device in (world, waiting):
        run(DeviceDrafter(drafts_of(STEPS)), device, 4)
    for _ in range(4):
        end = waiting.launch(0.0, DRAFT_MS)
        waiting.wait(end)
        late = waiting.round_ms(1, np.ones(1), np.ones(1))
        world.launch(0.0, DRAFT_MS)
        early = world.round_ms(1, np.ones(1), np.ones(1))
    assert early == pytest.approx(PLAIN_MS + DRAFT_MS)
    assert late == pytest.approx(early + HOST.decide_ms + HOST.step_ms)


def test_outcomes_reach_the_policy_late_and_not_those_of_requests_that_ended():
    policy = drafts_of(2)
    seen = []
    policy.observe = lambda outcome: seen.append(outcome.num_accepted.tolist())
    drafter, world = DeviceDrafter(policy), Device(COSTS, HOST)
    for number in range(6):
        now = batch(matches=number, new=number in (0, 3))  # another request takes the slot over
        _, verified = drafter.draft(now, world)
        drafter.observe(now, verified, np.minimum(verified, now.matches))
        world.round_ms(1, verified, verified)
        assert len(seen) == {0: 0, 1: 0, 2: 0}.get(number, max(0, number - 2 - READBACK_DELAY - 1))
    drafter.draft(batch(matches=0), world)
    assert seen == [[2]]  # of round 3, the new request's first


def test_goodput_never_loses_where_nothing_is_accepted():
    world = Device(COSTS, HOST)
    policy = build_policy("goodput", BetaPosterior(1), 0, {})
    times = run(DeviceDrafter(policy), world, 400, matches=0, confidence=0.05)
    assert sum(times) < 400 * PLAIN_MS * 1.02


def test_a_recorded_trace_is_worth_the_same_whatever_the_order_of_measurement_noise():
    """Noise is the world's own: two replays with one seed are equal, with two they are not."""
    (trace,) = load_traces([str(TRACE)]).values()
    results = []
    for seed in (0, 0, 1):
        policy = build_policy("goodput", BetaPosterior(1, *trace.prior), seed, {})
        results.append(replay(trace, DeviceDrafter(policy), Device(COSTS, HOST, seed), 1).goodput_vs_plain)
    assert results[0] == results[1] != results[2]


def test_other_replays_add_up_what_each_part_takes():
    world = World(COSTS)
    for drafted, verified in itertools.product(([0], [2]), ([0], [2])):
        expected = world.verify_ms(1, sum(verified)) + DRAFT_MS * sum(drafted)
        assert world.round_ms(1, np.array(drafted), np.array(verified)) == pytest.approx(expected)
