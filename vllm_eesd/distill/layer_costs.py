"""What one decoding step spends in each layer, and what drafting from it would give.

Times are measured on the target's own modules with a KV cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from vllm_eesd.distill.target import Target

# Tokens in the cache while timing, where the target takes that many.
CONTEXT = 256
# Medians over so many steps, after two that warm up.
REPEATS, WARM_UP = 15, 2


@dataclass(frozen=True)
class LayerCosts:
    """Medians, in ms.

    Attributes:
        layer_ms: [L] each decoder layer, one token.
        outer_ms: embedding, final norm and LM head, one token.
        verify_ms: the whole target over 1, 2, 3... tokens.
    """

    layer_ms: list[float]
    outer_ms: float
    verify_ms: list[float]

    def draft_ms(self, exit_layer: int) -> float:
        """Return the time of one headless draft step at `exit_layer`."""
        return self.outer_ms + sum(self.layer_ms[:exit_layer])


@dataclass(frozen=True)
class LayerResult:
    """What drafting from one layer would give.

    Attributes:
        exit_layer: N.
        agreement: share of positions where the headless draft is the target's choice.
        overlap: mean of sum min(p, q) at temperature 1.
        matches_per_position: share of positions from which the first i + 1 headless drafts all match.
        draft_ms: one headless draft step; a distilled head adds its own layers.
        headless_speedup, headless_tokens: the best predicted speedup over plain decoding and the draft length it is at.
        distilled_speedup, distilled_tokens: the same for a distilled head that closes `probe.GAP_CLOSED` of the gap.
        drawn_speedup, drawn_tokens: for such a head whose drafts are drawn, on text sampled at temperature 1.
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
    for drafted, repeat in np.ndindex(times.shape[:2]):
        times[drafted, repeat] = _time_step(target, ids[None, context : context + drafted + 1], context, cache)
        cache.crop(-drafted - 1)
    times = times[:, WARM_UP:]
    per_part = np.median(times[0], axis=0).tolist()
    # Noise apart, more tokens never cost less.
    verify_ms = np.maximum.accumulate(np.median(times.sum(axis=2), axis=1)).tolist()
    return LayerCosts(per_part[:-1], per_part[-1], verify_ms)


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
