"""Synthetic traces: acceptance that switches between regimes, with confidences of a chosen quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.traces.dense import DenseTrace, RequestTrace

MODELS = Path(__file__).resolve().parents[1] / "models"
#: Acceptance of a first draft token in each regime, by how far apart the regimes are.
SPREADS = {"narrow": (0.6, 0.7, 0.8), "medium": (0.4, 0.65, 0.85), "wide": (0.1, 0.6, 0.92)}
#: How much of the log-odds that decide a token's fate its confidence shows.
QUALITIES = {"dull": 0.4, "sharp": 0.8}
#: Standard deviation of a token's own log-odds around its regime's.
TOKEN_SPREAD = 2.0
#: What each further position of a draft loses in log-odds: drafts are made of drafts.
POSITION_LOSS = 0.25


def synthetic_trace(
    regimes: Sequence[float],
    quality: float,
    num_requests: int = 20,
    num_tokens: int = 300,
    mean_stay: float | None = 60.0,
    num_speculative_tokens: int = 8,
    seed: int = 0,
) -> DenseTrace:
    """Return a trace whose tokens are easy or hard by regime.

    Args:
        regimes: acceptance of a first draft token in each.
        quality: 0: a confidence tells nothing but the regime's mean; 1: all there is to know before the outcome.
        num_requests, num_tokens: size.
        mean_stay: tokens until the regime is drawn anew; None: each request passes through `regimes` in order.
        num_speculative_tokens: K.
        seed: of everything.
    """
    generator = np.random.default_rng(seed)
    requests = []
    for _ in range(num_requests):
        length = num_tokens + num_speculative_tokens
        regime = _regimes(len(regimes), length, mean_stay, generator)
        base = np.array([_base_log_odds(rate) for rate in regimes])[regime]
        own = TOKEN_SPREAD * generator.standard_normal(length)
        # Token t of the text, drafted as the j-th of a draft, is accepted if its luck lies below its odds.
        luck = generator.logistic(size=length)
        position = np.arange(num_speculative_tokens)
        text = np.arange(num_tokens)[:, None] + position
        odds = (base + own)[text] - POSITION_LOSS * position
        matches = np.cumprod(odds > luck[text], axis=1).sum(axis=1)
        hidden = np.sqrt(1 - quality**2) * TOKEN_SPREAD * generator.standard_normal(length)
        seen = base[text] + (quality**2 * own + quality * hidden)[text] - POSITION_LOSS * position
        requests.append(RequestTrace(matches.astype(np.int64), (1 / (1 + np.exp(-seen))).astype(np.float32)))
    return DenseTrace("synthetic", f"regimes {tuple(regimes)}", num_speculative_tokens, {}, requests)


def text_trace(num_tokens: int = 300) -> DenseTrace:
    """Return a trace with texts: code that people wrote and, in turn, random tokens of a small vocabulary.

    Drafts of the exit head are those of `synthetic_trace`, so only n-gram drafts tell the texts apart.
    """
    tokenizer = Tokenizer.from_file(str(MODELS / "eesd-code-10m" / "tokenizer.json"))
    prompts = read_prompts(MODELS / "prompts" / "long_context.jsonl")
    generator = np.random.default_rng(0)
    made = synthetic_trace(
        SPREADS["medium"], 0.6, num_requests=2 * len(prompts), num_tokens=num_tokens, num_speculative_tokens=16
    )
    requests = []
    for index, request in enumerate(made.requests):
        code = np.array(tokenizer.encode(prompts[index // 2].text).ids, dtype=np.int32)[: 1000 + num_tokens]
        text = generator.integers(0, 200, 2 * num_tokens).astype(np.int32) if index % 2 else code
        requests.append(replace(request, prompt=text[:-num_tokens], emitted=text[-num_tokens:]))
    return replace(made, requests=requests)


def _regimes(num_regimes: int, length: int, mean_stay: float | None, generator: np.random.Generator) -> np.ndarray:
    if mean_stay is None:
        return np.arange(length) * num_regimes // length
    drawn = generator.integers(num_regimes, size=length)
    switches = generator.random(length) < 1 / mean_stay
    switches[0] = True
    return drawn[np.maximum.accumulate(np.where(switches, np.arange(length), 0))]


def _base_log_odds(rate: float) -> float:
    """Return the log-odds whose mean acceptance over the tokens' own spread is `rate` (probit approximation)."""
    return float(np.log(rate / (1 - rate)) * np.sqrt(1 + np.pi * TOKEN_SPREAD**2 / 8))
