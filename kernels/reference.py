"""Every kernel in plain torch, under the same name and signature: what the Triton kernels are tested against, and what
a CPU runs. Nothing behind this module loops over rows in Python or imports Triton.
"""

from .exit_head_reference import (
    DraftTokens,
    Partials,
    Sampling,
    choose_tokens,
    exit_head,
    exit_head_partials,
    merge_partials,
)
from .kv_fill_reference import kv_fill
from .rejection_reference import Verified, rejection

__all__ = [
    "DraftTokens",
    "Partials",
    "Sampling",
    "Verified",
    "choose_tokens",
    "exit_head",
    "exit_head_partials",
    "kv_fill",
    "merge_partials",
    "rejection",
]
