"""Drafting machinery that is right must reproduce the target when the draft model IS the target (or one layer of it).

Each of these sees what plain output identity cannot: verification hides a broken drafter behind correct output.
"""

import numpy as np
import pytest
import torch

K = 4
FIXED = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(0, 512, n).tolist() for n in (5, 17, 33, 64, 100, 3)]


def test_headless_at_the_last_layer_accepts_everything(engine, greedy, random_target, prompts):
    """N = L without a head: the draft model is the whole target."""
    with engine(random_target, FIXED | {"exit_layer": 8}) as llm:
        greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] > 150
    assert stats["accepted"] == stats["drafted"]


@pytest.mark.parametrize(
    "options",
    [{"enforce_eager": False}, {"enforce_eager": False, "max_num_batched_tokens": 32}, {"max_num_batched_tokens": 32}],
    ids=["compiled", "compiled, chunked prompts", "eager, chunked prompts"],
)
def test_a_cloned_last_layer_accepts_everything(engine, greedy, random_target, cloned_head, prompts, options):
    """N = L - 1 and the exit layer a copy of the last: right only if every K/V of the exit layer is filled."""
    head = cloned_head(random_target, 7, 7)
    with engine(random_target, FIXED | {"model": head}, **options) as llm:
        greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] > 150
    assert stats["accepted"] == stats["drafted"]


def test_the_cloned_last_layer_notices_a_missing_kv_fill(
    engine, greedy, random_target, cloned_head, prompts, monkeypatch
):
    """The test above can fail: without the fill, drafts are rejected while the output stays right."""
    monkeypatch.setattr("vllm_eesd.host.exit_layer.ExitHead.hook_kv_fill", lambda *args: None)
    head = cloned_head(random_target, 7, 7)
    with engine(random_target, FIXED | {"model": head}) as llm:
        greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["accepted"] < 0.9 * stats["drafted"]


def test_a_cloned_next_layer_equals_headless_one_layer_later(engine, greedy, random_target, cloned_head, prompts):
    """N = 3 and a copy of layer 3 drafts what headless N = 4 drafts: the same per-position acceptance."""
    counts = []
    for spec in (FIXED | {"model": cloned_head(random_target, 3, 3)}, FIXED | {"exit_layer": 4}):
        with engine(random_target, spec) as llm:
            greedy(llm, prompts)
            (stats,) = llm.collective_rpc("eesd_stats")
            counts.append((stats["drafted_per_position"], stats["accepted_per_position"]))
    assert counts[0] == counts[1]


def test_the_exit_layers_kv_equals_the_cloned_layers(engine, greedy, random_target, cloned_head, prompts, drafter_of):
    """Element by element, over prompts, verified drafts and rejected ones."""
    with engine(random_target, FIXED | {"model": cloned_head(random_target, 3, 3)}) as llm:
        greedy(llm, prompts)
        layers = drafter_of(llm).vllm_config.compilation_config.static_forward_context
        exit_kv = layers["eesd_exit.layers.8.self_attn.attn"].kv_cache
        layer_kv = layers["model.layers.3.self_attn.attn"].kv_cache
        written = exit_kv != 0
        assert written.sum() > 10_000
        # The two are computed in batches of different shapes, so the last bits may differ.
        torch.testing.assert_close(exit_kv[written], layer_kv[written], atol=1e-5, rtol=1e-5)
