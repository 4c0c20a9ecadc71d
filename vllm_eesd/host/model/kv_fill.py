"""The KV fill: the exit head's keys and values of every scheduled token, written inside the target's forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_eesd.host.compat import direct_register_custom_op, get_forward_context, maybe_transfer_kv_layer

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


def fill_layer(
    attention: nn.Module,
    positions: torch.Tensor,
    read_later: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Norm and rotate the keys as a layer's attention does, and write; the rotary embedding wants a query too."""
    if not hasattr(attention.attn, "eesd_fill"):
        if hasattr(attention, "k_norm"):  # Qwen3
            key = attention.k_norm(key.view(-1, attention.num_kv_heads, attention.head_dim)).view(key.shape)
        _, key = attention.rotary_emb(positions, query, key)
    torch.ops.eesd.kv_fill(read_later, key, value, positions, attention.attn.layer_name)


def kv_fill(
    hidden_states: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, layer_name: str
) -> None:
    """Write the exit layer's K/V of all scheduled tokens into its paged cache.

    Args:
        hidden_states: [num_tokens, hidden_size], declared as mutated (it is not): it is read afterwards, so a
            compiler can neither drop this call nor move it.
        key, value: [num_tokens, num_kv_heads * head_size], see `ExitHead.fill_by`.
        positions: [num_tokens] int64.
        layer_name: of the exit layer's `Attention`.
    Source: vllm/model_executor/layers/attention/attention.py, unified_kv_cache_update.
    """
    if get_forward_context().slot_mapping.get(layer_name) is not None:  # None while profiling and warming up
        _fill(key, value, positions, layer_name)


@maybe_transfer_kv_layer
def _fill(key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, layer_name: str) -> None:
    """Write as `kv_fill` says, and tell a KV connector of this layer, whose attention does not run to do so."""
    context = get_forward_context()
    attention, slot_mapping = context.no_compile_layers[layer_name], context.slot_mapping[layer_name]
    getattr(attention, "eesd_fill", write_kv)(attention, attention.kv_cache, slot_mapping, key, value, positions)


def write_kv(
    attention: Attention,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write keys, normed and rotated, and values as the layer's attention backend does.

    Args:
        slot_mapping: [num_tokens] int64.
        The others: see `kv_fill`.
    """
    key = key.view(-1, attention.num_kv_heads, attention.head_size)
    value = value.view(-1, attention.num_kv_heads, attention.head_size_v)
    attention.impl.do_kv_cache_update(attention, key, value, kv_cache, slot_mapping)


_LIBRARY = torch.library.Library("eesd", "FRAGMENT")
direct_register_custom_op("kv_fill", kv_fill, ["hidden_states"], lambda *args, **kwargs: None, target_lib=_LIBRARY)
