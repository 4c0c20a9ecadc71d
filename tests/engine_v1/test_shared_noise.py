"""A seed means plain vLLM's text, token for token, at any temperature, whatever was drafted and however scheduled."""

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from request_cases import LOGPROB_TOLERANCE, assert_same_position, plain_logprobs

from vllm_eesd.config import EESDConfig
from vllm_eesd.host.v1 import shared_noise
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.policy import Calibration

POLICIES = get_args(EESDConfig.model_fields["policy"].annotation)
SPEC = {"method": "eesd", "num_speculative_tokens": 5, "policy": "beta_ts"}
#: Prompts in chunks, several a batch, and few KV blocks: requests are preempted and come back, in chunks too.
HARD = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_gpu_blocks_override": 10, "block_size": 32}
#: What is asked of vLLM beside a seed, a temperature and a length.
KINDS = (
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"top_p": 0.8, "top_k": 50},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
    {"allowed_token_ids": list(range(10, 300))},
    {"min_tokens": 8, "stop_token_ids": list(range(0, 512, 5))},
    {"logprobs": 2},
    {"min_p": 0.05},
    {"min_p": 0.1, "logit_bias": {token: 2.5 for token in range(0, 512, 7)}, "top_p": 0.9},
    {"bad_words": list("aeiouxyz0123456789")},
    {"bad_words": list("abcdefgh"), "min_p": 0.02, "top_k": 60, "frequency_penalty": 0.3},
    {"structured": {"regex": "[a-h]{100}"}},
)
#: For each policy: 504 in all.
NUM_REQUESTS = 72
#: Where two tokens' scores are closer, the last bits of float32, which hang on a batch's shape, may choose: each of the
#: two logits is off by no more than log-probabilities are, and the temperature divides both.
NEAR_TIE = 2 * LOGPROB_TOLERANCE
#: Of this many texts (which have some ten thousand tokens), a score's density lets no more than a few be near-ties.
MAX_NEAR_TIES = 3


def some_requests(number, kinds=KINDS, temperatures=(0.3, 0.7, 1.0, 1.5), max_tokens=(8, 60)):
    """Return (prompt, parameters) of so many requests with a seed."""
    generator = np.random.default_rng(number)
    requests = []
    for index in range(number):
        prompt = generator.integers(0, 512, generator.choice((1, 5, 20, 50, 90))).tolist()
        length = int(generator.integers(*max_tokens))
        chosen = {"temperature": float(generator.choice(temperatures)), "seed": int(generator.integers(2**40))}
        requests.append((prompt, kinds[index % len(kinds)] | chosen | {"max_tokens": length}))
    return requests


def params_of(asked):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rest = {name: value for name, value in asked.items() if name != "structured"}
    if "structured" in asked:
        rest["structured_outputs"] = StructuredOutputsParams(**asked["structured"])
    return SamplingParams(ignore_eos=True, detokenize=False, **rest)


def ask(llm, requests):
    params = [params_of(asked) for _, asked in requests]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), plain_logprobs(o.outputs[0].logprobs)) for o in outputs]


@pytest.fixture(scope="module")
def requests():
    return some_requests(NUM_REQUESTS * len(POLICIES))


@pytest.fixture(scope="module")
def alone():
    """Requests with a temperature and nothing else."""
    return some_requests(32, kinds=({},), max_tokens=(30, 60))


