"""What the adapters know of their requests, on a runner that is a few attributes."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_eesd.host.v1.batch import BatchSlots, V1Step
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.policy import DRAWN, GREEDY, SHARED_NOISE, BetaPosterior, build_policy
from vllm_eesd.round.requests import RunningRequests


def make_runner(**requests):
    described = {}
    for request_id, (max_tokens, extra_args) in requests.items():
        params = SimpleNamespace(
            extra_args=extra_args,
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=[7],
            ignore_eos=request_id == "ignoring",
            eos_token_id=5,
            presence_penalty=1.0 if request_id == "penalised" else 0,
            frequency_penalty=0,
            repetition_penalty=1.0,
            logit_bias=None,
            bad_words=None,
            allowed_token_ids=None,
            structured_outputs=None,
            seed=None,
            min_p=0.0,
            thinking_token_budget=None,
        )
        described[request_id] = SimpleNamespace(sampling_params=params, num_prompt_tokens=10, lora_request=None)
    batch = SimpleNamespace(req_ids=list(requests))
    return SimpleNamespace(requests=described, input_batch=batch, max_model_len=100)


def step_of(runner, finished=()):
    scheduled = SimpleNamespace(finished_req_ids=set(finished), preempted_req_ids=None, total_num_scheduled_tokens=0)
    return V1Step(runner, scheduled, [[] for _ in runner.input_batch.req_ids])


def test_requests_keep_their_slots_and_their_wishes():
    policy = build_policy("fixed", BetaPosterior(4), 0, {})
    running, batch_slots = RunningRequests(4, 6, policy), BatchSlots(4)
    runner = make_runner(free=(50, None), short=(3, None), penalised=(None, {"eesd_max_draft_tokens": 2}))
    slots = batch_slots.of(step_of(runner), running.admit)
    # `short` may emit three tokens: two drafts and one of the target's own fit.
    assert running.draft_limits(slots, np.array([10, 10, 10]), [[1], [1], [1]]).tolist() == [6, 2, 2]
    assert running.draft_limits(slots, np.array([10, 10, 98]), [[], [7], [1]]).tolist() == [0, 0, 1]
    assert running.updates_shared_prior[slots].tolist() == [True, True, False]
    runner.input_batch.req_ids = ["penalised", "free"]
    assert batch_slots.of(step_of(runner, finished={"short"}), running.admit).tolist() == slots[[2, 0]].tolist()
    assert len(batch_slots) == 2


def test_a_request_drafts_on_after_a_token_that_does_not_end_it():
    """An EOS that it ignores, which vLLM counts among `all_stop_token_ids` all the same."""
    running, batch_slots = RunningRequests(4, 6, build_policy("fixed", BetaPosterior(4), 0, {})), BatchSlots(4)
    runner = make_runner(ignoring=(50, None), other=(50, None))
    slots = batch_slots.of(step_of(runner), running.admit)
    for token, limits in ((5, [6, 0]), (7, [0, 0]), (1, [6, 6])):
        assert running.draft_limits(slots, np.array([10, 10]), [[token], [token]]).tolist() == limits


def test_a_prompt_that_runs_again_is_no_decoding():
    """Rows: a new prompt, its first token, a decode with drafts, a prompt and its output run again, one padded."""
    runner = make_runner(new=(50, None), first=(50, None), decode=(50, None), again=(50, None), padded=(50, None))
    batch = runner.input_batch
    batch.num_tokens_no_spec, batch.num_prompt_tokens = np.array([10, 11, 15, 14, 12]), np.full(5, 10)
    drafts = {"decode": [1, 2, 3], "padded": [-1, -1]}
    scheduled = SimpleNamespace(
        finished_req_ids=set(),
        preempted_req_ids=None,
        total_num_scheduled_tokens=41,
        num_scheduled_tokens={"new": 5, "first": 10, "decode": 4, "again": 13, "padded": 3},
        scheduled_spec_decode_tokens=drafts,
    )
    step = V1Step(runner, scheduled, [[], [1], [1, 2], [1], [1]])
    assert step.decoded().tolist() == [False, False, True, False, True]


def test_a_request_whose_end_no_round_heard_of_gives_its_slot_back():
    """vLLM tells the last ends before an idle server in a step without tokens, which drafts nothing."""
    policy = build_policy("fixed", BetaPosterior(4), 0, {})
    running, batch_slots = RunningRequests(4, 6, policy), BatchSlots(4)
    runner = make_runner(first=(50, None), second=(50, None))
    batch_slots.of(step_of(runner), running.admit)
    later = make_runner(third=(50, None))
    batch_slots.of(step_of(later), running.admit)
    assert len(batch_slots) == 1


@pytest.mark.parametrize("knows_noise", [True, False])
@pytest.mark.parametrize("unseeded_too", [True, False])
def test_the_policy_is_told_the_kind_of_every_requests_drafts(knows_noise, unseeded_too):
    """On V1 a request that asks for min_p, logit_bias or a thinking budget is verified by shared noise too."""
    policy, shared = build_policy("fixed", BetaPosterior(8), 0, {}), SHARED_NOISE if knows_noise else DRAWN
    asked = {
        "greedy": ({"temperature": 0.0, "seed": 1}, GREEDY),
        "sampled": ({}, shared if unseeded_too else DRAWN),
        "bound": ({"structured_outputs": object()}, shared if unseeded_too else GREEDY),
        "seeded": ({"seed": 0}, shared),
        "seeded and bound": ({"seed": 3, "structured_outputs": object()}, shared),
        "min_p": ({"min_p": 0.1}, shared),
        "logit_bias": ({"logit_bias": {1: 2.0}}, shared),
        "thinking": ({"thinking_token_budget": 0}, shared),
    }
    runner = make_runner(**dict.fromkeys(asked, (50, None)))
    for name, (changes, _) in asked.items():
        vars(runner.requests[name].sampling_params).update({"temperature": 0.8} | changes)
    sampling = DraftSampling(unseeded_too)
    sampling._knows_noise = knows_noise
    slots = BatchSlots(8).of(step_of(runner), RunningRequests(8, 6, policy, None, sampling.kind_of).admit)
    assert policy.kinds[slots].tolist() == [kind for _, kind in asked.values()]
    slots = BatchSlots(8).of(step_of(runner), RunningRequests(8, 6, policy).admit)
    assert not policy.kinds[slots].any(), "drafts of all requests are greedy"
