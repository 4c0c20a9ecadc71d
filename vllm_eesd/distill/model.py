"""Exit heads as PyTorch modules on transformers' own layers."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vllm_eesd.distill.loading import layer_config, target_verifier
from vllm_eesd.distill.target import Rotary, Target
from vllm_eesd.distill.vocabulary import restrict
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior, read_tensors
from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME, token_ids_of
from vllm_eesd.exit_head.types import DEEP_CONTEXT, HEADLESS, TRANSFORMER


class ExitHead(nn.Module):
    """One decoder layer of the target's own kind and its RMSNorm; state_dict has the checkpoint's tensor names."""

    kind = TRANSFORMER

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, num_aux: int = 0) -> None:
        """Take the one of `layers` over, a copy of the target's; `norm` is copied."""
        super().__init__()
        (self.layer,) = layers
        self.norm = copy.deepcopy(norm).requires_grad_(True)

    def forward(self, exit_hidden: Tensor, target_hidden: Tensor, rotary: Rotary, block_starts: Tensor) -> Tensor:
        """Return the normed hidden state the LM head reads, [num_windows, seq_len, hidden_size].

        Args:
            exit_hidden: [num_windows, seq_len, hidden_size] entering the target's layer N; with auxiliary layers those
                states beside it, `Target.exit_states`.
            target_hidden: [num_windows, seq_len, hidden_size] the target's normed output; only deep context reads it.
            block_starts: [seq_len] or [num_windows, seq_len] int64, for each position where its draft block starts: the
                position of the input token, up to which the target's own output is known; only deep context reads it.
        """
        return self.norm(self.layer(exit_hidden, attention_mask=None, position_embeddings=rotary))


class HeadlessHead(nn.Module):
    """The target's own final norm: nothing trained."""

    kind = HEADLESS

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, num_aux: int = 0) -> None:
        super().__init__()
        self._norm = (norm,)  # a tuple hides the target's weights from this module's

    def forward(self, exit_hidden: Tensor, target_hidden: Tensor, rotary: Rotary, block_starts: Tensor) -> Tensor:
        """Return the normed hidden state; see `ExitHead.forward`."""
        return self._norm[0](exit_hidden)


class DeepContext(nn.Module):
    """What a layer of a deep-context head has beyond its own tensors: it reads what the target made of a token.

    Args:
        attention: of the layer.
        num_aux: auxiliary layers of the target that it reads; it begins by not looking at them.
        inject_size: hidden size, for the first layer: the target's output is added to its input, and its projections
            start as the layer's own, of h_N, as if there were no deep context. None for the others: theirs start as
            their own too, but of the target's output, which is nearer to what enters them.
    """

    def __init__(self, attention: nn.Module, num_aux: int, inject_size: int | None = None) -> None:
        super().__init__()
        is_first = inject_size is not None
        self.k_proj, self.v_proj = (_widened(own, is_first, num_aux) for own in (attention.k_proj, attention.v_proj))
        if is_first:
            self.inject = nn.Linear(inject_size, inject_size, bias=False)
            nn.init.zeros_(self.inject.weight)


def _widened(projection: nn.Linear, of_exit_hidden: bool, num_aux: int) -> nn.Linear:
    """Return `projection` of [the target's output, h_N, auxiliary states], only one of which it looks at yet."""
    wide = copy.deepcopy(projection).requires_grad_(True)
    parts = [torch.zeros_like(projection.weight) for _ in range(2 + num_aux)]
    parts[int(of_exit_hidden)] = projection.weight
    wide.in_features, wide.weight = len(parts) * projection.in_features, nn.Parameter(torch.cat(parts, dim=1))
    return wide


