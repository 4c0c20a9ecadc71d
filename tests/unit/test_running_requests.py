"""What the adapters know of their requests, on a runner that is a few attributes."""

from types import SimpleNamespace

import numpy as np

from vllm_eesd.host.running_requests import RunningRequests
from vllm_eesd.policy import BetaPosterior, Dispatch, build_policy


def make_runner(**requests):
    described = {}
    for request_id, (max_tokens, extra_args) in requests.items():
        params = SimpleNamespace(
            extra_args=extra_args,
            max_tokens=max_tokens,
            all_stop_token_ids={7},
            presence_penalty=1.0 if request_id == "penalised" else 0,
            frequency_penalty=0,
            repetition_penalty=1.0,
            bad_words=None,
            allowed_token_ids=None,
            structured_outputs=None,
        )
        described[request_id] = SimpleNamespace(sampling_params=params, num_prompt_tokens=10, lora_request=None)
    batch = SimpleNamespace(req_ids=list(requests))
    return SimpleNamespace(requests=described, input_batch=batch, max_model_len=100)


def test_requests_keep_their_slots_and_their_wishes():
    policy = Dispatch("fixed", lambda name: build_policy(name, BetaPosterior(4), 0, {}))
    running = RunningRequests(max_num_reqs=4, num_speculative_tokens=6, policy=policy)
    runner = make_runner(free=(50, None), short=(3, None), penalised=(None, {"eesd_max_draft_tokens": 2}))
    slots = running.slots_of(runner, finished=set())
    # `short` may emit three tokens: two drafts and the bonus token fit.
    assert running.draft_limits(slots, np.array([10, 10, 10]), [[1], [1], [1]]).tolist() == [6, 2, 2]
    assert running.draft_limits(slots, np.array([10, 10, 98]), [[], [7], [1]]).tolist() == [0, 0, 1]
    assert running.shares[slots].tolist() == [True, True, False]
    runner.input_batch.req_ids = ["penalised", "free"]
    assert running.slots_of(runner, finished={"short"}).tolist() == slots[[2, 0]].tolist()
    assert len(running) == 2


def test_a_request_whose_end_no_round_heard_of_gives_its_slot_back():
    """vLLM tells the last ends before an idle server in a step without tokens, which drafts nothing."""
    policy = Dispatch("fixed", lambda name: build_policy(name, BetaPosterior(4), 0, {}))
    running = RunningRequests(max_num_reqs=4, num_speculative_tokens=6, policy=policy)
    runner = make_runner(first=(50, None), second=(50, None))
    running.slots_of(runner, finished=set())
    later = make_runner(third=(50, None))
    running.slots_of(later, finished=set())
    assert len(running) == 1
