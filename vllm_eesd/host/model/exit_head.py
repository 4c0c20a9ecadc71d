"""The exit head on vLLM's own layers."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, read_tensors
from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME, token_ids_of
from vllm_eesd.exit_head.types import DEEP_CONTEXT, TRANSFORMER
from vllm_eesd.host.compat import (
    AutoWeightsLoader,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    VllmConfig,
    init_logger,
    process_weights_after_loading,
    set_default_torch_dtype,
)
from vllm_eesd.host.model.draft_vocabulary import DraftVocabulary
from vllm_eesd.host.model.kv_fill import fill_layer
from vllm_eesd.host.model.layers import carries_residual, run_layer, summed

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

logger = init_logger("vllm.eesd")
#: A norm's weight below which what it passes on is taken for nothing; its inverse must fit into float16.
NO_WEIGHT = 1e-4


class ExitHead(nn.Module):
    """One decoder layer of the target's own kind with its own KV, then an RMSNorm.

    Args:
        vllm_config: of the engine.
        target: the loaded target; its layer `exit_layer` is the pattern.
        config: the head's.
    Attributes:
        vocabulary: what of the target's vocabulary it drafts from; None is all of it. Set by `load`.
        loaded_with: the arguments of `load`, the target aside.
        attention_names: of the layers whose KV is the head's own.
        kind: its type; where it `reads_target_output`, so does `round_context`.
    Source: arXiv 2406.03853, section 3.1 (early-exiting layer).
    """

    vocabulary: DraftVocabulary | None
    loaded_with: tuple[VllmConfig, ExitHeadConfig, str]
    kind = TRANSFORMER

    def __init__(self, vllm_config: VllmConfig, target: nn.Module, config: ExitHeadConfig) -> None:
        super().__init__()
        hf_config = vllm_config.model_config.hf_text_config
        self.layer = _new_layer(vllm_config, target, 0)
        self._with_residual = carries_residual(self.layer)
        self.norm = RMSNorm(hf_config.hidden_size, eps=hf_config.rms_norm_eps)

    @property
    def decoder_layers(self) -> tuple[nn.Module, ...]:
        """The layers with KV of their own, in the order they run."""
        return (self.layer,)

    @property
    def attention_names(self) -> tuple[str, ...]:
        return tuple(layer.self_attn.attn.layer_name for layer in self.decoder_layers)

    @classmethod
    def load(cls, vllm_config: VllmConfig, target: nn.Module, config: ExitHeadConfig, directory: str) -> ExitHead:
        """Return the head with its weights, ready to run. Must be called inside `set_current_vllm_config`."""
        model_config = vllm_config.model_config
        device = next(target.parameters()).device
        tensors = read_tensors(directory)
        d2t = tensors.pop(D2T_NAME, None)
        with set_default_torch_dtype(model_config.dtype), device:
            head = cls(vllm_config, target, config)
            head.vocabulary = None if d2t is None else DraftVocabulary(target, token_ids_of(d2t))
        head.loaded_with = vllm_config, config, directory
        mapper = getattr(type(target.model), "hf_to_vllm_mapper", None) or type(target).hf_to_vllm_mapper
        head.load_tensors(tensors, mapper)
        process_weights_after_loading(head, model_config, device)
        return head.eval()

    def load_tensors(self, tensors: dict[str, torch.Tensor], mapper: WeightsMapper) -> None:
        """Copy the checkpoint's tensors in; `mapper` is the target's, from its names to vLLM's."""
        AutoWeightsLoader(self).load_weights(tensors.items(), mapper=mapper)

    def target_changed(self, target: nn.Module) -> None:
        """Derive anew what was derived from the target's weights, which are others than while it was loaded.

        Must be called inside `set_current_vllm_config`.
        """
        if self.vocabulary is not None:
            self.vocabulary.target_changed(target)

    def hook_kv_fill(self, target: nn.Module, exit_layer: int) -> None:
        """Make every forward of the target fill the exit layer's KV just before layer `exit_layer` runs.

        Prompt chunks, verified drafts, prefix reuse and preemption need no code of their own this way, and the fill is
        part of the target's compiled graph.
        """
        target.model.layers[exit_layer].register_forward_pre_hook(lambda _, args: self.fill_kv(*args))

    def round_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the exit layer's input throughout a round; a transformer head adds nothing.

        Args:
            target_hidden_states: [num_reqs, hidden_size], the target's normed output at the round's input token.
        """
        return None

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return two tensors whose sum, normed by `norm`, is for the LM head, [num_tokens, hidden_size]; None is 0."""
        return run_layer(self.layer, self._with_residual, positions, hidden_states, None)

    def fill_kv(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        """Write this layer's K/V for what enters target layer N: norm, k/v projection, rope, cache write; no attention.

        Args:
            positions: [num_tokens] int64.
            hidden_states, residual: [num_tokens, hidden_size], layer N's own arguments; their sum is h_N.
        """
        attention = self.layer.self_attn
        # The sum is a new tensor: RMSNorm(x, residual) would write into the target's residual stream.
        qkv, _ = attention.qkv_proj(self.layer.input_layernorm(summed(hidden_states, residual)))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        fill_layer(attention, positions, hidden_states, query, key, value)

    def fill_by(self, fill: Callable[..., None]) -> None:
        """Have the KV fill done by `fill`, called as `write_kv` is, with keys as the projection left them.

        To be called before anything is compiled. `fill` is also given `layer`, the attention module it fills for.
        """
        for layer in self.decoder_layers:
            layer.self_attn.attn.eesd_fill = functools.partial(fill, layer=layer.self_attn)


class DeepLayer(nn.Module):
    """A decoder layer above another one, and, until the weights are loaded, what projects its KV of verified tokens.

    Args:
        index: of the head's layers, from 0.
    """

    def __init__(self, vllm_config: VllmConfig, target: nn.Module, config: ExitHeadConfig, index: int) -> None:
        super().__init__()
        self.layer = _new_layer(vllm_config, target, index)
        self.kv_proj = _kv_projection(self.layer.self_attn, vllm_config, config)


class DeepContextHead(ExitHead):
    """An exit head whose KV of verified tokens comes from the target's last hidden state, h_N and others, all normed.

    Drafting writes KV from a layer's own input; verification then overwrites it. The normed output that
    produced the round's input token is also added, projected, to the first layer's input in every step of the round.
    """

    kind = DEEP_CONTEXT

    def __init__(self, vllm_config: VllmConfig, target: nn.Module, config: ExitHeadConfig) -> None:
        super().__init__(vllm_config, target, config)
        hf_config = vllm_config.model_config.hf_text_config
        hidden_size, layers = hf_config.hidden_size, target.model.layers
        #: Those of the target whose outputs the KV is made of; a tuple hides them from this module's parameters.
        self._norms_read = (
            target.model.norm,
            *(layers[index].input_layernorm for index in (config.exit_layer, *config.aux_layers)),
        )
        self.kv_proj = _kv_projection(self.layer.self_attn, vllm_config, config)
        self.inject = ReplicatedLinear(hidden_size, hidden_size, bias=False, prefix="eesd_exit.inject")
        upper = range(1, config.head_layers)
        self.upper = nn.ModuleList(DeepLayer(vllm_config, target, config, index) for index in upper)

    @property
    def decoder_layers(self) -> tuple[nn.Module, ...]:
        return (self.layer, *(upper.layer for upper in self.upper))

    def load_tensors(self, tensors: dict[str, torch.Tensor], mapper: WeightsMapper) -> None:
        super().load_tensors({name: t for name, t in tensors.items() if "deep" not in name.split(".")}, mapper)
        self.inject.weight_loader(self.inject.weight, tensors["deep.inject.weight"])
        self._load_projections(tensors)
        self._join_projections()

    def _load_projections(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy the checkpoint's projections of keys and values into those of every layer."""
        for name, tensor in tensors.items():
            match name.split("."):
                case [*above, "deep", "k_proj" | "v_proj" as projection, parameter]:
                    kv_proj = self.get_submodule(".".join([*above, "kv_proj"]))
                    kv_proj.weight_loader(getattr(kv_proj, parameter), tensor, projection[0])

    def _join_projections(self) -> None:
        """Put the projections of all layers, which read the same states, into one: a matrix product less for each.

        It holds this rank's share of them: replicated in name only.
        """
        parts = [layer.kv_proj for layer in (self, *self.upper)]
        has_bias = parts[0].bias is not None
        sizes = parts[0].input_size, sum(len(part.weight) for part in parts)
        self.fill_proj = ReplicatedLinear(*sizes, bias=has_bias, prefix="eesd_exit.fill_proj")
        if has_bias:
            self.fill_proj.bias.data = torch.cat([part.bias.data for part in parts])
        self.fill_proj.weight.data = self._joined_weight()

    def _joined_weight(self) -> torch.Tensor:
        """Return the weight of `fill_proj`; the projections it is made of are not kept."""
        layers = (self, *self.upper)
        weight = torch.cat([layer.kv_proj.weight.data for layer in layers])
        for layer in layers:
            del layer.kv_proj
        return (weight.float() * self._scales_of_inputs()).to(weight.dtype)

    def target_changed(self, target: nn.Module) -> None:
        super().target_changed(target)
        vllm_config, config, directory = self.loaded_with
        tensors = read_tensors(directory)  # before anything is changed: the directory may be gone
        with set_default_torch_dtype(vllm_config.model_config.dtype), next(target.parameters()).device:
            for layer in (self, *self.upper):
                layer.kv_proj = _kv_projection(layer.layer.self_attn, vllm_config, config)
        self._load_projections(tensors)
        weight = self._joined_weight()
        if self.fill_proj.weight.shape == weight.shape:  # CUDA graphs read it where it lies
            self.fill_proj.weight.data.copy_(weight)
        else:  # a CPU has packed it away, and left an empty one
            self.fill_proj.weight = nn.Parameter(weight, requires_grad=False)
        self.fill_proj.quant_method.process_weights_after_loading(self.fill_proj)

    def _scales_of_inputs(self) -> torch.Tensor:
        """Return what makes the target's normed states those that the projection was trained on, [its inputs] float32.

        Those were normed with the head's own weights (h_N) or without (auxiliary layers). The target norms them anyway,
        with weights of its own, so that nothing need be computed for the fill but their ratio, once. Where a weight of
        the target's is as good as zero, the state cannot be seen through it: it counts for nothing.
        """
        last, *others = (norm.weight.data.float() for norm in self._norms_read)
        one = torch.ones_like(last)
        wanted = self.layer.input_layernorm.weight.data.float(), *(one for _ in others[1:])
        ratios = (
            torch.where(own.abs() < NO_WEIGHT, 0.0, weight / own) for weight, own in zip(wanted, others, strict=True)
        )
        return torch.cat([one, *ratios])

    def hook_kv_fill(self, target: nn.Module, exit_layer: int) -> None:
        """Make every forward of the target fill the exit layers' KV when its last norm has run.

        The normed states wait for that in a mapping: the compiler sees where they go, and keeps them alive. The sums
        they are made of it could not keep: vLLM's norms may write over what they read.
        """
        last_norm, *norms = self._norms_read
        kept: dict[int | str, torch.Tensor] = {}

        def keep_at(place: int) -> Callable[..., None]:
            def keep(_norm: nn.Module, _args: tuple[torch.Tensor, ...], output: tuple | torch.Tensor) -> None:
                kept[place] = _normed_of(output)

            return keep

        def fill(_norm: nn.Module, _args: tuple[torch.Tensor, ...], output: tuple | torch.Tensor) -> None:
            last = _normed_of(output)
            context = torch.cat([last, *(kept.pop(place) for place in range(len(norms)))], dim=-1)
            layers, positions = self.decoder_layers, kept.pop("positions")
            keys_and_values = self.fill_proj(context)[0].chunk(2 * len(layers), dim=-1)
            for layer, key, value in zip(layers, keys_and_values[::2], keys_and_values[1::2], strict=True):
                written = torch.zeros_like(key), key.contiguous(), value.contiguous()
                fill_layer(layer.self_attn, positions, last, *written)

        def keep_positions(_layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            kept["positions"] = args[0]

        target.model.layers[exit_layer].register_forward_pre_hook(keep_positions)
        for place, norm in enumerate(norms):
            norm.register_forward_hook(keep_at(place))
        last_norm.register_forward_hook(fill)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual = None
        for layer in self.decoder_layers:
            hidden_states, residual = run_layer(layer, self._with_residual, positions, hidden_states, residual)
        return hidden_states, residual

    def round_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor:
        return self.inject(target_hidden_states)[0]


HEAD_CLASSES = {head.kind.name: head for head in (ExitHead, DeepContextHead)}


def load_head(
    vllm_config: VllmConfig, target: nn.Module, config: ExitHeadConfig, directory: str | None
) -> ExitHead | None:
    """Return the exit head, its KV fill hooked into the target; None where the target's own norm drafts.

    Must be called inside `set_current_vllm_config`.

    Args:
        directory: of the head's weights, None where it has none.
    """
    parts = config.exit_layer, config.head_type, config.head_layers
    logger.info("EESD drafts with the target's first %d layers and a %s exit head of %d", *parts)
    if directory is None:
        return None
    head = HEAD_CLASSES[config.head_type].load(vllm_config, target, config, directory)
    head.hook_kv_fill(target, config.exit_layer)
    return head


def _normed_of(output: tuple[torch.Tensor, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the normed state of what an RMSNorm returned, which may be with the residual beside it."""
    return output[0] if isinstance(output, tuple) else output


def _kv_projection(attention: nn.Module, vllm_config: VllmConfig, config: ExitHeadConfig) -> QKVParallelLinear:
    """Return a layer's projection of two hidden states and the auxiliary ones, without queries.

    Where there are more ranks than KV heads, several hold one head.
    """
    return QKVParallelLinear(
        (2 + len(config.aux_layers)) * vllm_config.model_config.hf_text_config.hidden_size,
        attention.head_dim,
        total_num_heads=0,
        total_num_kv_heads=attention.total_num_kv_heads,
        bias=attention.qkv_proj.bias is not None,
        prefix="eesd_exit.kv_proj",
    )


def _new_layer(vllm_config: VllmConfig, target: nn.Module, index: int) -> nn.Module:
    """Return a decoder layer of the target's own kind, not quantised, as the head's layer `index`."""
    unquantised = copy.copy(vllm_config)
    unquantised.quant_config = None
    available = {
        "vllm_config": unquantised,
        "config": vllm_config.model_config.hf_text_config,
        "cache_config": vllm_config.cache_config,
        "quant_config": None,
        # One integer that no target layer has: vLLM orders KV caches by it.
        "prefix": f"eesd_exit.layers.{len(target.model.layers) + index}",
    }
    layer_class = type(target.model.layers[-1])
    wanted = inspect.signature(layer_class.__init__).parameters  # they differ by model
    return layer_class(**{name: value for name, value in available.items() if name in wanted})
