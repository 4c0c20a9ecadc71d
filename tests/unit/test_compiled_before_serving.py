"""Numba compiles whatever a round calls before a request is there: a round must not wait for a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = Path(__file__).resolve().parents[2] / "models" / "traces" / "held_out_code.jsonl.gz"

#: In a process of its own, where nothing is compiled yet: the signatures that each compiled function has before and
#: after a replay of the shipped traces, in rounds decided ahead (V2) or step by step (V1), alone and in a batch.
CHILD = """
import gc
import sys
from dataclasses import replace

import numba
import numpy as np
from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.round.ngram import NgramDrafter, NgramRates
from device_replay import Device, DeviceDrafter, HostTimes
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.world import World, default_costs
from vllm_eesd.traces.read import read_dense

ahead, trace, longest = sys.argv[1] == "ahead", read_dense(sys.argv[2]), 16
trace = replace(trace, requests=trace.requests[:8])
policies = [build_policy("goodput", BetaPosterior(8), 0, {}) for _ in (1, 5)]
NgramRates(8, longest, delayed=True)
NgramDrafter(8, longest)  # V2's are found by a kernel, which this stands in for

def signatures():
    found = (o for o in gc.get_objects() if isinstance(o, numba.core.registry.CPUDispatcher))
    return {f.py_func.__qualname__: len(f.signatures) for f in found if f.py_func.__module__.startswith("vllm_eesd")}

before = signatures()
for policy, size in zip(policies, (1, 5)):
    reset = policy.reset
    for kind in range(3):
        policy.reset = lambda slots, *asked: reset(slots, None, np.full(len(slots), kind))
        drafter = DeviceDrafter(policy) if ahead else PolicyDrafter(policy)
        world = Device(default_costs(), HostTimes()) if ahead else World(default_costs())
        replay(trace, drafter, world, size)
after = signatures()
assert before and any(before.values())
print({name: after[name] - before[name] for name in after if after[name] != before.get(name)})
"""


@pytest.mark.parametrize("kind", ["ahead", "step by step"])
def test_a_round_calls_nothing_that_is_not_compiled(kind):
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # for device_replay
    command, environment = [sys.executable, "-c", CHILD, kind, str(TRACE)], {"PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "{}"
