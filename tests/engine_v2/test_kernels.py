"""Engines whose draft steps end in the kernel `exit_head` and whose KV fill is `kv_fill`: the self-tests hold.

The exit layer is a clone of the target's last, so every draft is right as long as both kernels are.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "fixed"}
#: Prompts in chunks; blocks as the CPU backend packs them.
OPTIONS = {"max_num_batched_tokens": 48, "max_model_len": 96, "block_size": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(7)
    return [generator.integers(0, 512, n).tolist() for n in (5, 33, 52)]


def draft(engine, greedy, random_target, head, prompts, **options):
    """Run the prompts; returns the counters, and the KV of the target's last layer and of the exit layer.

    The KV is that of the last prompt alone: nobody verifies a request's last drafts, which the next owner of a block
    would find there.
    """
    with engine(random_target, SPEC | head, **(OPTIONS | options)) as llm:
        greedy(llm, prompts[-1:], max_tokens=10)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache.clone() for name, layer in layers.items() if ".7." in name or "eesd" in name]
        greedy(llm, prompts, max_tokens=20)
        (stats,) = llm.collective_rpc("eesd_stats")
    return stats, caches


@pytest.mark.parametrize("num_rows", [None, 1], ids=["all batches", "one row"])
def test_a_cloned_last_layer_accepts_everything(
    engine, greedy, random_target, cloned_head, prompts, force_kernels, monkeypatch, num_rows
):
    calls = force_kernels(monkeypatch, exit_head_rows=num_rows)
    head = {"model": cloned_head(random_target, 7, 7)}
    stats, (layer_kv, exit_kv) = draft(engine, greedy, random_target, head, prompts, async_scheduling=True)
    assert stats["accepted"] == stats["drafted"] >= 20
    written = layer_kv != 0
    assert written.sum() > 5_000
    # Rotated by another program, in batches of other shapes: the last bits may differ.
    torch.testing.assert_close(exit_kv[written], layer_kv[written], atol=1e-5, rtol=1e-5)
    assert calls["kv_fill"] > 10 and calls["exit_head"] > (0 if num_rows else 10)
    assert calls["choose_tokens"] > 10 if num_rows else not calls["choose_tokens"]


def test_headless_at_the_last_layer_accepts_everything(engine, greedy, random_target, prompts, forced_kernels):
    stats, _ = draft(engine, greedy, random_target, {"exit_layer": 8}, prompts)
    assert stats["accepted"] == stats["drafted"] >= 20
    assert forced_kernels["exit_head"] > 10 and not forced_kernels["kv_fill"]  # there is nothing to fill


def into_other_slots(patch):
    """Within their block, or the interpreter would write anywhere; two neighbours could trade places unnoticed."""
    from vllm_eesd.host.v2 import kv_fill as v2_kv_fill

    fill = v2_kv_fill.kv_fill_kernel.kv_fill

    def elsewhere(key, value, positions, angles, slots, *rest, **options):
        moved = torch.where(slots < 0, slots, slots - slots % 32 + (slots + 3) % 32)
        fill(key, value, positions, angles, moved, *rest, **options)

    patch.setattr(v2_kv_fill.kv_fill_kernel, "kv_fill", elsewhere)


def at_other_positions(patch):
    from vllm_eesd.host.v2 import kv_fill as v2_kv_fill

    fill = v2_kv_fill.kv_fill_kernel.kv_fill
    patch.setattr(
        v2_kv_fill.kv_fill_kernel,
        "kv_fill",
        lambda key, value, positions, *rest, **options: fill(key, value, positions // 2, *rest, **options),
    )


def of_another_row(patch):
    from vllm_eesd.host.v2 import kernel_ops as v2_kernels

    choose = v2_kernels.exit_head_kernel.exit_head
    patch.setattr(
        v2_kernels.exit_head_kernel, "exit_head", lambda x, *rest, **options: choose(x.flip(0), *rest, **options)
    )


@pytest.mark.parametrize("plant", [into_other_slots, at_other_positions, of_another_row])
def test_a_kernel_called_wrongly_is_noticed(
    engine, greedy, random_target, cloned_head, prompts, forced_kernels, monkeypatch, plant
):
    plant(monkeypatch)
    stats, _ = draft(engine, greedy, random_target, {"model": cloned_head(random_target, 7, 7)}, prompts)
    assert stats["accepted"] < 0.9 * stats["drafted"]


def plain_norm():
    from vllm_eesd.host.compat import RMSNorm

    norm = object.__new__(RMSNorm)  # its constructor wants an engine's config
    norm.has_weight, norm.variance_size_override = True, None
    return norm


def change(owner, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)


@pytest.mark.parametrize(
    ("path", "value", "obstacle"),
    [
        ("target.lm_head.quant_method", object(), "no plain"),
        ("target.lm_head.weight", torch.zeros(0), "no plain"),
        ("target.lm_head.weight", torch.zeros(8, 4, dtype=torch.float16), "no plain"),
        ("target.lm_head.bias", torch.zeros(8), "biased"),
        ("target.logits_processor.scale", 0.25, "scaled"),
        ("target.logits_processor.soft_cap", 30.0, "capped"),
        ("target.logits_processor.head_dtype", torch.float64, "runs in torch.float64"),
        ("last_norm", torch.nn.LayerNorm(4), "LayerNorm"),
        ("num_ranks", 2, "ranks"),
    ],
)
def test_what_exit_head_cannot_do_is_left_to_vllm(monkeypatch, path, value, obstacle):
    from vllm_eesd.host.compat import UnquantizedEmbeddingMethod
    from vllm_eesd.host.v2 import kernel_ops as v2_kernels

    lm_head = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=torch.zeros(8, 4), bias=None)
    processor = SimpleNamespace(scale=1.0, soft_cap=None, head_dtype=None, org_vocab_size=7)
    target = SimpleNamespace(lm_head=lm_head, logits_processor=processor)
    step = SimpleNamespace(vocabulary=None, target=target, last_norm=plain_norm(), num_ranks=1)
    monkeypatch.setattr(v2_kernels, "get_tp_group", lambda: SimpleNamespace(world_size=step.num_ranks))
    assert v2_kernels.exit_head_obstacle(step, torch.float32) is None
    change(step, path, value)
    assert obstacle in v2_kernels.exit_head_obstacle(step, torch.float32)


@pytest.mark.parametrize(
    ("path", "value", "obstacle"),
    [
        ("attn.attn_backend.name", "FLEX_ATTENTION", "FLEX_ATTENTION"),
        ("attn.kv_cache_dtype", "fp8_per_token_head", "fp8_per_token_head"),
        ("attn.head_size_v", 16, "head sizes"),
        ("rotary_emb", torch.nn.Identity(), "Identity"),
        ("k_norm", torch.nn.LayerNorm(4), "LayerNorm"),
    ],
)
def test_what_kv_fill_cannot_do_is_left_to_vllm(path, value, obstacle):
    from vllm_eesd.host.v2 import kv_fill as v2_kv_fill

    backend = SimpleNamespace(name="FLASH_ATTN", get_name=lambda: backend.name)
    attention = SimpleNamespace(attn_backend=backend, kv_cache_dtype="auto", head_size=32, head_size_v=32)
    rotary = object.__new__(v2_kv_fill.RotaryEmbedding)
    self_attention = SimpleNamespace(attn=attention, rotary_emb=rotary, k_norm=plain_norm())
    head = SimpleNamespace(layer=SimpleNamespace(self_attn=self_attention))
    assert v2_kv_fill.kv_fill_obstacle(head) is None
    change(self_attention, path, value)
    assert obstacle in v2_kv_fill.kv_fill_obstacle(head)
