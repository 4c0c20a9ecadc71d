"""Drafting machinery that is right reproduces the target when the draft model IS the target.

The same with a head, a copy of the target's last layer, is in test_one_engine.py.
"""

import numpy as np
import pytest

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