class DeepLayer(nn.Module):
    """One decoder layer that sees verified tokens through what the target made of them."""

    def __init__(self, layer: nn.Module, num_aux: int, inject_size: int | None = None) -> None:
        """Take `layer` over, a copy of the target's; see `DeepContext`."""
        super().__init__()
        self.layer = layer
        self.deep = DeepContext(layer.self_attn, num_aux, inject_size)

    def run(self, hidden: Tensor, context: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
        """Return what leaves the layer, [num_windows, seq_len, hidden_size].

        Args:
            hidden: [num_windows, seq_len, hidden_size], what enters it.
            context: [num_windows, seq_len, (2 + auxiliary layers) * hidden_size], what keys and values of verified
                tokens come from.
            rotary: see `ExitHead.forward`.
            mask: see `block_mask`.
        """
        share = getattr(self.layer, "residual_multiplier", 1.0)  # Granite has one
        hidden = hidden + self._attend(self.layer.input_layernorm(hidden), context, rotary, mask) * share
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden)) * share

    def _attend(self, hidden: Tensor, context: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
        attention = self.layer.self_attn
        query = _heads(attention.q_proj(hidden), attention.head_dim, getattr(attention, "q_norm", None))
        k_norm = getattr(attention, "k_norm", None)
        key = _heads(attention.k_proj(hidden), attention.head_dim, k_norm)
        deep_key = _heads(self.deep.k_proj(context), attention.head_dim, k_norm)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        deep_key, _ = apply_rotary_pos_emb(deep_key, deep_key, *rotary)
        values = (self.deep.v_proj(context), attention.v_proj(hidden))
        keys = torch.cat([deep_key, key], dim=2)
        values = torch.cat([_heads(value, attention.head_dim) for value in values], dim=2)
        groups = attention.num_key_value_groups
        attended = F.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            scale=attention.scaling,
        )
        return attention.o_proj(attended.transpose(1, 2).flatten(2))


class DeepContextHead(DeepLayer):
    """Decoder layers that see verified tokens through the whole target's hidden states, at no extra draft cost.

    Before the round's input token everything is verified, so the target's output there is known: keys and values come
    from it, h_N and the auxiliary layers' inputs, by a second projection in every layer, and the output that produced
    the input token is added to the first layer's input throughout the block. Within the block, a layer's keys and
    values come from its own input. (EAGLE-3 reads several layers too: arXiv 2503.01840, section 3.)
    """

    kind = DEEP_CONTEXT

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, num_aux: int = 0) -> None:
        """Take `layers` over, copies of the target's, run in this order; `norm` is copied."""
        super().__init__(layers[0], num_aux, norm.weight.numel())
        self.upper = nn.ModuleList(DeepLayer(layer, num_aux) for layer in layers[1:])
        self.norm = copy.deepcopy(norm).requires_grad_(True)
        self._num_aux, self._eps = num_aux, norm.variance_epsilon

    def forward(self, exit_hidden: Tensor, target_hidden: Tensor, rotary: Rotary, block_starts: Tensor) -> Tensor:
        """Return the normed hidden state; see `ExitHead.forward`."""
        exit_hidden, *aux = exit_hidden.chunk(1 + self._num_aux, dim=-1)
        # Without weights of their own: the projection that reads them has enough.
        aux = [F.rms_norm(state.float(), state.shape[-1:], eps=self._eps).to(state.dtype) for state in aux]
        context = torch.cat([target_hidden, self.layer.input_layernorm(exit_hidden), *aux], dim=-1)
        starts = block_starts.expand(len(exit_hidden), -1)[..., None]
        produced_input = torch.take_along_dim(target_hidden, (starts - 1).clamp(min=0), dim=1) * (starts > 0)
        hidden = exit_hidden + self.deep.inject(produced_input)
        # Four dimensions: with three, torch leaves its fused attention, which is four times as fast on a CPU.
        mask = block_mask(block_starts if block_starts.ndim == 2 else block_starts[None]).unsqueeze(1)
        for layer in (self, *self.upper):
            hidden = layer.run(hidden, context, rotary, mask)
        return self.norm(hidden)


def block_mask(block_starts: Tensor) -> Tensor:
    """Return which [deep, shallow] keys each query may see, [..., seq_len, 2 * seq_len] bool.

    Args:
        block_starts: [..., seq_len] int64, not decreasing.
    """
    positions = torch.arange(block_starts.shape[-1], device=block_starts.device)
    starts = block_starts[..., None]
    deep = positions < starts
    shallow = (positions >= starts) & (positions <= positions[:, None])
    return torch.cat([deep, shallow], dim=-1)


