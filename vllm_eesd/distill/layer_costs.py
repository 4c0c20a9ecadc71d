"""What one decoding step spends in each layer, and what drafting from it would give.

Times are measured on the target's own modules with a KV cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from vllm_eesd.distill.target import Target
from vllm_eesd.progress import progress

# Tokens in the cache while timing, where the target takes that many.
CONTEXT = 256
# Medians over so many steps, after two that warm up.
REPEATS, WARM_UP = 15, 2
# Of the vocabulary, each timed by itself: a LM head of V / 24 up to V rows.
LM_HEAD_SHARES = (24, 12, 6, 3, 2, 1)
# Rows of a draft vocabulary come in so many: what matrix kernels take at a time.
ROWS_MULTIPLE = 64


@dataclass(frozen=True)
class LayerCosts:
    """Medians, in ms.

    Attributes:
        layer_ms: [L] each decoder layer, one token.
        outer_ms: embedding, final norm and LM head, one token.
        verify_ms: the whole target over 1, 2, 3... tokens.
        lm_head_ms: (rows, ms) of the LM head over its first rows, one token; the last is of all of them.
    """

    layer_ms: list[float]
    outer_ms: float
    verify_ms: list[float]
    lm_head_ms: list[tuple[int, float]] = field(default_factory=list)

    def draft_ms(self, exit_layer: int, head_layers: int = 0, draft_vocab: int | None = None) -> float:
        """Return the time of one draft step through N layers and so many of a head, each as dear as the last of the N.

        Args:
            draft_vocab: rows of the LM head that it multiplies; None: all.
        """
        layers = sum(self.layer_ms[:exit_layer]) + head_layers * self.layer_ms[exit_layer - 1]
        saved = 0.0 if draft_vocab is None else self.lm_head(None) - self.lm_head(draft_vocab)
        return layers + self.outer_ms - saved

    def lm_head(self, draft_vocab: int | None) -> float:
        """Return the time of the LM head over so many rows, None: all, between measured sizes along a line.

        Where all rows took longer by themselves than the step's own did, as on a machine that is busy now and then, the
        ratios of sizes count.
        """
        rows, times = zip(*self.lm_head_ms, strict=True)
        share = 1.0 if draft_vocab is None else float(np.interp(draft_vocab, rows, times)) / times[-1]
        return share * min(self.outer_ms, times[-1])


@dataclass(frozen=True)
class VocabularyChoice:
    """What a head at one exit layer should draft from.

    Attributes:
        size: tokens; None: all of the target's.
        coverage: share of the target's text that they are.
        lm_head_share: what of a draft step over the whole vocabulary the LM head takes.
        draft_ms, whole_draft_ms: a draft step from them, and from all.
        speedup, whole_speedup: predicted with them, and with all.
        draft_tokens: the draft length of `speedup`.
    """

    size: int | None
    coverage: float
    lm_head_share: float
    draft_ms: float
    whole_draft_ms: float
    speedup: float
    whole_speedup: float
    draft_tokens: int


@dataclass(frozen=True)
class LayerResult:
    """What drafting from one layer would give.

    Attributes:
        exit_layer: N.
        agreement: share of positions where the headless draft is the target's choice.
        overlap: mean of sum min(p, q) at temperature 1.
        matches_per_position: share of positions from which the first i + 1 headless drafts all match.
        draft_ms: one headless draft step over the whole vocabulary; a distilled head adds its own layers.
        headless_speedup, headless_tokens: the best predicted speedup over plain decoding and the draft length it is at.
        distilled_speedup, distilled_tokens: the same for a distilled head that closes as much of the gap as a measured
            one did, and drafts from the vocabulary that pays best.
        drawn_speedup, drawn_tokens: for such a head whose drafts are drawn, on text sampled at temperature 1.
        distilled_range: the lowest and highest such speedup, by what measured heads of all targets closed.
        vocabulary: what such a head drafts from, and what that is worth.
    """

    exit_layer: int
    agreement: float
    overlap: float
    matches_per_position: list[float]
    draft_ms: float
    headless_speedup: float
    headless_tokens: int
    distilled_speedup: float
    distilled_tokens: int
    drawn_speedup: float
    drawn_tokens: int
    distilled_range: tuple[float, float] = (1.0, 1.0)
    vocabulary: VocabularyChoice | None = None


@torch.no_grad()
def measure_costs(target: Target, longest_draft: int) -> LayerCosts:
    """Return what layers cost at batch 1, up to `longest_draft` + 1 tokens a step.

    The absolute times are those of transformers' modules, not of a serving engine; their ratios are what counts.
    """
    context = min(CONTEXT, target.config.max_position_embeddings - longest_draft - 1)
    cache = DynamicCache(config=target.config)
    ids = torch.arange(context + longest_draft + 1, device=target.lm_head.weight.device) % target.config.vocab_size
    target.model(ids[None, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    times = np.empty((longest_draft + 1, WARM_UP + REPEATS, target.config.num_hidden_layers + 1))
    with progress("timing layers", times.shape[0] * times.shape[1], "steps") as count:
        for drafted, repeat in np.ndindex(times.shape[:2]):
            times[drafted, repeat] = _time_step(target, ids[None, context : context + drafted + 1], context, cache)
            cache.crop(-drafted - 1)
            count(1)
    times = times[:, WARM_UP:]
    per_part = np.median(times[0], axis=0).tolist()
    # Noise apart, more tokens never cost less.
    verify_ms = np.maximum.accumulate(np.median(times.sum(axis=2), axis=1)).tolist()
    return LayerCosts(per_part[:-1], per_part[-1], verify_ms, lm_head_costs(target, ids[:1]))


@torch.no_grad()
def lm_head_costs(target: Target, ids: Tensor) -> list[tuple[int, float]]:
    """Return (rows, ms) of the LM head over its first rows, for sizes up to all of them; more rows never cost less.

    They take turns, so that each finds the caches as the others left them.

    Args:
        ids: [num_tokens] int64, whose embeddings are multiplied.
    """
    weight, vocab_size = target.lm_head.weight, target.config.vocab_size
    sizes = sorted({min(vocab_size, rounded_up(-(-vocab_size // share))) for share in LM_HEAD_SHARES})
    hidden = target.model.model.embed_tokens(ids)
    times = np.empty((WARM_UP + REPEATS, len(sizes)))
    for repeat, index in np.ndindex(times.shape):
        began = _now(hidden)
        F.linear(hidden, weight[: sizes[index]])
        times[repeat, index] = 1000 * (_now(hidden) - began)
    # The quickest of each: ratios of these are what a busy machine disturbs least.
    quickest = np.maximum.accumulate(times[WARM_UP:].min(axis=0)).tolist()
    return list(zip(sizes, quickest, strict=True))


def rounded_up(size: int) -> int:
    """Return the next multiple of `ROWS_MULTIPLE`."""
    return -(-size // ROWS_MULTIPLE) * ROWS_MULTIPLE


def _time_step(target: Target, ids: Tensor, context: int, cache: DynamicCache) -> list[float]:
    """Return the ms of each layer and, last, of everything else in one step over `ids`, [1, num_tokens]."""
    decoder = target.model.model
    marks = [_now(ids)]
    positions = context + torch.arange(ids.shape[1], device=ids.device)[None]
    hidden, arguments = target.embed(ids)
    arguments |= {"position_ids": positions, "position_embeddings": decoder.rotary_emb(hidden, position_ids=positions)}
    marks.append(_now(ids))
    for layer in decoder.layers:
        hidden = layer(hidden, **arguments, past_key_values=cache, use_cache=True)
        marks.append(_now(ids))
    target.lm_head(decoder.norm(hidden))
    marks.append(_now(ids))
    spans = 1000 * np.diff(marks)
    return [*spans[1:-1], spans[0] + spans[-1]]


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
