"""Greedy output in float32 equals plain V2's, token for token, whatever is drafted and however it is scheduled.

One plain engine says what is right; the engines under test draft ragged lengths of which a quarter is wrong, in prompt
chunks, with too few KV blocks for everybody, and up to the model's longest sequence.
"""

import numpy as np
import pytest
import torch

K = 4
#: Of log-probabilities from batches of different shapes: float32's, or on a GPU TF32's, in which attention multiplies.
LAST_BITS = 5e-3 if torch.cuda.is_available() else 1e-4
#: Chunked prompts, prefix caching, blocks that run out.
TIGHT = {"max_model_len": 128, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 8, "block_size": 32}
#: Ragged by chance, and ragged by confidences that the host reads one draft step late.
ENGINES = {
    "synchronous": ({"policy": "beta_ts"}, {"async_scheduling": False}),
    "asynchronous": ({"policy": "beta_ts"}, {"async_scheduling": True}),
    "asynchronous, by confidence": (
        {"policy": "confidence", "policy_args": {"threshold": 0.05}},
        {"async_scheduling": True},
    ),
    "asynchronous, shorter in larger batches": (
        {"policy": "fixed", "num_speculative_tokens_per_batch_size": [[1, 2, K], [3, 4, 2], [5, 8, 0]]},
        {"async_scheduling": True},
    ),
    "asynchronous, exit_head and kv_fill": ({"policy": "beta_ts"}, {"async_scheduling": True}),
}

ASYNCHRONOUS = pytest.mark.feature("asynchronous scheduling (Model Runner V2)", "the same answers")


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(2)
    return [generator.integers(0, 512, n).tolist() for n in (40, 7, 64, 1, 90)]


def sampling_of_each_kind():
    """One request per feature that changes what is sampled, or what is told of it."""
    from vllm import SamplingParams

    common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(max_tokens=16, logprobs=3, **common),
        SamplingParams(max_tokens=16, presence_penalty=1.5, **common),
        SamplingParams(max_tokens=16, min_tokens=8, stop_token_ids=list(range(0, 512, 9)), **common),
        SamplingParams(max_tokens=1, **common),
        SamplingParams(max_tokens=2, prompt_logprobs=1, **common),
    ]


def results_of(llm, greedy, prompts):
    """Everything that must be the same, as plain values."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling_of_each_kind(), use_tqdm=False)
    return {
        "batch": greedy(llm, prompts, max_tokens=24),
        "again, with prefix-cache hits": greedy(llm, prompts, max_tokens=24),
        "up to max_model_len": greedy(llm, prompts[4:], max_tokens=1000),
        "features": [(tuple(c.token_ids), c.finish_reason) for o in outputs for c in o.outputs],
    }, [c.logprobs for o in outputs for c in o.outputs]


@pytest.fixture(scope="module")
def plain(engine, greedy, random_target, prompts):
    with engine(random_target, **TIGHT) as llm:
        return results_of(llm, greedy, prompts)


@pytest.mark.feature("Model Runner V2 (on a CPU, its kernels interpreted)", "the same answers")
@pytest.mark.usefixtures("corrupted_drafts")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[ASYNCHRONOUS] * options["async_scheduling"]) for kind, (_, options) in ENGINES.items()],
)
def test_greedy_identity(
    engine,
    greedy,
    random_target,
    cloned_head,
    prompts,
    plain,
    kind,
    preemptions,
    runner_of,
    force_kernels,
    monkeypatch,
):
    policy, options = ENGINES[kind]
    calls = force_kernels(monkeypatch) if "kv_fill" in kind else None
    spec = {"method": "eesd", "num_speculative_tokens": K, "model": cloned_head(random_target, 7, 7)} | policy
    with engine(random_target, spec, **TIGHT, **options) as llm:
        assert runner_of(llm).scheduler_config.async_scheduling == options["async_scheduling"]
        results, logprobs = results_of(llm, greedy, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    for name, expected in plain[0].items():
        assert results[name] == expected, name
    for positions, expected in zip(logprobs, plain[1], strict=True):
        for position, other in zip(positions or [], expected or [], strict=True):
            for token_id, entry in other.items():
                assert position[token_id].logprob == pytest.approx(entry.logprob, abs=LAST_BITS)
    assert 0.4 < stats["accepted"] / stats["drafted"] < 0.95  # both outcomes were exercised,
    assert np.count_nonzero(stats["draft_length_histogram"]) >= 3  # at ragged lengths,
    assert stats["draft_length_histogram"][0] > 0  # none at all among them
    assert preemptions
    assert calls is None or calls["exit_head"] and calls["kv_fill"]
