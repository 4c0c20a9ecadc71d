"""Which tensors a head holds, and their shapes, from its config alone."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME
from vllm_eesd.exit_head.types import HeadType

# Projections of a decoder layer's attention that have biases, and norms it has beyond the Llama set, per model_type; a
# model_type missing here is refused.
ATTENTION_BIASES = {"granite": "", "llama": "", "mistral": "", "qwen2": "qkv", "qwen3": "", "qwen3_moe": ""}
HEAD_NORM_TYPES = {"qwen3", "qwen3_moe"}
# model_types whose layers have experts in place of one MLP.
EXPERT_TYPES = {"qwen3_moe"}


class Head(Protocol):
    """What shapes depend on, of `vllm_eesd.exit_head.config.ExitHeadConfig`."""

    kind: HeadType
    head_layers: int
    aux_layers: list[int]
    verifier: Any
    transformer_layer_config: dict[str, Any]
    draft_vocab_size: int | None


def expected_shapes(config: Head) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor a head's model.safetensors must hold; empty if headless.

    Raises:
        ValueError: transformer_layer_config lacks a size, contradicts the verifier, or is of an unknown model_type.
    """
    if not config.kind.has_kv:
        return {}
    layer = config.transformer_layer_config
    model_type = layer.get("model_type")
    if not isinstance(model_type, str) or model_type not in ATTENTION_BIASES:
        raise ValueError(
            f"transformer_layer_config.model_type is {model_type!r:.80}, must be one of {sorted(ATTENTION_BIASES)}"
        )
    if (hidden := _size(layer, "hidden_size")) != config.verifier.hidden_size:
        raise ValueError(
            f"transformer_layer_config.hidden_size is {hidden}, verifier.hidden_size {config.verifier.hidden_size}"
        )
    shapes = _expert_shapes(layer, hidden) if model_type in EXPERT_TYPES else _mlp_shapes(layer, hidden)
    shapes |= _attention_shapes(layer, hidden)
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes = {f"layer.{name}": shape for name, shape in shapes.items()}
    if config.kind.reads_target_output:
        shapes |= _deep_shapes(shapes, config, hidden)
    if config.draft_vocab_size is not None:
        shapes[D2T_NAME] = (config.draft_vocab_size,)
    return shapes | {"norm.weight": (hidden,)}


def _deep_shapes(layer: dict[str, tuple[int, ...]], config: Head, hidden: int) -> dict[str, tuple[int, ...]]:
    """What a head has beyond its first layer's own tensors, if it reads the target's output."""
    read_again = ("layer.self_attn.k_proj.", "layer.self_attn.v_proj.")
    # A bias has one dimension; a weight reads two hidden states, and the auxiliary ones, side by side.
    read = 2 + len(config.aux_layers)
    deep = {
        name.replace("layer.self_attn", "deep"): (shape[0], *(read * size for size in shape[1:]))
        for name, shape in layer.items()
        if name.startswith(read_again)
    }
    upper = range(config.head_layers - 1)
    uppers = {f"upper.{index}.{name}": shape for name, shape in (layer | deep).items() for index in upper}
    return deep | uppers | {"deep.inject.weight": (hidden, hidden)}


def _attention_shapes(layer: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    heads = _size(layer, "num_attention_heads")
    kv_heads = _size(layer, "num_key_value_heads", heads)
    head_dim = _size(layer, "head_dim", max(1, hidden // heads))
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    shapes = {f"self_attn.{name}_proj.weight": (width, hidden) for name, width in widths.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, widths["q"])
    biased = "qkvo" if layer.get("attention_bias") else ATTENTION_BIASES[layer["model_type"]]
    shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in biased}
    if layer["model_type"] in HEAD_NORM_TYPES:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _mlp_shapes(layer: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    inner = _size(layer, "intermediate_size")
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    biases = {f"mlp.{name}.bias": shape[:1] for name, shape in shapes.items() if layer.get("mlp_bias")}
    return {f"mlp.{name}.weight": shape for name, shape in shapes.items()} | biases


def _expert_shapes(layer: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Experts are stored together, as transformers' modules hold them: gate and up projection in one tensor."""
    experts, inner = _size(layer, "num_experts"), _size(layer, "moe_intermediate_size")
    step, plain = layer.get("decoder_sparse_step", 1), layer.get("mlp_only_layers")
    if step != 1 or plain:
        raise ValueError(
            f"transformer_layer_config: decoder_sparse_step is {step!r:.80} and mlp_only_layers {plain!r:.80}: "
            "only targets whose layers all have experts are supported"
        )
    return {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
    }


def _size(layer: dict[str, Any], field: str, default: int | None = None) -> int:
    value = layer.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"transformer_layer_config.{field} is {value!r:.80}, must be a whole number, 1 or more")
    return value
