"""How decoder layers are called: most of vLLM's carry a residual beside the hidden state, some (Granite's) do not."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from vllm_eesd.host.compat import RMSNorm


def carries_residual(layer: nn.Module) -> bool:
    """Return whether the layer is called as layer(positions, hidden_states, residual)."""
    return "residual" in inspect.signature(type(layer).forward).parameters


def run_layer(
    layer: nn.Module,
    with_residual: bool,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what leaves the layer; the sum of both is the hidden state, a missing residual being zero."""
    if with_residual:
        return layer(positions, hidden_states, residual)
    return layer(positions, hidden_states), None


def summed(hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return the hidden state; with a residual it is a new tensor."""
    return hidden_states if residual is None else hidden_states + residual


def normed(norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the normed sum."""
    return norm(hidden_states) if residual is None else norm(hidden_states, residual)[0]


def is_plain_norm(norm: nn.Module) -> bool:
    """Return whether the module is vLLM's RMSNorm over all of its input, with a weight."""
    return type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None
