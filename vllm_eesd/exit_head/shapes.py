"""Which tensors a head holds, and their shapes, from its config alone."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME

# Tensors a decoder layer has beyond the Llama set, per model_type; a model_type missing here is refused.
EXTRA_TENSORS = {
    "granite": (),
    "llama": (),
    "mistral": (),
    "qwen2": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "qwen3_moe": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}
# model_types whose layers have experts in place of one MLP.
EXPERT_TYPES = {"qwen3_moe"}


class Target(Protocol):
    hidden_size: int


class Head(Protocol):
    """What shapes depend on, of `vllm_eesd.exit_head.config.ExitHeadConfig`."""

    head_type: str
    verifier: Target
    transformer_layer_config: dict[str, Any]
    draft_vocab_size: int | None


def expected_shapes(config: Head) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor a head's model.safetensors must hold; empty if headless.

    Raises:
        ValueError: transformer_layer_config lacks a size, contradicts the verifier, or is of an unknown model_type.
    """
    if config.head_type == "headless":
        return {}
    layer = config.transformer_layer_config
    model_type = layer.get("model_type")
    if not isinstance(model_type, str) or model_type not in EXTRA_TENSORS:
        raise ValueError(
            f"transformer_layer_config.model_type is {model_type!r:.80}, must be one of {sorted(EXTRA_TENSORS)}"
        )
    hidden = _size(layer, "hidden_size")
    if hidden != config.verifier.hidden_size:
        raise ValueError(
            f"transformer_layer_config.hidden_size is {hidden}, verifier.hidden_size {config.verifier.hidden_size}"
        )
    d2t = {} if config.draft_vocab_size is None else {D2T_NAME: (config.draft_vocab_size,)}
    if config.head_type == "mlp":
        return _mlp_head_shapes(layer, hidden) | d2t
    heads = _size(layer, "num_attention_heads")
    kv_heads = _size(layer, "num_key_value_heads", heads)
    head_dim = _size(layer, "head_dim", max(1, hidden // heads))
    shapes = {
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        **(_expert_shapes(layer, hidden) if model_type in EXPERT_TYPES else _mlp_shapes(layer, hidden)),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    extra = list(EXTRA_TENSORS[model_type])
    biased = [name for name, flag in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")) if layer.get(flag)]
    extra += [n.replace(".weight", ".bias") for n in shapes if n.endswith("_proj.weight") and n.split(".")[0] in biased]
    for name in extra:
        shapes[name] = shapes[name.replace(".bias", ".weight")][:1] if name.endswith(".bias") else (head_dim,)
    named = {f"layer.{name}": shape for name, shape in shapes.items()} | {"norm.weight": (hidden,)}
    if config.head_type == "deep_context":
        second = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
        named |= {f"deep.{n}": shapes[f"self_attn.{n}"] for n in second if f"self_attn.{n}" in shapes}
        named["deep.inject.weight"] = (hidden, hidden)
    return named | d2t


def _mlp_head_shapes(layer: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    if layer["model_type"] in EXPERT_TYPES:
        raise ValueError(
            f"head_type is 'mlp', must be 'transformer' or 'deep_context' for a {layer['model_type']} target, "
            "whose layers have experts"
        )
    shapes = _mlp_shapes(layer, hidden)
    if layer.get("mlp_bias"):
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    return shapes | {"input_norm.weight": (hidden,), "norm.weight": (hidden,)}


def _mlp_shapes(layer: dict[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    inner = _size(layer, "intermediate_size")
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


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
