"""The exit layer's K/V into the paged cache: per-head key norm, rotary embedding, scale, cast, write, in one launch.

Grid of `_kv_fill_kernel`: (slots, KV heads). A program reads one head of one token's key and value as the projection
left them and writes them into that token's slot; programs of padding slots return. Bytes: every key and value once in,
once out. Caches are addressed by their strides, so any layout that has a [block, slot, head, element] view will do.
"""

import torch
import triton
import triton.language as tl

__all__ = ["kv_fill"]

# Largest finite number of each float8 cache dtype: a cast beyond it may give NaN, a cache saturates.
FLOAT8_LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _store(cache_ptr, offsets, mask, values, scale_ptr, LIMIT: tl.constexpr):
    if LIMIT > 0:
        values = values.to(tl.float32)
        if scale_ptr is not None:
            values = values / tl.load(scale_ptr)
        values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
    tl.store(cache_ptr + offsets, values.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _kv_fill_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    key_stride,
    key_head_stride,
    value_ptr,  # [num_tokens, num_kv_heads, head_size_v]
    value_stride,
    value_head_stride,
    positions_ptr,
    cos_sin_ptr,  # [max_position, rotary_dim]
    cos_sin_stride,
    slot_mapping_ptr,
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    k_element_stride,
    value_cache_ptr,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    v_element_stride,
    k_norm_weight_ptr,  # [head_size] or None
    k_scale_ptr,
    v_scale_ptr,
    eps,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    d = tl.arange(0, BLOCK_K)
    mask = d < HEAD_SIZE
    turned = d < ROTARY_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        pair, is_first = d % HALF, d < HALF
        partner = tl.where(is_first, d + HALF, d - HALF)
    else:
        pair, is_first = d // 2, d % 2 == 0
        partner = d ^ 1
    partner = tl.where(turned, partner, d)
    source = key_ptr + token * key_stride + head * key_head_stride
    x = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=mask, other=0.0).to(tl.float32)
    if k_norm_weight_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_SIZE + eps)
        # Rounded as the norm's output is where it stands alone.
        dtype = key_ptr.dtype.element_ty
        x = (x * factor * tl.load(k_norm_weight_ptr + d, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        weight = tl.load(k_norm_weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)
        y = (y * factor * weight).to(dtype).to(tl.float32)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + pair
    cos = tl.load(angles, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=turned, other=0.0).to(tl.float32)
    key = x * cos + tl.where(is_first, -y, y) * sin
    key = key.to(key_ptr.dtype.element_ty)
    target = block * k_block_stride + offset * k_slot_stride + head * k_head_stride
    _store(key_cache_ptr, target + d * k_element_stride, mask, key, k_scale_ptr, LIMIT)

    d = tl.arange(0, BLOCK_V)
    mask = d < HEAD_SIZE_V
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + d, mask=mask, other=0.0)
    target = block * v_block_stride + offset * v_slot_stride + head * v_head_stride
    _store(value_cache_ptr, target + d * v_element_stride, mask, value, v_scale_ptr, LIMIT)


def kv_fill(
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    is_neox: bool = True,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write K/V of these tokens into a paged cache; see `reference.kv_fill.kv_fill`."""
    assert key.stride(-1) == 1 and value.stride(-1) == 1
    head_size, head_size_v = key.shape[-1], value.shape[-1]
    _kv_fill_kernel[(slot_mapping.shape[0], key.shape[1])](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        slot_mapping,
        key_cache,
        *key_cache.stride(),
        value_cache,
        *value_cache.stride(),
        k_norm_weight,
        k_scale,
        v_scale,
        eps,
        HEAD_SIZE=head_size,
        HEAD_SIZE_V=head_size_v,
        ROTARY_DIM=cos_sin_cache.shape[1],
        BLOCK_SIZE=key_cache.shape[1],
        IS_NEOX=is_neox,
        LIMIT=FLOAT8_LIMIT.get(key_cache.dtype, 0.0),
        BLOCK_K=triton.next_power_of_2(head_size),
        BLOCK_V=triton.next_power_of_2(head_size_v),
        num_warps=1,
    )
