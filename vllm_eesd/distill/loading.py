"""What must be known of a target before it is loaded, and mended after: its config, quantisation, scaled logits."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, CompressedTensorsConfig

from vllm_eesd.exit_head.shapes import EXTRA_TENSORS


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
    if config.model_type not in EXTRA_TENSORS:
        raise ValueError(
            f"model: {name_or_path!r} has model_type {config.model_type!r}, must be one of {sorted(EXTRA_TENSORS)}"
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
