"""The KV fill kernel against its reference: layouts, rotations, cache dtypes, padding."""

import pytest
import torch
from vllm_eesd.kernels.gpu.kv_fill import kv_fill
from vllm_eesd.kernels.reference import kv_fill as reference

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS = 4, 4, 2


def caches(layout, head_size, dtype, device):
    """(key_cache, value_cache) as [num_blocks, block_size, heads, head_size] views."""
    if layout == "NHD":
        return torch.zeros((2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, head_size), device=device).to(dtype).unbind(0)
    if layout == "HND":
        memory = torch.zeros((2, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, head_size), device=device).to(dtype)
        return memory.transpose(2, 3).unbind(0)
    if layout == "columns":  # a block's keys lie element by element, as vLLM's CPU backend packs them
        keys, values = torch.zeros((2, NUM_BLOCKS, NUM_HEADS, head_size, BLOCK_SIZE), device=device).to(dtype)
        return keys.permute(0, 3, 1, 2), values.view(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, head_size).transpose(1, 2)
    memory = torch.zeros((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * head_size), device=device).to(dtype)
    return memory.transpose(1, 2).split(head_size, dim=-1)


@pytest.mark.parametrize("layout", ["NHD", "HND", "side by side", "columns"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_the_cache_equals_the_references(layout, is_neox, dtype, cache_dtype, device):
    for head_size, rotary_dim, norm in ((32, 32, False), (24, 8, True)):
        g = torch.Generator().manual_seed(0)
        qkv = torch.randn((7, 3, NUM_HEADS, head_size), generator=g).to(dtype).to(device)
        angle = torch.rand((50, rotary_dim // 2), generator=g) * 6
        cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).to(dtype).to(device)
        positions = torch.randint(0, 50, (7,), generator=g).to(device)
        slots = torch.tensor([7, -1, 0, 15, 3, -1], device=device)  # one fewer than tokens
        norm_weight = torch.rand(head_size, generator=g).to(dtype).to(device) if norm else None
        scale = torch.tensor([0.25], device=device) if cache_dtype.itemsize == 1 else None
        results = []
        for function in (kv_fill, reference.kv_fill):
            pair = caches(layout, head_size, cache_dtype, device)
            function(
                qkv[:, 1],
                qkv[:, 2] * 10,
                positions,
                cos_sin_cache,
                slots,
                *pair,
                is_neox=is_neox,
                k_norm_weight=norm_weight,
                k_scale=scale,
                v_scale=scale,
            )
            results.append([cache.float() for cache in pair])
        # A key is rounded once to its dtype; the sums before that may differ in float32's last place.
        step = torch.finfo(cache_dtype if scale is not None else dtype).eps
        torch.testing.assert_close(results[0][0], results[1][0], rtol=2 * step, atol=2e-6 if scale is None else 0.02)
        assert torch.equal(results[0][1], results[1][1])


def test_values_may_have_a_head_size_of_their_own(device):
    key, value = torch.randn(2, 1, 16, device=device), torch.randn(2, 1, 12, device=device)
    cos_sin_cache = torch.cat([torch.ones(3, 8), torch.zeros(3, 8)], -1).to(device)
    key_cache, value_cache = torch.zeros(1, 4, 1, 16, device=device), torch.zeros(1, 4, 1, 12, device=device)
    positions, slots = torch.tensor([0, 2], device=device), torch.tensor([3, 0], device=device)
    kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache)
    assert torch.equal(key_cache[0, [3, 0]], key) and torch.equal(value_cache[0, [3, 0]], value)
    assert not key_cache[0, 1:3].any() and not value_cache[0, 1:3].any()
