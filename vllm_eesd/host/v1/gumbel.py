"""The two largest of logits and noise, where vLLM's own sampler on CPUs gives the largest's token only.

The noise is vLLM's, counted by seed and token (SplitMix64), so the token is the one that vLLM would choose. That is
asked of its sampler before anything relies on it: see `is_noise_of`. What differs would cost acceptance, and no token.
Source: vllm/v1/sample/ops/topk_topp_sampler.py, forward_cpu; Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numba
import numpy as np
import torch

_INCREMENT, _FIRST_FACTOR, _SECOND_FACTOR = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_11, _27, _30, _31 = map(np.uint64, (11, 27, 30, 31))
_UNIT = 2.0**-53
#: Of a comparison: rows and tokens of which every choice must be the same.
_ROWS, _TOKENS = 16, 1000

_compiled = numba.njit(cache=True, error_model="numpy")


@_compiled
def _mixed(number: np.uint64) -> np.uint64:
    number = (number ^ (number >> _30)) * _FIRST_FACTOR
    number = (number ^ (number >> _27)) * _SECOND_FACTOR
    return number ^ (number >> _31)


@_compiled
def top_two(logits: np.ndarray, seeds: np.ndarray, tokens: np.ndarray, margins: np.ndarray) -> None:
    """Write each row's token with the largest logit + noise, and how far it lies above the second largest.

    Args:
        logits: [num_rows, vocab_size] float32, -inf where nothing is chosen.
        seeds: [num_rows] uint64.
        tokens: [num_rows] int64, written; 0 in a row of -inf.
        margins: [num_rows] float64, written; inf where a row has one token to choose.
    """
    for row in range(len(seeds)):
        state, first, second, token = _mixed(seeds[row]), -np.inf, -np.inf, 0
        for column in range(logits.shape[1]):
            state += _INCREMENT
            logit = float(logits[row, column])
            uniform = (float(_mixed(state) >> _11) + 0.5) * _UNIT
            # The noise, -log(-log u), is at most -log(1 - u): too little if 1 - u >= exp(logit - second), of which the
            # first terms of a series are an upper bound. Few tokens of a vocabulary need a logarithm.
            below = second - logit
            if below >= 0.0 and (1.0 - uniform) * (1.0 + below * (1.0 + below * (0.5 + below / 6.0))) >= 1.0:
                continue
            score = logit - math.log(-math.log(uniform))
            if score > first:
                first, second, token = score, first, column
            elif score > second:
                second = score
        tokens[row] = token
        margins[row] = first - second if first > -np.inf else 0.0


def draw_with_margins(logits: torch.Tensor, generators: Iterable[torch.Generator]) -> tuple[np.ndarray, np.ndarray]:
    """Return what vLLM's sampler draws of logits, [num_rows] int64, and the margins of it, [num_rows] float64.

    Args:
        logits: [num_rows, vocab_size] float32, at their temperatures, cut.
        generators: of each row; each draws once.
    """
    seeds = [torch.randint(0, 2**31, (1,), generator=generator).item() for generator in generators]
    tokens, margins = np.empty(len(logits), dtype=np.int64), np.empty(len(logits))
    top_two(logits.numpy(), np.array(seeds, dtype=np.uint64), tokens, margins)
    return tokens, margins


def is_noise_of(sampler: Callable[..., tuple[torch.Tensor, object]]) -> bool:
    """Return whether vLLM's sampler draws by this noise: on other CPUs, in float64 and in other releases it may not.

    Args:
        sampler: of logits, generators by row, top-k and top-p.
    """
    logits = torch.randn(_ROWS, _TOKENS, generator=torch.Generator().manual_seed(0))
    theirs, ours = ([torch.Generator().manual_seed(row) for row in range(_ROWS)] for _ in range(2))
    tokens, _ = sampler(logits.clone(), dict(enumerate(theirs)), None, None)
    return tokens.tolist() == draw_with_margins(logits, ours)[0].tolist()


def compile_now() -> None:
    """Call the compiled function with next to nothing, so that no request waits for its compilation."""
    top_two(np.zeros((1, 2), np.float32), np.zeros(1, np.uint64), np.zeros(1, np.int64), np.zeros(1))
