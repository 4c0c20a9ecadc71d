"""The KV fill on Model Runner V2 as one kernel, `kv_fill`, where it is faster than what it replaces.

What it replaces (key norm, rotary embedding, the backend's write) is partly compiled and fused, which a start has no
time for twice. So it is timed against less, one pass over the keys and the write: where it wins here, it wins there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_eesd.host.compat import VllmConfig
from vllm_eesd.host.model.exit_head import ExitHead
from vllm_eesd.host.model.kv_fill import write_kv
from vllm_eesd.host.model.layers import is_plain_norm
from vllm_eesd.host.v2 import kernel_choice
from vllm_eesd.host.v2.compat import RotaryEmbedding
from vllm_eesd.host.v2.kernel_choice import Timer, Timing
from vllm_eesd.kernels.gpu import kv_fill as kv_fill_kernel

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

#: Tokens of a forward at which `kv_fill` is timed, decoding and prompts; one graph serves all, so it must win at each.
FILL_TOKENS = (1, 16, 128, 1024)
#: Slots of a block of the cache that is written meanwhile; which number it is changes nothing.
TIMED_BLOCK_SIZE = 32
Views = tuple[torch.Tensor, torch.Tensor]


def _side_by_side(kv_cache: torch.Tensor) -> Views:
    """[num_blocks, num_kv_heads, block_size, 2 * head_size] as keys and values [block, slot, head, element]."""
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


#: Attention backends whose cache `kv_fill` can address, and how.
LAYOUTS: dict[str, Callable[[torch.Tensor], Views]] = dict.fromkeys(
    ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"), _side_by_side
)
#: `kv_cache_dtype` of a cache, and the dtype its bytes are read as; None leaves it as it is.
CACHE_DTYPES = {
    "auto": None,
    "bfloat16": None,
    "float16": None,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def fill_by_kernel(
    attention: Attention,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    layer: nn.Module,
) -> None:
    """Norm and rotate keys, and write K/V, as `host/model/kv_fill.py:write_kv` and what comes before it: one launch.

    Args:
        key, value: [num_tokens, num_kv_heads * head_size], as the projection left them.
        layer: the `self_attn` whose key norm and rotary embedding it does.
        The others: see `host/model/kv_fill.py:write_kv`.
    """
    caches = LAYOUTS[attention.attn_backend.get_name()](kv_cache)
    scaled = {}
    if (dtype := CACHE_DTYPES[attention.kv_cache_dtype]) is not None:
        caches = [cache.view(dtype) for cache in caches]
        scaled = {"k_scale": attention._k_scale, "v_scale": attention._v_scale}
    norm = getattr(layer, "k_norm", None)
    kv_fill_kernel.kv_fill(
        key.view(len(key), attention.num_kv_heads, attention.head_size),
        value.view(len(value), attention.num_kv_heads, attention.head_size_v),
        positions,
        layer.rotary_emb.cos_sin_cache,
        slot_mapping,
        *caches,
        is_neox=layer.rotary_emb.is_neox_style,
        k_norm_weight=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.variance_epsilon,
        **scaled,
    )


def kv_fill_obstacle(head: ExitHead) -> str | None:
    """Return what keeps the `kv_fill` kernel from filling this head's cache; None if nothing does."""
    self_attention = head.layer.self_attn
    attention, rotary, norm = self_attention.attn, self_attention.rotary_emb, getattr(self_attention, "k_norm", None)
    if (backend := attention.attn_backend.get_name()) not in LAYOUTS:
        return f"attention backend {backend}"
    if attention.kv_cache_dtype not in CACHE_DTYPES:
        return f"KV cache dtype {attention.kv_cache_dtype}"
    if attention.head_size != attention.head_size_v:
        return "keys and values have different head sizes"
    if not isinstance(rotary, RotaryEmbedding) or type(rotary).forward_native is not RotaryEmbedding.forward_native:
        return f"rotary embedding {type(rotary).__name__}"
    return None if norm is None or is_plain_norm(norm) else f"key norm {type(norm).__name__}"


@torch.inference_mode()
def use_kv_fill(head: ExitHead | None, vllm_config: VllmConfig, timer: Timer | None) -> bool:
    """Have a head's KV filled by the `kv_fill` kernel where it is faster; None has nothing to fill.

    Args:
        timer: `kernel_choice.timer_for`.
    Returns:
        Whether it is.
    """
    if timer is None or head is None:
        return False
    if obstacle := kv_fill_obstacle(head):
        kernel_choice.log_not_used("kv_fill", obstacle)
        return False
    most = vllm_config.scheduler_config.max_num_batched_tokens
    sizes = sorted({min(size, most) for size in FILL_TOKENS})
    layer, dtype = head.layer.self_attn, vllm_config.model_config.dtype
    wins = bool(kernel_choice.decide("kv_fill", sizes, lambda size: _time(layer, dtype, timer, size), everywhere=True))
    if wins:
        head.fill_by(fill_by_kernel)
    return wins


def _time(layer: nn.Module, dtype: torch.dtype, timer: Timer, num_tokens: int) -> Timing:
    """Time both ways into a cache of its own: the engine has none yet."""
    attention, angles = layer.attn, layer.rotary_emb.cos_sin_cache
    num_heads, head_size, device = attention.num_kv_heads, attention.head_size, angles.device
    shape = -(-num_tokens // TIMED_BLOCK_SIZE), num_heads, TIMED_BLOCK_SIZE, 2 * head_size
    is_float8 = CACHE_DTYPES[attention.kv_cache_dtype] is not None
    cache = torch.zeros(shape, dtype=torch.uint8 if is_float8 else dtype, device=device)
    key, value = torch.ones(2, num_tokens, num_heads * head_size, dtype=dtype, device=device)
    slots = torch.arange(num_tokens, device=device)
    given = attention, cache, slots
    positions = slots % len(angles)
    times = timer(
        lambda: fill_by_kernel(*given, key, value, positions, layer=layer),
        lambda: write_kv(*given, key * 2, value, positions),
    )
    return Timing(num_tokens, *times)
