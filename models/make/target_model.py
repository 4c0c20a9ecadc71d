"""The embedded target as training sees it: Llama's forward pass over a flat dictionary of float32 weights.

The names are those of `transformers`' LlamaForCausalLM, which loads the dictionary as it is. Written out because an
eager step in bfloat16 is then as fast on two cores as a compiled one, and starts at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

PREFIX = "model.layers."
EPSILON = 1e-6
ROPE_THETA = 10_000.0
MAX_POSITIONS = 2048
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `layers` changes when it grows."""

    layers: int = 12
    hidden: int = 256
    intermediate: int = 704
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=EPSILON,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        )


def new_weights(shape: Shape, seed: int) -> Weights:
    """Return random weights, normal with deviation 0.02.

    What is added to the residual stream starts smaller with depth (GPT-2's initialisation), or a deep, narrow model
    stalls.
    """
    torch.manual_seed(seed)
    kv = shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (shape.hidden, shape.hidden), "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden), "self_attn.o_proj": (shape.hidden, shape.hidden),
        "mlp.gate_proj": (shape.intermediate, shape.hidden), "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": 0.02 * torch.randn(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        for name, size in sizes.items():
            deviation = 0.02 / math.sqrt(2 * shape.layers) if name.endswith(("o_proj", "down_proj")) else 0.02
            weights[f"{PREFIX}{layer}.{name}.weight"] = deviation * torch.randn(size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{PREFIX}{layer}.{name}.weight"] = torch.ones(shape.hidden)
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    return weights


def rotation(shape: Shape, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE's (cos, sin), each [length, head_dim / 2]."""
    frequencies = ROPE_THETA ** -(torch.arange(0, shape.head_dim, 2, device=like.device) / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=like.device), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(shape: Shape, w: Weights, at: str, x: torch.Tensor, rope: tuple) -> torch.Tensor:
    """Return the attention's output, [batch, length, hidden], for normed hidden states of that shape."""
    batch, length, _ = x.shape
    projections = torch.cat([w[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv"])
    heads = F.linear(x, projections).view(batch, length, -1, shape.head_dim).transpose(1, 2)
    q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    repeats = shape.heads // shape.kv_heads
    k, v = rotate(k, *rope).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out = F.scaled_dot_product_attention(rotate(q, *rope), k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(batch, length, -1), w[f"{at}.self_attn.o_proj.weight"])


def mlp(w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    both = F.linear(x, torch.cat((w[f"{at}.mlp.gate_proj.weight"], w[f"{at}.mlp.up_proj.weight"])))
    gate, up = both.chunk(2, -1)
    return F.linear(F.silu(gate) * up, w[f"{at}.mlp.down_proj.weight"])


def logits_of(shape: Shape, w: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [batch, length, vocab] in the weights' type.

    Args:
        ids: [batch, length] int64.
    """
    size = (shape.hidden,)
    x = F.embedding(ids, w["model.embed_tokens.weight"])
    rope = rotation(shape, ids.shape[1], x)
    for layer in range(shape.layers):
        at = f"{PREFIX}{layer}"
        x = x + attention(shape, w, at, F.rms_norm(x, size, w[f"{at}.input_layernorm.weight"], EPSILON), rope)
        x = x + mlp(w, at, F.rms_norm(x, size, w[f"{at}.post_attention_layernorm.weight"], EPSILON))
    return F.linear(F.rms_norm(x, size, w["model.norm.weight"], EPSILON), w["model.embed_tokens.weight"])


def loss_of(shape: Shape, weights: Weights, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean loss in nats per token, computed with the weights rounded to `dtype`.

    Args:
        ids: [batch, length + 1] int64.
    """
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    logits = logits_of(shape, rounded, ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def stacked(shallow: Weights, num_layers: int) -> Weights:
    """Repeat a shallow model's layers until there are `num_layers`.

    Source: "Stacking Your Transformers", arXiv 2405.15319 (depthwise stacking of a trained model).
    """
    depth = 1 + max(int(name[len(PREFIX) :].split(".")[0]) for name in shallow if name.startswith(PREFIX))
    grown = {name: tensor for name, tensor in shallow.items() if not name.startswith(PREFIX)}
    for layer in range(num_layers):
        source = f"{PREFIX}{layer % depth}."
        grown |= {f"{PREFIX}{layer}.{n[len(source) :]}": t.clone() for n, t in shallow.items() if n.startswith(source)}
    return grown


def to_transformers(shape: Shape, weights: Weights) -> LlamaForCausalLM:
    """Return the same model as `transformers` has it, in float32."""
    model = LlamaForCausalLM(shape.config())
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model.eval()
