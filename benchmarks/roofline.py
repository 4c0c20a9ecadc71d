"""What steps would cost on a machine that was not measured: bytes over bandwidth or FLOPs over peak, whichever is more.

A step over t tokens of n requests with context c, through some layers and perhaps the LM head, on `tp` devices:

    linear layers   bytes: weights / tp                          FLOPs: 2 * weights * t / tp
    attention       bytes: n * c * 2 * kv_heads * head_dim / tp  FLOPs: 4 * heads * head_dim * c * t / tp
    LM head         bytes: hidden * vocab / tp                   FLOPs: 2 * hidden * vocab * t / tp
    KV fill         bytes: weights / tp                          FLOPs: 2 * weights * t / tp     (not of a plain step)
    links           two all-reduces of t * hidden a layer, each sending 2 (tp - 1) / tp of it; one gather of the logits

Each line takes as long as the longer of its two, lines come one after another. Nothing is known here of kernel
launches, of latencies of links, of the engine's own work, or of how much of the published peaks is reached: real steps
take longer, and short ones (a draft step) suffer more. What is known of that is added (`Roofline`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Bytes of a weight. With fp8 weights keys, values and what devices send each other stay in bfloat16, vLLM's default.
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0}
KV_BYTES = SENT_BYTES = 2.0
#: Llama 3's proportions, for what is not given: an MLP of 3.5 times the width, heads of 128, 8 of them for KV.
MLP_RATIO, HEAD_DIM, KV_HEADS = 3.5, 128, 8


@dataclass(frozen=True)
class Gpu:
    """Published figures of one device; peaks are dense (half of what is printed "with sparsity").

    Attributes:
        memory_gb: 1e9 bytes.
        bandwidth_tb_s: of its memory, 1e12 bytes a second.
        tflops: by dtype, tensor cores, accumulating in float32; without an entry the device has no such arithmetic.
        link_gb_s: to its peers, both directions together, 1e9 bytes a second.
        source: where the figures are printed.
    """

    memory_gb: float
    bandwidth_tb_s: float
    tflops: dict[str, float]
    link_gb_s: float
    source: str


GPUS = {
    "a100": Gpu(80, 2.039, {"bfloat16": 312}, 600, "NVIDIA A100 80GB SXM datasheet, 2021"),
    "b200": Gpu(180, 8.0, {"bfloat16": 2250, "fp8": 4500}, 1800, "NVIDIA HGX B200 datasheet, 2024, per GPU"),
    "h100": Gpu(80, 3.35, {"bfloat16": 989, "fp8": 1979}, 900, "NVIDIA H100 SXM datasheet, 2023"),
    "h200": Gpu(141, 4.8, {"bfloat16": 989, "fp8": 1979}, 900, "NVIDIA H200 SXM datasheet, 2023"),
    "l4": Gpu(24, 0.3, {"bfloat16": 121, "fp8": 242}, 64, "NVIDIA L4 datasheet, 2023 (PCIe 4.0 x16)"),
    "l40s": Gpu(48, 0.864, {"bfloat16": 362, "fp8": 733}, 64, "NVIDIA L40S datasheet, 2023 (PCIe 4.0 x16)"),
}


@dataclass(frozen=True)
class Shape:
    """A dense decoder's sizes; experts are not modelled."""

    layers: int
    hidden: int
    vocab: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layers: int, hidden: int, vocab: int, **given: int | None) -> Shape:
        """Return a shape with `MLP_RATIO` and so on for whatever is None."""
        head_dim = given.get("head_dim") or HEAD_DIM
        heads = given.get("heads") or max(1, hidden // head_dim)
        kv_heads = given.get("kv_heads") or min(KV_HEADS, heads)
        intermediate = given.get("intermediate") or int(MLP_RATIO * hidden)
        return cls(layers, hidden, vocab, intermediate, heads, kv_heads, head_dim)

    @classmethod
    def read(cls, model: str) -> Shape:
        """Return the shape in a model directory's config.json.

        Raises:
            ValueError: there is none, a size is missing, or the model has experts.
        """
        path = Path(model) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            sizes = {
                "layers": config["num_hidden_layers"],
                "hidden": hidden,
                "vocab": config["vocab_size"],
                "intermediate": config["intermediate_size"],
                "heads": heads,
                "kv_heads": config.get("num_key_value_heads") or heads,
                "head_dim": config.get("head_dim") or hidden // heads,
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"--model {model!r}: config.json cannot be used ({reason})") from None
        if config.get("num_experts") or config.get("num_local_experts"):
            raise ValueError(f"--model {model!r} has experts, which are not modelled; allowed: dense decoders")
        return cls(**sizes)

    @property
    def layer_weights(self) -> int:
        """Weights of one decoder layer's matrices."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weights(self) -> int:
        """Weights of all layers, the embedding and the LM head."""
        return self.layers * self.layer_weights + 2 * self.vocab * self.hidden

    @property
    def kv_bytes(self) -> float:
        """Of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * KV_BYTES

    def work(
        self, layers: int, num_reqs: int, tokens: int, context: int, dtype: str
    ) -> tuple[tuple[float, float], ...]:
        """Return (bytes, FLOPs) of a step's linear layers, its attention and its LM head, on all devices together."""
        head, size = self.hidden * self.vocab, WEIGHT_BYTES[dtype]
        linear = layers * self.layer_weights
        attention = layers * 4 * self.heads * self.head_dim * context * tokens
        return (
            (linear * size, 2.0 * linear * tokens),
            (layers * num_reqs * context * self.kv_bytes, float(attention)),
            (head * size, 2.0 * head * tokens),
        )


@dataclass(frozen=True)
class Roofline:
    """Costs of one target on one machine.

    Attributes:
        shape: the target's.
        exit_layer: N, the target's layers that a draft step runs.
        head_layers: M, the exit head's layers after them; 0 without a head.
        gpu: one device.
        tp: devices, tensor parallel.
        dtype: of the weights, one that the device has.
        context: tokens of each request in the cache.
        reached: share of the published bandwidth and peak that is reached.
        step_overhead_ms, draft_overhead_ms: what a roofline cannot know, added to every engine step and draft step.
        round_overhead_ms: the same of a round that drafts, in addition to its draft steps.
        verify_overhead_ms: of a step that verifies drafts, in addition to running them through the target.
        draft_vocab: rows of the LM head that a draft step multiplies; None: the whole vocabulary.
        fill_states: hidden states of every token from which the KV fill makes the head's keys and values: 2 and the
            auxiliary layers' of a `deep_context` head; 0: no fill.
    """

    shape: Shape
    exit_layer: int
    head_layers: int
    gpu: Gpu
    tp: int = 1
    dtype: str = "bfloat16"
    context: int = 1024
    reached: float = 1.0
    step_overhead_ms: float = 0.0
    draft_overhead_ms: float = 0.0
    round_overhead_ms: float = 0.0
    verify_overhead_ms: float = 0.0
    draft_vocab: int | None = None
    fill_states: int = 0

    def plain_ms(self, num_reqs: int) -> float:
        """Return the time of a step of plain decoding: one token of each request, no exit head whose KV is filled."""
        return self._forward_ms(self.shape, self.shape.layers, num_reqs, num_reqs) + self.step_overhead_ms

    def verify_ms(self, num_reqs: int, num_drafts: int) -> float:
        """Return the time of a target step over one token of each request and `num_drafts` drafts in all."""
        own = self.step_overhead_ms + (self.verify_overhead_ms if num_drafts else 0.0)
        tokens = num_reqs + num_drafts
        return self._forward_ms(self.shape, self.shape.layers, num_reqs, tokens) + self._fill_ms(tokens) + own

    def draft_step_ms(self, num_reqs: int, tokens_each: int = 1) -> float:
        """Return the time of a draft step; a parallel drafter's one step runs `tokens_each` tokens of each request."""
        drafting = replace(self.shape, vocab=self.draft_vocab or self.shape.vocab)
        layers = self.exit_layer + self.head_layers
        return self._forward_ms(drafting, layers, num_reqs, num_reqs * tokens_each) + self.draft_overhead_ms

    def _forward_ms(self, shape: Shape, layers: int, num_reqs: int, tokens: int) -> float:
        work = shape.work(layers, num_reqs, tokens, self.context, self.dtype)
        seconds = sum(self._seconds(*line) for line in work) / self.tp
        sent = (self.tp - 1) / self.tp * tokens * (layers * 4 * shape.hidden + shape.vocab) * SENT_BYTES
        seconds += sent / (self.gpu.link_gb_s / 2 * 1e9)  # what is printed counts both directions
        return 1e3 * seconds / self.reached

    @property
    def fill_weights(self) -> int:
        """Weights of the projections that fill the head's KV."""
        keys_and_values = self.head_layers * 2 * self.shape.kv_heads * self.shape.head_dim
        return self.fill_states * self.shape.hidden * keys_and_values

    def _fill_ms(self, tokens: int) -> float:
        seconds = self._seconds(self.fill_weights * WEIGHT_BYTES[self.dtype], 2.0 * self.fill_weights * tokens)
        return 1e3 * seconds / self.tp / self.reached

    def _seconds(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / (self.gpu.bandwidth_tb_s * 1e12), flops / (self.gpu.tflops[self.dtype] * 1e12))

    def memory_gb(self, num_reqs: int) -> float:
        """Return what one device holds: weights and the KV of so many requests, the exit head's included."""
        drafting = self.head_layers * self.shape.layer_weights + self.fill_weights
        drafting += (self.draft_vocab or 0) * self.shape.hidden
        weights = (self.shape.weights + drafting) * WEIGHT_BYTES[self.dtype]
        kv = num_reqs * self.context * (self.shape.layers + self.head_layers) * self.shape.kv_bytes
        return (weights + kv) / self.tp / 1e9


def costs_of(times: Roofline, batch: int, longest_draft: int) -> dict[str, Any]:
    """Return these times in the form of `CostModel.state`, for batches up to `batch`."""
    sizes = _ladder(batch)
    verify = {str(size): [[k, times.verify_ms(size, k)] for k in (0, *_ladder(size * longest_draft))] for size in sizes}
    return {
        "verify_ms": verify,
        "draft_step_ms": [[size, times.draft_step_ms(size)] for size in sizes],
        "draft_round_ms": [[1, times.round_overhead_ms]],
    }


def _ladder(last: int) -> list[int]:
    """1..8, then steps of a fourth (the cost model keeps one point for sizes within a fifth), and `last`."""
    sizes = list(range(1, min(last, 8) + 1))
    while sizes[-1] * 1.25 < last:
        sizes.append(round(sizes[-1] * 1.25))
    return sizes if sizes[-1] == last else [*sizes, last]