class Plain:
    """Plain vLLM's answers, and the scores it chose by: logits, by the number it drew for the noise of a token."""

    def __init__(self):
        self.answers, self.logits = {}, {}

    def choose(self, logits, seeds):
        for row, seed in zip(logits, seeds.tolist(), strict=True):
            self.logits[seed] = row.clone()
        return self._choose(logits, seeds)

    def ask(self, llm, requests):
        with pytest.MonkeyPatch.context() as patch:
            self._choose = torch.ops._C.fused_gumbel_argmax
            patch.setattr(torch.ops._C, "fused_gumbel_argmax", self.choose)
            for request, answer in zip(requests, ask(llm, requests), strict=True):
                self.answers[repr(request)] = answer

    def differs(self, request, answer):
        """Return whether the answer is another one than plain vLLM's; "near-tie" where the last bits decide."""
        (tokens, logprobs), (expected, known) = answer, self.answers[repr(request)]
        at = next((i for i, pair in enumerate(itertools.zip_longest(tokens, expected)) if pair[0] != pair[1]), None)
        for position, theirs in itertools.islice(zip(logprobs or [], known or [], strict=False), at):
            assert_same_position(position, theirs)
        if at is None:
            return False
        if at >= min(len(tokens), len(expected)):
            return True
        generator = torch.Generator().manual_seed(request[1]["seed"])
        seed = torch.randint(2**31, (at + 1,), generator=generator)[-1:]
        logits = self.logits[seed.item()][None].clone()
        assert torch.ops._C.fused_gumbel_argmax(logits, seed).item() == expected[at]
        penalty = request[1].get("repetition_penalty", 1.0)
        logits[0, tokens[at]] += NEAR_TIE * penalty / request[1]["temperature"]
        return "near-tie" if torch.ops._C.fused_gumbel_argmax(logits, seed).item() == tokens[at] else True

    def verdicts(self, requests, answers):
        return [self.differs(*pair) for pair in zip(requests, answers, strict=True)]

    def assert_same(self, requests, answers):
        verdicts = self.verdicts(requests, answers)
        assert True not in verdicts, (verdicts.index(True), requests[verdicts.index(True)])
        assert verdicts.count("near-tie") <= MAX_NEAR_TIES


@pytest.fixture(scope="module")
def plain(engine, random_target_with_tokenizer, requests, alone):
    plain = Plain()
    with engine(random_target_with_tokenizer, max_num_seqs=64, skip_tokenizer_init=False) as llm:
        plain.ask(llm, requests + alone)
    return plain


@pytest.fixture(scope="module")
def llm(engine, random_target_with_tokenizer, cloned_head, plain):
    """The head is the target's own last layer: where a temperature is all, its drafts are the target's tokens.

    After plain vLLM's engine, whose end takes the process's groups away.
    """
    target = random_target_with_tokenizer
    with engine(target, SPEC | {"model": cloned_head(target, 7, 7)}, skip_tokenizer_init=False, **HARD) as llm:
        yield llm


def stats_of(llm):
    return llm.collective_rpc("eesd_stats")[0]


@pytest.mark.feature("seed", "the same answers, at any temperature")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_means_plain_vllms_text(llm, plain, requests, policy, preemptions):
    of_policy = requests[POLICIES.index(policy) :: len(POLICIES)]
    llm.collective_rpc("eesd_use_policy", args=(policy,))
    llm.collective_rpc("eesd_reset_stats")
    answers = [answer for request in of_policy[:4] for answer in ask(llm, [request])]
    answers += ask(llm, of_policy[4:7]) + ask(llm, of_policy[7:])
    plain.assert_same(of_policy, answers)
    stats = stats_of(llm)
    assert preemptions and 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.feature("seed, beside requests without one", "the same answers")
@pytest.mark.parametrize("others", [{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 1}], ids=str)
def test_beside_requests_without_a_seed(llm, plain, requests, others, preemptions):
    """One in three is greedy, one has no seed: some of its drafts are accepted, and some are not."""
    llm.collective_rpc("eesd_use_policy", args=("fixed",))
    llm.collective_rpc("eesd_reset_stats")
    seeded = [r for r in requests if len(r[1]) == 3 or "top_p" in others][:40]
    beside = [others | {"max_tokens": 40}, {"temperature": 0.0, "max_tokens": 40}]
    mixed = [both for i, request in enumerate(seeded) for both in (request, ([7, i, 12], beside[i % 2]))]
    answers = ask(llm, mixed)
    plain.assert_same(seeded, answers[::2])
    assert len({tuple(tokens) for tokens, _ in answers[1::4]}) == len(answers[1::4])


