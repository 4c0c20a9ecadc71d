"""The exit layer's K/V into the paged cache in plain torch: the reference of `gpu/kv_fill.py`."""

from __future__ import annotations

import torch
from torch.nn import functional as F


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
    """Write K/V of these tokens into a paged cache: per-head key norm, rotary embedding, scale, cast, write.

    The caches may be any strided view (NHD, HND, K and V side by side); what has no such view, a CPU backend's packed
    keys or caches with scales of their own per token, is written by the backend itself.

    Args:
        key: [num_tokens, num_kv_heads, head_size] as the projection made it, last dimension contiguous.
        value: [num_tokens, num_kv_heads, head_size_v], last dimension contiguous.
        positions: [num_tokens] int64.
        cos_sin_cache: [max_position, rotary_dim], cosines then sines; rotary_dim <= head_size, the rest is not rotated.
        slot_mapping: [num_slots] int64, num_slots <= num_tokens; negative slots (padding) are skipped.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size]: the key's dtype, float32, or float8.
        value_cache: [num_blocks, block_size, num_kv_heads, head_size_v].
        is_neox: the rotated pairs are halves (Llama), not neighbours (GPT-J).
        k_norm_weight: [head_size], Qwen3's norm of every key head.
        eps: of that norm.
        k_scale, v_scale: [1] float32, what a float8 cache's numbers are multiplied by on reading.
    """
    num_slots = slot_mapping.shape[0]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    rotated = key[:num_slots][used].float()
    if k_norm_weight is not None:
        rotated = F.rms_norm(rotated, k_norm_weight.shape, k_norm_weight.float(), eps).to(key.dtype).float()
    rotated = _rotate(rotated, cos_sin_cache[positions[:num_slots][used]].float()[:, None], is_neox)
    blocks, offsets = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[blocks, offsets] = _quantised(rotated.to(key.dtype), k_scale, key_cache.dtype)
    value_cache[blocks, offsets] = _quantised(value[:num_slots][used], v_scale, value_cache.dtype)


def _rotate(key: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Return the keys with their first rotary_dim elements rotated, pairwise."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    turned = key[..., :rotary_dim]
    if is_neox:
        x, y = turned.chunk(2, dim=-1)
    else:
        x, y = turned[..., ::2], turned[..., 1::2]
    pair = (x * cos - y * sin, y * cos + x * sin)
    turned = torch.cat(pair, dim=-1) if is_neox else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat([turned, key[..., rotary_dim:]], dim=-1)


def _quantised(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize > 1:
        return values.to(dtype)
    scaled = values.float() if scale is None else values.float() / scale
    # torch turns an overflow of float8 into NaN; a cache saturates.
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype)
