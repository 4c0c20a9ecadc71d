"""What must be known of a target before it is loaded, and patched after: its config, quantisation, scaled logits.

Also what an exit head's config says of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, CompressedTensorsConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS

from vllm_eesd.distill.precision import uses_bfloat16
from vllm_eesd.exit_head.checkpoint import Verifier
from vllm_eesd.exit_head.shapes import ATTENTION_BIASES

# What of the target's config says how its layers are built.
LAYER_CONFIG_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings", "rope_parameters",
    "residual_multiplier", "attention_multiplier", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip


def read_config(name_or_path: str) -> Any:
    """Return the target's transformers config.

    Raises:
        ValueError: no such model, or an unsupported kind of it.
    """
    try:
        config = AutoConfig.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"model: {name_or_path!r} is no model directory and no known model id ({reason})") from None
    if config.model_type not in ATTENTION_BIASES:
        raise ValueError(
            f"model: {name_or_path!r} has model_type {config.model_type!r}, must be one of {sorted(ATTENTION_BIASES)}"
        )
    return config


def decompression(name_or_path: str, config: Any) -> dict[str, Any]:
    """Return the options that load a quantised target with its weights as numbers.

    Activations stay quantised in the forward pass, by compressed-tensors' own scales, which are near vLLM's but not
    equal to the bit.

    Raises:
        ValueError: quantised by another method than compressed-tensors.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return {}
    method = quantisation["quant_method"] if isinstance(quantisation, dict) else quantisation.quant_method
    if method != "compressed-tensors":
        raise ValueError(f"model: {name_or_path!r} is quantised by {str(method)!r}, must be by 'compressed-tensors'")
    return {"quantization_config": CompressedTensorsConfig(run_compressed=False)}


def fold_logits_scaling(model: nn.Module) -> None:
    """Put the constant that Granite divides its logits by into the LM head's weight, which all here read directly."""
    scaling = getattr(model.config, "logits_scaling", 1.0)
    if scaling != 1.0:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight / scaling)
        model.config.logits_scaling = 1.0


def layer_config(config: Any) -> dict[str, Any]:
    """Return what of the target's config says how its layers are built."""
    return {field: getattr(config, field) for field in LAYER_CONFIG_FIELDS if getattr(config, field, None) is not None}


def target_verifier(config: Any, name_or_path: str) -> Verifier:
    """Return the description of a target; a local one is named by its directory only."""
    local = Path(name_or_path).exists()
    return Verifier(
        name_or_path=Path(name_or_path).resolve().name if local else name_or_path,
        architecture=(config.architectures or [CAUSAL_LMS[config.model_type]])[0],
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
    )


def saved_dtype(name_or_path: str) -> torch.dtype:
    """Return the dtype the target's weights are stored in: the head is served in it, so it is stored in it too."""
    dtype = read_config(name_or_path).dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def computing_dtype(name_or_path: str, device: str) -> torch.dtype:
    """Return the dtype a target is held and run in: its own, but float32 on a CPU where that is faster.

    A CPU runs bfloat16 where it multiplies it in hardware, and float16 never.
    """
    own = saved_dtype(name_or_path)
    return own if device == "cuda" or own == torch.bfloat16 and uses_bfloat16(device) else torch.float32