def _heads(projected: Tensor, head_dim: int, norm: nn.Module | None = None) -> Tensor:
    """Return [num_windows, num_heads, seq_len, head_dim]."""
    heads = projected.unflatten(-1, (-1, head_dim))
    return (heads if norm is None else norm(heads)).transpose(1, 2)


HEAD_CLASSES = {head.kind.name: head for head in (HeadlessHead, ExitHead, DeepContextHead)}


def _plain_layer(layer: nn.Module, config: Any) -> nn.Module:
    """Return a trainable copy of a decoder layer, without the scales and hooks that a quantised target's has."""
    weights = layer.state_dict()
    with torch.device(next(layer.parameters()).device):
        plain = type(layer)(config, layer.self_attn.layer_idx)
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    return plain.float().requires_grad_(True)


def new_head(target: Target, init: str, head_type: str = DEEP_CONTEXT.name, head_layers: int = 1) -> nn.Module:
    """Return a head that starts from the target's final norm and its `last` or `exit` layers, or from a head.

    Args:
        init: "last", "exit" (layer N and those after it) or the directory of a head, of any exit layer; what that one
            lacks starts as it does with "last", and its draft vocabulary is left out.
        head_layers: M, its decoder layers.
    Raises:
        ValueError: the directory holds no head, or one of another target.
    """
    decoder = target.model.model
    first = min(target.exit_layer if init == "exit" else math.inf, len(decoder.layers) - head_layers)
    layers = [_plain_layer(layer, target.config) for layer in decoder.layers[first : first + head_layers]]
    head = HEAD_CLASSES[head_type](layers, decoder.norm, len(target.aux_layers))
    if init not in ("last", "exit"):
        config = ExitHeadConfig.load(init)
        config.check_target(target.config)
        if config.aux_layers != target.aux_layers[: len(config.aux_layers)]:
            # The columns of its projections are in that order.
            raise ValueError(f"init: {init} reads layers {config.aux_layers}, not the first of {target.aux_layers}")
        own = head.state_dict()
        # What it did not read it begins by not looking at.
        tensors = {name: _padded(tensor, own[name]) for name, tensor in read_tensors(init).items() if name in own}
        head.load_state_dict(tensors, strict=False)
    return head.float()


def _padded(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a checkpoint's tensor with zeros for the columns that the head's own has beyond it."""
    more = like.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, more)) if more > 0 else tensor


def load_head(target: Target, directory: str | os.PathLike) -> nn.Module:
    """Return the head in `directory`, in float32, frozen.

    Raises:
        ValueError: no head there, or one of another target, exit layer or auxiliary layers.
    """
    config = ExitHeadConfig.load(directory)
    if config.exit_layer != target.exit_layer:
        raise ValueError(f"{directory} has exit_layer {config.exit_layer}, target loaded for {target.exit_layer}")
    if config.aux_layers != target.aux_layers:
        raise ValueError(f"{directory} has aux_layers {config.aux_layers}, target loaded for {target.aux_layers}")
    head = new_head(target, str(directory), config.head_type, config.head_layers)
    if (d2t := read_tensors(directory).get(D2T_NAME)) is not None:
        restrict(head, token_ids_of(d2t))
    return head.to(target.lm_head.weight.device).requires_grad_(False).eval()


def head_config(
    target: Target,
    name_or_path: str,
    head_type: str,
    prior: Prior,
    draft_vocab_size: int | None = None,
    head_layers: int = 1,
) -> ExitHeadConfig:
    """Return what the head's config.json says."""
    return ExitHeadConfig(
        exit_layer=target.exit_layer,
        head_type=head_type,
        head_layers=head_layers,
        aux_layers=target.aux_layers,
        verifier=target_verifier(target.config, name_or_path),
        transformer_layer_config=layer_config(target.config),
        draft_vocab_size=draft_vocab_size,
        prior=prior,
    )
