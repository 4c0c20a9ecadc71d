"""The replay's device does things in the order in which Model Runner V2 does them: decisions, draft steps, outcomes."""

import numpy as np
import pytest
from device_replay import Device, DeviceDrafter, HostTimes

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.policy.thresholds import Confidence
from vllm_eesd.simulate.replay import replay
from vllm_eesd.simulate.world import default_costs
from vllm_eesd.traces.dense import DenseTrace, RequestTrace

#: Every draft is accepted, so what became of a round is known without looking.
K, NUM_TOKENS, POLICY_ARGS = 3, 27, {"threshold": 0.0}
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "confidence", "policy_args": POLICY_ARGS}
#: Launches are told apart by their times.
HOST = HostTimes(inputs_host_ms=0.02, launch_ms=0.03)
OPTIONS = {"max_model_len": 64, "block_size": 32, "max_num_seqs": 2}


@pytest.fixture
def events(monkeypatch):
    """What happens, in order, of what both have: "inputs", "draft step", and what the policy is asked and told."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    seen = []
    more, observe = Confidence.more, Confidence.observe

    def noted_more(self, slots, num_drafted, confidence):
        known = None if confidence is None else np.isfinite(confidence).tolist()
        seen.append(("decides", len(slots), num_drafted, known))
        return more(self, slots, num_drafted, np.nan_to_num(confidence) if confidence is not None else None)

    def noted_observe(self, outcome):
        seen.append(("learns", sorted(outcome.num_verified.tolist()), sorted(outcome.num_accepted.tolist())))
        observe(self, outcome)

    def note_calls(owner, name, event_of):
        original = getattr(owner, name)

        def noted(self, *args, **kwargs):
            seen.extend(event_of(*args))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(Confidence, "more", noted_more)
    monkeypatch.setattr(Confidence, "observe", noted_observe)
    launches = {HOST.inputs_host_ms: ["inputs"], HOST.launch_ms: ["draft step"]}
    note_calls(Device, "launch", lambda host_ms, device_ms: launches.get(host_ms, []))
    note_calls(EarlyExitSpeculator, "_prepare", lambda *args: ["inputs"])
    note_calls(EarlyExitSpeculator, "_draft", lambda *args: ["draft step"])
    return seen


@pytest.mark.parametrize("batch", [1, 2])
def test_the_replay_does_as_the_engine(engine, greedy, random_target, cloned_head, events, batch):
    spec = SPEC | {"model": cloned_head(random_target, 7, 7)}
    prompts = np.random.default_rng(4).integers(0, 512, (batch, 20)).tolist()
    with engine(random_target, spec, async_scheduling=True, **OPTIONS) as llm:
        events.clear()
        greedy(llm, prompts, max_tokens=NUM_TOKENS)
    served = events[:]
    events.clear()
    matches, confidences = np.full(NUM_TOKENS - 1, K), np.ones((NUM_TOKENS - 1, K), dtype=np.float32)
    trace = DenseTrace("m", "w", K, {}, [RequestTrace(matches, confidences)] * batch)
    policy = build_policy("confidence", BetaPosterior(batch), 0, POLICY_ARGS)
    replay(trace, DeviceDrafter(policy), Device(default_costs(), HOST), batch)
    # How many tokens a request has left the engine knows late: its last round is longer than it need be.
    last = max(i for i, event in enumerate(events) if event[:3] == ("decides", batch, 0))
    assert events.count("inputs") > 6 and served[:last] == events[:last]
