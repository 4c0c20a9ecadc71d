"""The frozen target, as a PyTorch module on transformers' own layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from vllm_eesd.distill.loading import computing_dtype, decompression, fold_logits_scaling, read_config

# Cosine and sine of each position, [1, seq_len, head_dim] each.
Rotary = tuple[Tensor, Tensor]

# Numbers of a tensor that a target is told from others by.
SAMPLED = 1024
# Of a GPU's free memory, what weights may take: the rest is for a batch.
WEIGHTS_SHARE = 0.8


class Target(nn.Module):
    """The target, frozen; forward stops nowhere but also returns what enters the exit layer and the auxiliary ones."""

    def __init__(self, model: nn.Module, exit_layer: int, aux_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config = model.config
        self.exit_layer = exit_layer
        self.aux_layers = list(aux_layers)

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.lm_head

    @functools.cached_property
    def fingerprint(self) -> float:
        """A number that another target's weights do not have: of some numbers of every tensor, each by its place.

        Asked before some of its layers stay in host memory, where they are no parameters any more.
        """
        some = (p.detach().flatten()[:: max(1, p.numel() // SAMPLED)].double().sum() for p in self.model.parameters())
        return round(sum(place * total.item() for place, total in enumerate(some, start=1)), 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Rotary]:
        """Return (`exit_states`, normed output, rotary cos and sin).

        Args:
            ids: [num_windows, seq_len] int64; all positions attend to all earlier ones of their window.
        """
        hidden, arguments = self.embed(ids)
        read = {}
        for index, layer in enumerate(self.model.model.layers):
            if index == self.exit_layer or index in self.aux_layers:
                read[index] = hidden
            hidden = layer(hidden, **arguments)
        return self.exit_states(read), self.model.model.norm(hidden), arguments["position_embeddings"]

    def exit_states(self, states: Mapping[int, Tensor] | Sequence[Tensor]) -> Tensor:
        """Return what a head reads beside the output: what enters layer N and, side by side, each auxiliary layer.

        Args:
            states: what enters each layer, or those that are read, [num_windows, seq_len, hidden_size].
        Returns:
            [num_windows, seq_len, (1 + auxiliary layers) * hidden_size].
        """
        return torch.cat([states[index] for index in (self.exit_layer, *self.aux_layers)], dim=-1)

    def embed(self, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return (what enters layer 0, the arguments every layer takes beside the hidden state)."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(ids) * getattr(decoder, "embedding_multiplier", 1.0)  # Granite has one
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return hidden, {
            "attention_mask": None,
            "position_ids": positions,
            "position_embeddings": self.rotary(hidden),
        }

    def rotary(self, hidden: Tensor) -> Rotary:
        """Return cosine and sine of the positions of [num_windows, seq_len, hidden_size], in its dtype."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.model.model.rotary_emb(hidden, position_ids=positions)

    def layer_inputs(self, ids: Tensor) -> list[Tensor]:
        """Return what enters each layer and, last, what leaves the last one: L + 1 hidden states, none normed."""
        hidden, arguments = self.embed(ids)
        states = [hidden]
        for layer in self.model.model.layers:
            states.append(layer(states[-1], **arguments))
        return states


def default_aux_layers(target: Target) -> list[int]:
    """Return those at a quarter, half and three quarters of the target's depth that lie after its exit layer."""
    depth = target.config.num_hidden_layers
    return sorted({layer for layer in (depth // 4, depth // 2, 3 * depth // 4) if layer > target.exit_layer})


def default_init(target: Target) -> str:
    """Return which of the target's layers a head starts from, `last` or `exit`."""
    # On bare embeddings the last layers make nothing of them (N = 0, M = 3: KL 2.39 after 7.5 million tokens).
    return "last" if target.exit_layer else "exit"


def load_target(name_or_path: str, exit_layer: int, device: str, aux_layers: Sequence[int] = ()) -> Target:
    """Return the target in host memory, in the dtype that it is run in on a device; see `computing_dtype`, `place`.

    Args:
        device: "cpu" or "cuda".
    Raises:
        ValueError: no such model, an unsupported kind of it, pickled weights, or exit_layer out of range.
    """
    config = read_config(name_or_path)
    num_layers = config.num_hidden_layers
    if not 0 <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer is {exit_layer}, must be 0 to {num_layers - 1}: the target has {num_layers} layers"
        )
    # sdpa without a mask is causal, which is what Target.forward relies on.
    options = {"attn_implementation": "sdpa", "use_safetensors": True, "dtype": computing_dtype(name_or_path, device)}
    options |= decompression(name_or_path, config)
    try:
        model = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
    except OSError as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"model: {name_or_path!r} has no safetensors that can be read; pickled weights are never loaded ({reason})"
        ) from None
    fold_logits_scaling(model)
    return Target(model, exit_layer, aux_layers)


def place(target: Target, device: torch.device, room: float = math.inf) -> int:
    """Move the target to a device; decoder layers that have no room there stay in host memory until they run.

    Args:
        room: bytes that its weights may take there.
    Returns:
        How many layers stay: the last ones.
    """
    target.fingerprint  # noqa: B018
    model, layers = target.model, target.model.model.layers
    children = [*model.named_children(), *model.model.named_children()]
    others = [child for name, child in children if name not in ("model", "layers")]
    left, largest = room - sum(map(_num_bytes, others)), max(map(_num_bytes, layers))
    fitting = len(layers)
    if left < sum(map(_num_bytes, layers)):
        fitting = max(0, int(left / largest) - 1)  # and one that is running
    for layer in layers[fitting:]:
        cpu_offload(layer, device)
    for part in (*others, *layers[:fitting]):
        part.to(device)
    return len(layers) - fitting


def room_for_weights(device: torch.device, reserved: int = 0) -> float:
    """Return the bytes that a target may take on a device, `reserved` of which are wanted by something else."""
    if device.type != "cuda":
        return math.inf
    return WEIGHTS_SHARE * torch.cuda.mem_get_info(device)[0] - reserved


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
