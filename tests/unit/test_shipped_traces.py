"""What the default policy must reach on the recorded traces of the embedded model, by simulation.

The bars are about draft lengths, so they are held by the exit head's drafts alone; n-gram drafts come on top.
"""

from functools import cache
from pathlib import Path

import pytest

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.run import load_traces, simulate
from vllm_eesd.simulate.world import World

DIRECTORY = Path(__file__).resolve().parents[2] / "models" / "traces"
WORKLOADS = ("held_out_code", "repetitive_code", "random_tokens")
TRACES = load_traces([str(DIRECTORY / f"{name}.jsonl.gz") for name in WORKLOADS])
#: Tokens of the longest draft recorded: an engine's, where n-gram drafts are used.
K = 16


@cache
def goodputs(name):
    """Goodput relative to plain decoding, by policy; of `goodput` by the exit head alone."""
    found = {o.policy: o.replay.goodput_vs_plain for o in simulate(name, TRACES[name], ["beta_ts"])}
    return found | {"goodput": goodput(name, ngram=False)}


@cache
def goodput(name, ngram, batch=1):
    policy = build_policy("goodput", BetaPosterior(batch, *TRACES[name].prior), 0, {"ngram": ngram})
    return replay(TRACES[name], PolicyDrafter(policy), World(TRACES[name].costs), batch).goodput_vs_plain


def test_the_mixture_beats_every_alternative():
    found = goodputs("mixed")
    assert found["goodput"] >= 1.03 * found["best_fixed"]
    assert found["goodput"] >= 1.10 * found["beta_ts"]
    assert found["goodput"] >= 1.05 * found["vllm_adaptive"]
    assert found["goodput"] >= 0.75 * found["oracle"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_trace_is_lost_to_a_fixed_length(name):
    assert goodputs(name)["goodput"] >= 0.99 * goodputs(name)["best_fixed"]


@pytest.mark.parametrize("name", ["held_out_code", "repetitive_code"])
@pytest.mark.parametrize("batch", [1, 8])
def test_ngram_drafts_come_on_top_where_text_repeats(name, batch):
    assert goodput(name, True, batch) >= 1.2 * goodput(name, False, batch)


@pytest.mark.parametrize("batch", [1, 8])
def test_and_cost_nothing_where_it_does_not(batch):
    assert goodput("random_tokens", True, batch) >= 0.98


@pytest.mark.parametrize("draft_ratio", [0.05, 0.1, 0.2, 0.4, 0.6])
def test_random_tokens_cost_the_probe_budget_and_two_rounds_a_request(draft_ratio):
    """Whatever a draft step costs relative to a plain step."""
    trace = TRACES["random_tokens"]
    recorded = World(trace.costs)
    plain_ms = recorded.plain_ms(1)
    scale = draft_ratio * plain_ms / recorded.draft_step_ms(1)
    world = World(trace.costs, draft_scale=scale)
    policy = build_policy("goodput", BetaPosterior(1, *trace.prior), 0, {})
    replayed = replay(trace, PolicyDrafter(policy), world)
    loss = 1 / replayed.goodput_vs_plain - 1
    longest_round = world.verify_ms(1, 8) + world.draft_round_ms(1) + 8 * world.draft_step_ms(1)
    two_rounds = 2 * (longest_round / plain_ms - 1)
    assert loss <= 0.01 + two_rounds * len(trace.requests) / sum(replayed.tokens)


def test_the_traces_are_what_they_are_called():
    """A workload that drafts easily, one easier, one impossible; else the bars above would mean nothing."""
    matches = {name: [r.matches.mean() for r in TRACES[name].requests] for name in WORKLOADS}
    mean = {name: sum(m) / len(m) for name, m in matches.items()}
    assert mean["random_tokens"] < 0.3 < 2 < mean["held_out_code"] < mean["repetitive_code"] * 1.2
    assert all(TRACES[name].num_speculative_tokens == K for name in WORKLOADS)
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 1 << 20


@pytest.mark.parametrize("name", WORKLOADS)
def test_they_hold_texts_and_the_time_of_a_plain_step(name):
    """Without a plain step's time every goodput relative to it would be a guess."""
    trace = TRACES[name]
    assert all(len(request.prompt) and len(request.emitted) >= len(request.matches) for request in trace.requests)
    for batch in (1, 4, 8):
        assert trace.costs["verify_ms"][str(batch)][0][0] == 0.0
