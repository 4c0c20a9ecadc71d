"""A Llama from a GGUF file, as a directory that transformers and vLLM read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

WEIGHTS, CONFIG, GENERATION_CONFIG = "model.safetensors", "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
#: What `convert` writes.
FILES = (WEIGHTS, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
NAMES |= {"output.weight": "lm_head.weight"}
#: GGUF's names within a layer, and transformers'.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: What can be converted, by the file's own fields.
CONVERTED = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
#: Of a token: it stands for itself only where the text names it, and is left out of decoded text.
CONTROL = 3
SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def convert(source: Path, directory: Path) -> None:
    """Write the model of a GGUF file into a directory, in bfloat16.

    Raises:
        ModuleNotFoundError: the package gguf is missing.
        ValueError: the file holds another kind of model.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    for name, wanted in CONVERTED.items():
        if (found := _value(reader, name)) != wanted:
            raise ValueError(f"{source}: {name}={found!r} cannot be converted; allowed: {wanted!r}")
    tokens, config = _value(reader, "tokenizer.ggml.tokens"), llama_config(reader)
    special = {name: index for name, key in SPECIAL.items() if (index := _value(reader, f"tokenizer.ggml.{key}"))
               is not None}  # fmt: skip
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    save_file(state_dict(reader, *heads), directory / WEIGHTS, metadata={"format": "pt"})
    ids = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad") if name in special}
    write_json(directory / CONFIG, config | ids)
    write_json(directory / GENERATION_CONFIG, ids)
    write_tokenizer(reader, directory / TOKENIZER)
    names = {f"{name}_token": tokens[index] for name, index in special.items()}
    length = {"model_max_length": config["max_position_embeddings"], "clean_up_tokenization_spaces": False}
    write_json(directory / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **names, **length})
    (directory / CHAT_TEMPLATE).write_text(_value(reader, "tokenizer.chat_template") or "", encoding="utf-8")


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the config of a Llama, without its special tokens."""
    import numpy as np

    def of(name: str) -> Any:
        return _value(reader, f"llama.{name}")

    # They are float32 there: the shortest decimals that are those.
    theta, epsilon = (
        float(str(np.float32(of(name)))) for name in ("rope.freq_base", "attention.layer_norm_rms_epsilon")
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": of("context_length"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def state_dict(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Return the weights under transformers' names, dequantised and rounded to bfloat16."""
    import torch
    from gguf import dequantize

    heads, weights = {"attn_q": num_heads, "attn_k": num_kv_heads}, {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        part = rest.removesuffix(".weight")
        if tensor.name in NAMES:
            name = NAMES[tensor.name]
        elif block.isdecimal() and part in LAYER_NAMES:
            name = f"model.layers.{block}.{LAYER_NAMES[part]}.weight"
            values = halves_of_heads(values, heads[part]) if part in heads else values
        else:
            raise ValueError(f"tensor {tensor.name!r} cannot be converted; allowed: those of a Llama without biases")
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return weights


def halves_of_heads(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a query or key projection with the two halves of every head one after the other.

    GGUF's Llama rotates pairs of neighbours, transformers' pairs of one row of each half.

    Args:
        values: [num_heads * head_dim, hidden_size].
    """
    return values.reshape(num_heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def write_tokenizer(reader: GGUFReader, path: Path) -> None:
    """Write the byte-level BPE as `tokenizers` reads it: every digit by itself, as the file's `smollm` means."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = (_value(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(path))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _value(reader: GGUFReader, name: str) -> Any:
    """Return a field of the file, None if it has none of that name."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()
