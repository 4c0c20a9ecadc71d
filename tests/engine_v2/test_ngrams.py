"""N-gram drafts on V2: found on the device, taken by some rows while others draft, verified as what they are."""

import exact_distribution as exact
import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from vllm_eesd.policy.goodput import Goodput

K = 4
TIGHT = {"max_model_len": 128, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 8, "block_size": 32}
#: Every token of the target stands in it, so that whatever is sampled has an n-gram draft.
PROMPT, SAMPLING = (3, 1, 4, 0, 5, 2, 7, 6), {"temperature": 1.0}
#: Where kernels are interpreted a sample takes a third of a second.
NUM_SAMPLES, NUM_SAMPLES_PLANTED = (15_000, 15_000) if torch.cuda.is_available() else (110, 60)
SIGNIFICANCE = 1e-4
OPTIONS = {"max_num_seqs": 64, "max_model_len": 32, "num_gpu_blocks_override": 256, "block_size": 32}


@pytest.fixture
def some_ngrams_taken(monkeypatch):
    """Two requests of three take their n-gram drafts, whatever those are worth, and the others draft."""
    generator = np.random.default_rng(0)

    def take(self, slots, chances, limits):
        return np.where(generator.random(len(slots)) < 2 / 3, limits, 0)

    monkeypatch.setattr(Goodput, "take_ngrams", take)
    monkeypatch.setattr(Goodput, "more", lambda self, slots, *told: generator.random(len(slots)) < 0.9)


@pytest.mark.usefixtures("some_ngrams_taken")
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_greedy_identity(engine, greedy, plain_answers, random_target, cloned_head, asynchronous, monkeypatch):
    from vllm_eesd.host.v2.ngrams import DeviceNgrams

    generator = np.random.default_rng(3)
    prompts = [[1, 2, 3, 4] * 6, generator.integers(0, 512, 40).tolist(), [7], [5, 6] * 30]
    (expected,) = plain_answers(random_target, (prompts, 40), **TIGHT)
    spec = {"method": "eesd", "num_speculative_tokens": K, "model": cloned_head(random_target, 7, 7)}
    with engine(random_target, spec, async_scheduling=asynchronous, **TIGHT) as llm:
        assert greedy(llm, prompts, max_tokens=40) == expected
        assert greedy(llm, prompts, max_tokens=40) == expected
        without = {"extra_args": {"eesd_enabled": False}}
        greedy(llm, prompts[:1], max_tokens=5, **without)  # outcomes are read late
        (stats,) = llm.collective_rpc("eesd_stats")
        searches, find = [], DeviceNgrams.find
        monkeypatch.setattr(DeviceNgrams, "find", lambda self, step: searches.append(step) or find(self, step))
        assert greedy(llm, prompts, max_tokens=40, **without) == expected
        (after,) = llm.collective_rpc("eesd_stats")
    assert 0 < stats["copied_accepted"] < stats["copied"] < stats["drafted"]
    # Nothing is done where nobody may draft, but for a look when the batch is another.
    assert after["drafted"] == stats["drafted"] and after["rounds"] > stats["rounds"]
    assert 0 < len(searches) < 30


@pytest.fixture
def sampled(engine, eight_token_target, cloned_head, some_ngrams_taken):
    """Return run(num_samples): how often the engine gave each output, their probabilities, and its counters."""

    def run(num_samples):
        logits = exact.target_logits(eight_token_target, PROMPT)
        expected = exact.joint_distribution(logits, PROMPT, SAMPLING)
        spec = {"method": "eesd", "model": cloned_head(eight_token_target, 1, 1), "num_speculative_tokens": 3}
        with engine(eight_token_target, spec, **OPTIONS) as llm:
            counts = sum(exact.count_outputs(llm, PROMPT, [SAMPLING] * 8, num_samples))
            (stats,) = llm.collective_rpc("eesd_stats")
        return counts, expected, stats

    return run


def copying(counts, expected):
    """The p-value of how often the second token is the one that followed the first in the prompt."""
    pairs = (np.array(PROMPT[:-1]), np.array(PROMPT[1:]))
    copied, share = counts.sum(axis=(2, 3))[pairs].sum(), expected.sum(axis=(2, 3))[pairs].sum()
    return binomtest(int(copied), int(counts.sum()), share).pvalue


def test_sampled_output_has_the_targets_distribution(sampled):
    counts, expected, stats = sampled(NUM_SAMPLES)
    verdict = exact.judge([counts], [expected])
    assert verdict.p_value > SIGNIFICANCE, verdict
    assert copying(counts, expected) > SIGNIFICANCE
    assert 0 < stats["copied_accepted"] < stats["copied"] < stats["drafted"]


def test_an_ngram_draft_taken_for_a_drawn_one_is_caught(sampled, monkeypatch):
    """A row that takes its n-gram draft also ran draft steps, whose logits say what those would have drawn."""
    from vllm_eesd.host.v2 import ngrams

    put = ngrams.put_ngrams
    monkeypatch.setattr(ngrams, "put_ngrams", lambda *args: put(*args[:4]))
    counts, expected, _ = sampled(NUM_SAMPLES_PLANTED)
    assert copying(counts, expected) < SIGNIFICANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's LoRA kernels want 16-bit weights; answers differ then")
@pytest.mark.usefixtures("some_ngrams_taken")
@pytest.mark.feature("LoRA on Model Runner V2", "the same answers; such requests have n-gram drafts only")
def test_requests_with_an_adapter_among_others(engine, random_target, cloned_head, adapter):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    generator = np.random.default_rng(5)
    inputs = [{"prompt_token_ids": p} for p in ([1, 2, 3] * 8, generator.integers(0, 512, 30).tolist(), [5, 6] * 10)]
    spec = {"method": "eesd", "num_speculative_tokens": K, "model": cloned_head(random_target, 7, 7)}
    answers = []
    for options in ({}, {"spec": spec, "async_scheduling": True}):
        with engine(random_target, enable_lora=True, max_lora_rank=8, **TIGHT | options) as llm:
            for adapters in ([lora] * 3, [None, lora, lora], [None] * 3):
                outputs = llm.generate(inputs, params, lora_request=adapters, use_tqdm=False)
                answers.append([list(output.outputs[0].token_ids) for output in outputs])
                if options:
                    (stats,) = llm.collective_rpc("eesd_stats")
                    assert stats["copied"] > 0
                    # Requests with an adapter copy or draft nothing; the others do either.
                    assert (stats["drafted"] == stats["copied"]) == (None not in adapters)
                    llm.collective_rpc("eesd_reset_stats")
    assert answers[:3] == answers[3:]
    assert answers[0] != answers[2]  # the adapter does something
