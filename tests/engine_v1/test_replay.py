"""Given the same seed and the same costs, Model Runner V1 and the replay of a trace decide alike, round by round."""

import json
from pathlib import Path

import numpy as np
import pytest

from vllm_eesd.host.round_setup import build_policy_of
from vllm_eesd.policy import POLICIES, CostModel
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, RequestTrace

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
K, NUM_TOKENS, BATCH = 8, 60, 3
#: Drafts to the end, and wants every confidence: what a dense trace holds.
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "confidence", "policy_args": {"threshold": 0.0}}


def keep_costs(patch):
    """Let nobody's clock teach what steps cost: a draft step takes its layers' share of a plain one."""
    from vllm_eesd.host.v1.proposer import EarlyExitProposer

    patch.setattr(EarlyExitProposer, "profile_costs", lambda self, runner: None)
    for name in ("observe_verify", "observe_draft_step", "observe_draft_round", "observe_decision"):
        patch.setattr(CostModel, name, lambda self, *args: None)


class Noted(PolicyDrafter):
    """Notes every round as (request, tokens submitted, of those accepted)."""

    def __init__(self, policy):
        super().__init__(policy)
        self.rounds, self._number = [], {}

    def observe(self, batch, num_verified, num_accepted):
        super().observe(batch, num_verified, num_accepted)
        for slot, new, *verdict in zip(batch.slots, batch.new, num_verified, num_accepted, strict=True):
            self._number[slot] = self._number.get(slot, -1) + new
            self.rounds.append(((int(slot), int(self._number[slot])), *map(int, verdict)))

    def requests(self):
        return of_each(self.rounds)


def of_each(rounds):
    """The rounds of each request, in the order the requests began: [[(tokens submitted, of those accepted)]]."""
    found = {}
    for request, *verdict in rounds:
        found.setdefault(request, []).append(tuple(verdict))
    return list(found.values())


@pytest.fixture(scope="module")
def recorded(engine, greedy, drafter_of, embedded_model):
    """An engine, its prompts and what drafting would be worth at each of their positions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:BATCH]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"][-96:] for line in lines]
    with pytest.MonkeyPatch.context() as patch:
        keep_costs(patch)
        options = {"max_model_len": 256, "max_num_seqs": BATCH, "enable_prefix_caching": False}
        with engine(str(embedded_model), SPEC, **options) as llm:
            llm.collective_rpc("eesd_record_dense")
            greedy(llm, prompts, max_tokens=NUM_TOKENS + 1 + K)
            (found,) = llm.collective_rpc("eesd_take_dense")
            requests = [RequestTrace(**{name: np.array(values) for name, values in one.items()}) for one in found]
            prior = drafter_of(llm).config.exit_head.prior
            yield llm, prompts, DenseTrace("m", "w", K, {}, requests, (prior.alpha, prior.beta))


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_decides_in_the_engine_as_in_the_replay(recorded, greedy, drafter_of, name, batch):
    llm, prompts, trace = recorded
    drafter = drafter_of(llm)

    def new_policy():
        return build_policy_of(drafter.config, BATCH, name, like=build_policy_of(drafter.config, BATCH))

    drafter._ngrams = NgramDrafter(BATCH, K)
    drafter.use_policy(new_policy())
    llm.collective_rpc("eesd_take_rounds")
    for first in range(0, len(prompts), batch):
        greedy(llm, prompts[first : first + batch], max_tokens=NUM_TOKENS + 1)
    (rounds,) = llm.collective_rpc("eesd_take_rounds")
    served = of_each((r["request_id"], len(r["draft"]), r["num_accepted"]) for r in rounds)
    replayed = Noted(new_policy())
    replay(trace, replayed, World(), batch)
    # Of a batch, up to the first end: vLLM keeps a request that ended for one round more, then moves rows.
    length = min(map(len, served)) if batch > 1 else None
    assert [request[:length] for request in served] == [request[:length] for request in replayed.requests()]
    assert len({verified for request in served for verified, _ in request}) > 2
