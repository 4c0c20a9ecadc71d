"""Greedy output in float32 equals plain vLLM's, token for token, whatever is drafted and however it is scheduled."""

import numpy as np
import pytest

# Ragged lengths, different every round.
SPEC = {"method": "eesd", "num_speculative_tokens": 6, "policy": "beta_ts"}
#: name -> engine options. Small blocks of work, few KV blocks: chunked prefill and preemption really happen.
SETTINGS = {
    "compiled": {"enforce_eager": False},
    "eager": {},
    "chunked prefill": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "preemption": {"num_gpu_blocks_override": 9, "block_size": 32, "max_num_seqs": 8},
}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(2)
    return [generator.integers(0, 512, n).tolist() for n in (40, 7, 90, 1, 64, 23)]


@pytest.fixture
def corrupted_drafts(monkeypatch):
    """Make every fourth draft token wrong, so that rejections happen at every position."""
    from vllm_eesd.host.v1.proposer import DraftRows

    generator, right = np.random.default_rng(3), DraftRows.step

    def step(self, rows, offset, token_ids):
        drafted, confidence = right(self, rows, offset, token_ids)
        return np.where(generator.random(len(drafted)) < 0.25, (drafted + 1) % 512, drafted), confidence

    monkeypatch.setattr(DraftRows, "step", step)


@pytest.fixture(scope="module")
def head(random_target, cloned_head):
    return cloned_head(random_target, 7, 7)


@pytest.mark.usefixtures("corrupted_drafts")
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.feature(name, "the same answers")) for name in SETTINGS]
)
def test_greedy_identity_on_a_random_target(
    engine, greedy, plain_answers, random_target, head, prompts, setting, preemptions
):
    options = {"max_model_len": 192} | SETTINGS[setting]
    # The last one up to max_model_len.
    batch, alone, to_the_end = plain_answers(
        random_target, (prompts, 60), (prompts[:1], 60), (prompts[2:4], 1000), **options
    )
    preemptions.clear()
    with engine(random_target, SPEC | {"model": head}, **options) as llm:
        assert greedy(llm, prompts, max_tokens=60) == batch
        assert greedy(llm, prompts, max_tokens=60) == batch  # now with prefix-cache hits, where caching is on
        assert greedy(llm, prompts[:1], max_tokens=60) == alone
        assert greedy(llm, prompts[2:4], max_tokens=1000) == to_the_end
        (stats,) = llm.collective_rpc("eesd_stats")
    assert 0.4 < stats["accepted"] / stats["drafted"] < 0.95  # both outcomes were exercised,
    assert np.count_nonzero(stats["draft_length_histogram"]) >= 4  # at ragged lengths
    assert bool(preemptions) == (setting == "preemption")
