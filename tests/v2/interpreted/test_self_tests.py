"""Drafting machinery that is right reproduces the target when the draft model IS the target, or one layer of it."""

import numpy as np
import pytest
import torch

K = 4
FIXED = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
#: Short, so that there are few steps; prompts come in chunks.
OPTIONS = {"max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(0, 512, n).tolist() for n in (5, 17, 33, 64, 3)]


def test_headless_at_the_last_layer_accepts_everything(engine, greedy, random_target, prompts, runner_of):
    """N = L without a head: the draft model is the whole target."""
    with engine(random_target, FIXED | {"exit_layer": 8}, **OPTIONS) as llm:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        assert isinstance(runner_of(llm), GPUModelRunner)  # V2's, of that name as V1's
        greedy(llm, prompts, max_tokens=20)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] >= 60
    assert stats["accepted"] == stats["drafted"]


def test_a_cloned_last_layer_accepts_everything(engine, greedy, random_target, cloned_head, prompts, runner_of):
    """N = L - 1 and the exit layer a copy of the last: its K/V are right, and equal to the copied layer's."""
    with engine(random_target, FIXED | {"model": cloned_head(random_target, 7, 7)}, **OPTIONS) as llm:
        greedy(llm, prompts, max_tokens=20)
        (stats,) = llm.collective_rpc("eesd_stats")
        layers = runner_of(llm).vllm_config.compilation_config.static_forward_context
        exit_kv = layers["eesd_exit.layers.8.self_attn.attn"].kv_cache
        layer_kv = layers["model.layers.7.self_attn.attn"].kv_cache
        written = layer_kv != 0
        assert written.sum() > 10_000
        # The two are computed in batches of different shapes, so the last bits may differ.
        torch.testing.assert_close(exit_kv[written], layer_kv[written], atol=1e-5, rtol=1e-5)
    assert stats["drafted"] >= 60
    assert stats["accepted"] == stats["drafted"]
