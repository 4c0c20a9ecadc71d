"""Where bfloat16 is the faster arithmetic, and the context that computes in it there."""

from __future__ import annotations

import torch


def uses_bfloat16(device: str) -> bool:
    """Return whether bfloat16 is faster there: on GPUs, and on CPUs that multiply it in hardware."""
    return device == "cuda" or cpu_multiplies_bfloat16()


def cpu_multiplies_bfloat16() -> bool:
    """Return whether this machine's CPU does so in hardware."""
    return torch.cpu._is_avx512_bf16_supported()


def autocast(device: str, enabled: bool) -> torch.autocast:
    """Return a context whose products are in bfloat16, if it is enabled."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)
