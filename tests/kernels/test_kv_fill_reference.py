"""The KV fill's reference: rotation against complex float64 numbers, every cache layout, and vLLM's own rope."""

import pytest
import torch
from vllm_eesd.kernels.reference.kv_fill import kv_fill

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 5, 4, 2, 8


def caches(layout, dtype):
    """(key_cache, value_cache) as [num_blocks, block_size, heads, head_size] views of NaN-filled memory."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    if layout == "NHD":
        return torch.full((2, *shape), torch.nan).to(dtype).unbind(0)
    if layout == "HND":
        memory = torch.full((2, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_SIZE), torch.nan).to(dtype)
        return memory.transpose(2, 3).unbind(0)
    # FlashAttention's in vLLM 0.32: [num_blocks, heads, block_size, 2 * head_size], K and V side by side.
    memory = torch.full((NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.nan).to(dtype)
    return memory.transpose(1, 2).split(HEAD_SIZE, dim=-1)


def tokens(dtype=torch.float32, num_tokens=6, rotary_dim=HEAD_SIZE):
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn((num_tokens, 3, NUM_HEADS, HEAD_SIZE), generator=g).to(dtype)
    angle = torch.rand((50, rotary_dim // 2), generator=g, dtype=torch.float64) * 6
    positions = torch.randint(0, 50, (num_tokens,), generator=g)
    slots = torch.tensor([7, -1, 0, 19, 3, -1])[:num_tokens]
    return qkv[:, 1], qkv[:, 2], positions, angle, slots


def rotated(key, angle, is_neox):
    """Pairs as complex numbers turned by their angle, float64."""
    half = angle.shape[-1]
    key, head = key.double(), key[..., : 2 * half].double()
    pairs = torch.stack(head.chunk(2, -1), -1) if is_neox else head.unflatten(-1, (half, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.view_as_real(turned)
    head = torch.cat(turned.unbind(-1), -1) if is_neox else turned.flatten(-2)
    return torch.cat([head, key[..., 2 * half :]], -1)


@pytest.mark.parametrize("layout", ["NHD", "HND", "side by side"])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD_SIZE, 4])
def test_every_slot_holds_its_token_and_no_other_is_touched(layout, is_neox, rotary_dim):
    key, value, positions, angle, slots = tokens(rotary_dim=rotary_dim)
    key_cache, value_cache = caches(layout, torch.float32)
    cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).float()
    kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache, is_neox=is_neox)
    expected = rotated(key, angle[positions], is_neox)
    used = {int(slot): token for token, slot in enumerate(slots) if slot >= 0}
    for slot in range(NUM_BLOCKS * BLOCK_SIZE):
        k, v = (cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] for cache in (key_cache, value_cache))
        if slot in used:
            torch.testing.assert_close(k.double(), expected[used[slot]], rtol=1e-6, atol=1e-6)
            assert torch.equal(v, value[used[slot]])
        else:
            assert k.isnan().all() and v.isnan().all()


def test_the_head_norm_comes_before_the_rotation():
    key, value, positions, angle, slots = tokens()
    key_cache, value_cache = caches("NHD", torch.float32)
    weight = torch.rand(HEAD_SIZE) + 0.5
    cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).float()
    kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache, k_norm_weight=weight)
    normed = key.double() * (key.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    expected = rotated(normed, angle[positions], True)
    torch.testing.assert_close(key_cache[1, 3].double(), expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_float8_cache_is_scaled_and_saturates(dtype):
    key, value, positions, angle, slots = tokens()
    key_cache, value_cache = caches("NHD", dtype)
    cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).float()
    scale = torch.tensor([0.5])
    value = value.clone()
    value[0] = 1e9
    kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache, k_scale=scale, v_scale=scale)
    largest = torch.finfo(dtype).max
    assert (value_cache[1, 3].float() == largest).all()
    step = 2.0 ** -(3 if dtype == torch.float8_e4m3fn else 2)
    expected = rotated(key, angle[positions], True)[2]
    torch.testing.assert_close(key_cache[0, 0].double() * 0.5, expected, rtol=step / 2, atol=2e-3)


def test_more_tokens_than_slots_are_padding():
    key, value, positions, angle, slots = tokens()
    key_cache, value_cache = caches("NHD", torch.float32)
    cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).float()
    kv_fill(key, value, positions, cos_sin_cache, slots[:1], key_cache, value_cache)
    assert int(key_cache.isnan().logical_not().sum()) == NUM_HEADS * HEAD_SIZE


@pytest.mark.parametrize("is_neox", [True, False])
def test_keys_are_rotated_as_vllm_rotates_them(is_neox):
    rotary_embedding = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base")
    key, value, positions, angle, slots = tokens()
    cos_sin_cache = torch.cat([angle.cos(), angle.sin()], -1).float()
    theirs = rotary_embedding.RotaryEmbedding.forward_static(
        positions, key.flatten(1), key.flatten(1), HEAD_SIZE, HEAD_SIZE, cos_sin_cache, is_neox
    )[1].view(key.shape)
    key_cache, value_cache = caches("NHD", torch.float32)
    kv_fill(key, value, positions, cos_sin_cache, slots, key_cache, value_cache, is_neox=is_neox)
    torch.testing.assert_close(key_cache[1, 3], theirs[0], rtol=1e-6, atol=1e-6)