def test_drafts_of_the_right_distribution_are_all_accepted(llm, plain, alone):
    llm.collective_rpc("eesd_use_policy", args=("fixed",))
    llm.collective_rpc("eesd_reset_stats")
    plain.assert_same(alone, ask(llm, alone))
    stats = stats_of(llm)
    assert stats["accepted"] >= stats["drafted"] - MAX_NEAR_TIES * SPEC["num_speculative_tokens"] > 700


def test_the_policy_is_told_margins_of_these_requests_and_learns_them_apart(llm, alone, drafter_of, monkeypatch):
    """The head's distributions are the target's own: whatever the margin, the draft is right."""
    told, draw = [], DraftSampling._draw_by_shared_noise

    def noted(self, *args):
        made = draw(self, *args)
        told.extend(made[1].tolist())
        return made

    monkeypatch.setattr(DraftSampling, "_draw_by_shared_noise", noted)
    llm.collective_rpc("eesd_use_policy", args=("calibrated_ts",))
    drafter_of(llm).policy.calibration = calibration = Calibration()
    ask(llm, alone)
    learned = {name: np.sum(counts) for name, counts in calibration.state().items() if name.endswith("observed")}
    assert learned["shared_noise_observed"] > 200 and not learned["observed"] and not learned["drawn_observed"]
    assert len(set(told)) > 0.9 * len(told) > 200  # after a preemption some are drawn again


def test_noise_of_another_position_costs_acceptance_and_no_token(llm, plain, alone, monkeypatch):
    draw = DraftSampling._draw_by_shared_noise

    def of_the_next_position(self, rows, *args):
        new = [row for row in rows.tolist() if row not in self._ahead]
        made = draw(self, rows, *args)
        return draw(self, rows, *args) if new else made

    monkeypatch.setattr(DraftSampling, "_draw_by_shared_noise", of_the_next_position)
    llm.collective_rpc("eesd_use_policy", args=("fixed",))
    llm.collective_rpc("eesd_reset_stats")
    plain.assert_same(alone, ask(llm, alone))
    stats = stats_of(llm)
    assert 0 < stats["accepted"] < stats["drafted"] / 2


def test_a_generator_that_is_not_set_back_is_caught(llm, plain, requests, monkeypatch):
    """Of requests whose drafts are wrong now and then."""
    monkeypatch.setattr(shared_noise.SampledRows, "set_back", lambda self, sampled: None)
    llm.collective_rpc("eesd_use_policy", args=("fixed",))
    assert plain.verdicts(requests[:30], ask(llm, requests[:30])).count(True) > 10


@pytest.mark.fault("raising while drafts are made of shared noise", 1)
def test_a_fault_while_drafting_changes_no_token(llm, plain, alone, monkeypatch):
    draw, calls = DraftSampling._draw_by_shared_noise, itertools.count()

    def now_and_then(self, *args):
        made = draw(self, *args)
        if next(calls) % 40 == 20:
            raise RuntimeError("injected")
        return made

    monkeypatch.setattr(DraftSampling, "_draw_by_shared_noise", now_and_then)
    monkeypatch.setattr("vllm_eesd.host.circuit_breaker.MAX_FAULTS", math.inf)
    plain.assert_same(alone, ask(llm, alone))
    assert next(calls) > 60


def test_aborted_requests_change_nothing_for_the_others(llm, plain, alone):
    engine = llm.llm_engine
    for number, (prompt, asked) in enumerate(alone[:12]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params_of(asked))
    answers = {}
    for step in itertools.count():
        if step in (6, 12):
            engine.abort_request([str(step), str(step // 6)])
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids), None
        if not engine.has_unfinished_requests():
            break
    finished = [number for number in answers if number not in (1, 2, 6, 12)]
    assert len(finished) >= 9
    plain.assert_same([alone[number] for number in finished], [answers[number] for number in finished])
