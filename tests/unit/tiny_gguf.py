"""A random Llama of two layers as a GGUF file, with the tokenizer and chat template of a chat model."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS, POSITIONS = 128, 4, 2, 64, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ċ Ċ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def vocabulary() -> list[str]:
    """The special tokens, every byte's character, and what the merges make."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def weights(seed: int = 0) -> dict[str, tuple[np.ndarray, Kind]]:
    """Every tensor as it is stored, and how: norms in float32, the embedding in Q8_0, the rest in Q4_1."""
    rng, head_dim = np.random.default_rng(seed), HIDDEN // HEADS
    shapes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    shapes |= {name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
    shapes |= {name: (KV_HEADS * head_dim, HIDDEN) for name in ("attn_k", "attn_v")}
    shapes |= {"ffn_gate": (INTERMEDIATE, HIDDEN), "ffn_up": (INTERMEDIATE, HIDDEN), "ffn_down": (HIDDEN, INTERMEDIATE)}
    named = {f"blk.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    named |= {"token_embd.weight": (len(vocabulary()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    stored = {}
    for name, shape in named.items():
        kind = Kind.F32 if len(shape) == 1 else Kind.Q8_0 if name == "token_embd.weight" else Kind.Q4_1
        values = rng.normal(size=shape).astype(np.float32)
        stored[name] = (values if kind == Kind.F32 else gguf.quantize(values, kind)), kind
    return stored


def write(path: Path, architecture: str = "llama", pre: str = "smollm", **more: np.ndarray) -> None:
    """Write the file; `more` are tensors of other names."""
    writer, tokens = gguf.GGUFWriter(path, architecture), vocabulary()
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    for number, add in enumerate((writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id)):
        add(number)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, (data, kind) in weights().items():
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, values in more.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
