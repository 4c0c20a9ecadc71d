"""The frozen target and the exit head, as PyTorch modules on transformers' own layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior, Verifier
from vllm_eesd.exit_head.shapes import EXTRA_TENSORS

# What of the target's config says how its layers are built.
LAYER_CONFIG_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


class Target(nn.Module):
    """The target, frozen; forward stops nowhere but also returns what enters the exit layer."""

    def __init__(self, model: nn.Module, exit_layer: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config = model.config
        self.exit_layer = exit_layer

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.lm_head

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return (hidden state entering layer N, normed output, rotary cos and sin).

        Args:
            ids: [num_windows, seq_len] int64; all positions attend to all earlier ones of their window.
        """
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = decoder.rotary_emb(hidden, position_ids=positions)
        for index, layer in enumerate(decoder.layers):
            if index == self.exit_layer:
                exit_hidden = hidden
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return exit_hidden, decoder.norm(hidden), rotary


class ExitHead(nn.Module):
    """One decoder layer of the target's own kind and its RMSNorm; state_dict has the checkpoint's tensor names."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer).requires_grad_(True)
        self.norm = copy.deepcopy(norm).requires_grad_(True)

    def forward(self, exit_hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the normed hidden state the LM head reads, [num_windows, seq_len, hidden_size]."""
        return self.norm(self.layer(exit_hidden, attention_mask=None, position_embeddings=rotary))


def load_target(name_or_path: str, exit_layer: int | None, device: str) -> Target:
    """Return the target in float32.

    Args:
        exit_layer: None takes a sixth of the layers.
    Raises:
        ValueError: no such model, an unsupported kind of it, or exit_layer out of range.
    """
    config = _read_config(name_or_path)
    if config.model_type not in EXTRA_TENSORS:
        raise ValueError(
            f"model: {name_or_path!r} has model_type {config.model_type!r}, must be one of {sorted(EXTRA_TENSORS)}"
        )
    num_layers = config.num_hidden_layers
    exit_layer = max(1, num_layers // 6) if exit_layer is None else exit_layer
    if not 1 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer is {exit_layer}, must be 1 to {num_layers - 1}: the target has {num_layers} layers"
        )
    # sdpa without a mask is causal, which is what Target.forward relies on.
    model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=torch.float32, attn_implementation="sdpa")
    return Target(model.to(device), exit_layer)


def new_head(target: Target, init: str) -> ExitHead:
    """Return a head initialised from the target's `last` layer or its `exit` layer, and its final norm."""
    decoder = target.model.model
    layer = decoder.layers[-1] if init == "last" else decoder.layers[target.exit_layer]
    return ExitHead(layer, decoder.norm)


def head_config(target: Target, name_or_path: str, prior: Prior) -> ExitHeadConfig:
    """Return what the head's config.json says; a local target is named by its directory only."""
    config = target.config
    layer = {field: getattr(config, field) for field in LAYER_CONFIG_FIELDS if getattr(config, field, None) is not None}
    verifier = Verifier(
        name_or_path=Path(name_or_path).resolve().name if Path(name_or_path).exists() else name_or_path,
        architecture=(config.architectures or [type(target.model).__name__])[0],
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
    )
    return ExitHeadConfig(
        exit_layer=target.exit_layer,
        head_type="transformer",
        verifier=verifier,
        transformer_layer_config=layer,
        prior=prior,
    )


def saved_dtype(name_or_path: str) -> torch.dtype:
    """Return the dtype the target's weights are stored in: the head is served in it, so it is stored in it too."""
    dtype = _read_config(name_or_path).dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _read_config(name_or_path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"model: {name_or_path!r} is no model directory and no known model id ({reason})") from None
