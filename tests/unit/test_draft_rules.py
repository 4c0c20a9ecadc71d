"""What deciding a round ahead, as Model Runner V2 does, is worth on a device whose host runs ahead of it.

Costs are a roofline of an H200, acceptance that of the recorded traces. docs/design.md tells of other rules.
"""

from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from device_replay import Device, DeviceDrafter, HostTimes
from roofline import GPUS, Roofline, Shape, costs_of

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.simulate.replay import replay
from vllm_eesd.simulate.run import load_traces

TRACES = Path(__file__).resolve().parents[2] / "models" / "traces"
LLAMA_8B = Shape(32, 4096, 128256, 14336, 32, 8, 128)
#: Model Runner V2's longest draft, unless told otherwise.
LONGEST = 8
#: What some 45 operators outside any graph cost a round, and 12 after each draft step: estimates.
MANY_LAUNCHES = HostTimes(inputs_host_ms=0.28, inputs_device_ms=0.1, launch_ms=0.06, tail_ms=0.022)


class Waits(DeviceDrafter):
    """The host decides after each draft step but the first, by the confidence of the step before the one that runs."""

    def __init__(self, policy):
        super().__init__(policy)
        policy.costs.all_rows_draft = False

    def _round_of(self, batch, world):
        self.session.round = round_ = DraftRound(self.policy, batch.slots, batch.limits)
        ends = []
        while len(ends) < batch.limits.max(initial=0) and (round_.limits[round_.rows] > len(ends)).any():
            if not ends:
                self._prepare(world, len(batch.slots))
            ends.append(world.launch(world.host.launch_ms, world.draft_ms(len(batch.slots))))
            if len(ends) > 1:
                world.wait(ends[-2])
                round_.tell(batch.confidences[round_.rows, len(ends) - 2])
        return round_.lengths, len(ends)


RULES = {
    "waits": (Waits, MANY_LAUNCHES),
    "ahead": (DeviceDrafter, HostTimes()),
    "n-grams": (DeviceDrafter, HostTimes()),
}


def goodput(rule, workload, batch, seed):
    """Tokens per time relative to plain decoding on the same device."""
    (trace,) = load_traces([str(TRACES / f"{workload}.jsonl.gz")]).values()
    cut = [
        replace(r, matches=np.minimum(r.matches, LONGEST), confidences=r.confidences[:, :LONGEST])
        for r in trace.requests
    ]
    requests = cut * ceil(2 * batch / len(cut))
    trace = replace(trace, requests=requests, num_speculative_tokens=LONGEST)
    drafter, host = RULES[rule]
    policy = build_policy("goodput", BetaPosterior(batch, *trace.prior), seed, {"ngram": rule == "n-grams"})
    machine = Roofline(LLAMA_8B, 2, 1, GPUS["h200"], context=1024, reached=0.8)
    world = Device(costs_of(machine, batch, LONGEST), host, seed)
    # As an engine's policy, which starts from steps timed before any request was there.
    forwards = [(batch * (1 + n), world.verify_ms(batch, batch * n)) for n in (0, 1, 3, LONGEST)]
    policy.costs.start_from(forwards, [(batch, world.draft_ms(batch))])
    return replay(trace, drafter(policy), world, batch).goodput_vs_plain


@pytest.mark.parametrize(("batch", "factor", "num_seeds"), [(1, 1.08, 3), (32, 1.03, 2)])
def test_deciding_ahead_beats_waiting_for_confidences(batch, factor, num_seeds):
    found = {
        rule: [goodput(rule, "held_out_code", batch, seed) for seed in range(num_seeds)] for rule in ("waits", "ahead")
    }
    assert np.mean(found["ahead"]) >= factor * np.mean(found["waits"])


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
def test_where_nothing_can_be_predicted_it_costs_next_to_nothing(batch):
    assert min(goodput(rule, "random_tokens", batch, 0) for rule in ("ahead", "n-grams")) >= 0.98
