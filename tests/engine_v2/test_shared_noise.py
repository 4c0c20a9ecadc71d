"""On Model Runner V2 as well a seed means plain vLLM's text: noise is counted by seed, position and token."""

import itertools

import numpy as np
import pytest
import torch

from vllm_eesd.policy import SHARED_NOISE, Calibration

K = 4
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "beta_ts"}
#: Asynchronous, prompts in chunks, few KV blocks.
HARD = {
    "async_scheduling": True,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 8,
    "block_size": 32,
    "max_model_len": 128,
}
KINDS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"allowed_token_ids": list(range(10, 300))},
    {"min_tokens": 6, "stop_token_ids": list(range(0, 512, 5))},
    {"logprobs": 1},
    {"logit_bias": {token: 2.5 for token in range(0, 512, 7)}},
    {"bad_words": list("aeiouxyz0123456789")},
    {"structured": {"regex": "[a-h]{60}"}},
]
if torch.cuda.is_available():  # Triton's interpreter cannot run vLLM's kernel for these
    KINDS += [{"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.8, "top_k": 50}, {"min_p": 0.05}]
POLICIES = "beta_ts", "fixed", "goodput", "calibrated_ts", "confidence"
NUM_TOKENS = 14
#: For each policy one of every kind: Triton's interpreter has its time.
NUM_REQUESTS = 9
#: Where two tokens' scores are closer, the last bits of float32 may choose; see tests/engine_v1/test_shared_noise.py.
#: One text in so few may be such a case.
MAX_NEAR_TIES = 1


def some_requests(number, kinds):
    generator = np.random.default_rng(number)
    requests = []
    for index in range(number):
        prompt = generator.integers(0, 512, generator.choice((1, 5, 20, 60))).tolist()
        chosen = {"temperature": float(generator.choice((0.5, 1.0, 1.4))), "seed": int(generator.integers(2**60))}
        requests.append((prompt, kinds[index % len(kinds)] | chosen))
    return requests


def ask(llm, requests):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = []
    for _, asked in requests:
        given = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False} | asked
        if grammar := given.pop("structured", None):
            given["structured_outputs"] = StructuredOutputsParams(**grammar)
        params.append(SamplingParams(**given))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def requests():
    """Some of every kind for each policy, and at the end such as want a temperature only."""
    return some_requests(NUM_REQUESTS * len(POLICIES), KINDS) + some_requests(8, [{}])


@pytest.fixture(scope="module")
def expected(engine, random_target_with_tokenizer, requests):
    with engine(random_target_with_tokenizer, skip_tokenizer_init=False) as llm:
        return ask(llm, requests)


@pytest.fixture(scope="module")
def llm(engine, random_target_with_tokenizer, cloned_head, expected):
    """The head is the target's own last layer: where a temperature is all, its drafts are the target's tokens."""
    target = random_target_with_tokenizer
    with engine(target, SPEC | {"model": cloned_head(target, 7, 7)}, skip_tokenizer_init=False, **HARD) as llm:
        yield llm


def num_different(answers, expected):
    return sum(answer != other for answer, other in zip(answers, expected, strict=True))


def stats_after(llm, policy, requests):
    llm.collective_rpc("eesd_use_policy", args=(policy,))
    llm.collective_rpc("eesd_reset_stats")
    answers = ask(llm, requests)
    return answers, llm.collective_rpc("eesd_stats")[0]


@pytest.mark.feature("seed, V2", "the same answers, at any temperature")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_means_plain_vllms_text(llm, requests, expected, policy, preemptions):
    """Those of the policy and those that want a temperature only, eight at a time, and one by itself."""
    chosen = [*range(POLICIES.index(policy), NUM_REQUESTS * len(POLICIES), len(POLICIES)), *range(-8, 0)]
    of_policy = [requests[number] for number in chosen]
    answers, stats = stats_after(llm, policy, of_policy)
    answers[0] = ask(llm, of_policy[:1])[0]
    assert num_different(answers, [expected[number] for number in chosen]) <= MAX_NEAR_TIES
    assert preemptions and (0 < stats["accepted"] < stats["drafted"] or policy == "goodput"), preemptions


@pytest.mark.parametrize("other", [{}, {"repetition_penalty": 1.2}], ids=["ours", "vLLM's"])
def test_beside_requests_without_a_seed(llm, requests, expected, other):
    """Greedy requests, and requests whose drafts are verified by the ratio of probabilities, in every batch."""
    beside = [([5, 6, n], other | {"temperature": 0.9 * (n % 2)}) for n in range(8)]
    mixed = list(itertools.chain(*zip(requests[-8:], beside, strict=True)))
    answers, stats = stats_after(llm, "fixed", mixed)
    assert num_different(answers[::2], expected[-8:]) <= MAX_NEAR_TIES
    assert stats["accepted"] > stats["drafted"] / 2
    assert all(0 <= token < 512 for answer in answers for token in answer)


def test_drafts_of_the_right_distribution_are_all_accepted(llm, requests, expected):
    answers, stats = stats_after(llm, "fixed", requests[-8:])
    assert num_different(answers, expected[-8:]) <= MAX_NEAR_TIES
    assert stats["accepted"] >= stats["drafted"] - K * MAX_NEAR_TIES > 50


def test_the_policy_is_told_margins_of_these_requests_and_learns_them_apart(llm, requests, runner_of):
    llm.collective_rpc("eesd_use_policy", args=("calibrated_ts",))
    policy = runner_of(llm).speculator.policy
    policy.calibration = calibration = Calibration()
    ask(llm, requests[-8:])
    state = calibration.state()
    observed = {name: np.sum(counts, axis=0) for name, counts in state.items() if name.endswith("observed")}
    assert observed["shared_noise_observed"].sum() > 40
    # Where nothing is known of a margin it is uniform; the largest probability of 512 tokens is rarely so small.
    assert observed["shared_noise_observed"][:5].sum() > 5
    assert not observed["observed"].any() and not observed["drawn_observed"].any()


def test_a_ratio_verified_row_is_told_nothing_of_its_noise(llm, requests, runner_of, monkeypatch):
    """Beside rows that share theirs: of the others, what the draft step says of the most probable token."""
    from vllm_eesd.host.v2 import draft_steps

    seen, leaks = [], []
    shared_draw = draft_steps.shared_draw

    def noted(logits, slots, temperature, seeds, positions, shares_noise, tokens, confidences):
        made = shared_draw(
            logits, slots, temperature, seeds, positions, shares_noise | bool(leaks), tokens, confidences
        )
        others = ~shares_noise[slots.clamp(min=0)] & (slots >= 0)
        seen.append((made[1][others] == confidences[others]).tolist())
        return made

    monkeypatch.setattr(draft_steps, "shared_draw", noted)
    llm.collective_rpc("eesd_use_policy", args=("fixed",))
    mixed = list(
        itertools.chain(*zip(requests[-8:-4], [([5, 6, n], {"temperature": 0.9}) for n in range(4)], strict=True))
    )
    ask(llm, mixed)
    told = list(itertools.chain(*seen))
    assert len(told) > 10 and all(told)
    seen.clear()
    leaks.append("planted")
    ask(llm, mixed)
    assert not all(itertools.chain(*seen)), "a margin told of every row is noticed"


def test_noise_of_another_position_costs_acceptance_and_no_token(llm, requests, expected, monkeypatch):
    from vllm_eesd.host.v2 import draft_steps

    def elsewhere(logits, slots, temperature, seeds, positions, *args):
        return shared_draw(logits, slots, temperature, seeds, positions + 1, *args)

    shared_draw = draft_steps.shared_draw
    monkeypatch.setattr(draft_steps, "shared_draw", elsewhere)
    answers, stats = stats_after(llm, "fixed", requests[-8:])
    assert num_different(answers, expected[-8:]) <= MAX_NEAR_TIES
    assert stats["accepted"] < stats["drafted"] / 2


def test_verification_by_another_noise_is_caught(llm, requests, expected, monkeypatch):
    from vllm_eesd.host.v2 import verification

    gumbel_sample = verification.gumbel_sample
    monkeypatch.setattr(
        verification, "gumbel_sample", lambda *args, **kwargs: gumbel_sample(*args, **(kwargs | {"is_drafting": True}))
    )
    answers, _ = stats_after(llm, "fixed", requests[-8:])
    assert num_different(answers, expected[-8:]) > 4


def test_the_kinds_of_draft_steps(llm, requests, monkeypatch):
    from vllm_eesd.host.v2.draft_steps import DraftSteps

    kinds, run_step = set(), DraftSteps._run_step

    def noted(self, *args, **kwargs):
        kinds.add(self.draws)
        run_step(self, *args, **kwargs)

    monkeypatch.setattr(DraftSteps, "_run_step", noted)
    ask(llm, requests[-2:])
    assert kinds == {SHARED_NOISE}
