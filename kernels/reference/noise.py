"""Counter-based random numbers as vLLM's Model Runner V2 draws them, in plain torch.

A number depends only on (seed, position, key), so that a kernel, this module and vLLM draw the same one in any order.
V2 uses two generators: Philox for the uniform an acceptance test compares with, murmur3 for the Gumbel noise of a
choice. All arithmetic is on uint32 held in int64, because torch lacks most uint32 operations.

Source: vllm/v1/worker/gpu/sample/gumbel.py of vLLM 0.33; triton/language/random.py; Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011 (Philox).
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
PHILOX_ROUNDS = 10
# Triton's scale from int32 to [0, 1), which is also V2's smallest uniform: the logarithm of 0 must not be taken.
UNIFORM_SCALE = 4.6566127342e-10
# Largest fp32 below which 1 - u is told apart from 1; as in V2.
TINY = 5.960464477539063e-08
# Above every position in a text, and low enough that the counters of 64 steps have 30 bits: V2 adds a bit more.
MAX_POSITION = 1 << 24


def step_seed(seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the seed for draft `step` of a round, int64: what is drawn at a position may hang on the step as well.

    A position after the accepted drafts is met again in the next round, at an earlier step. Where what was drawn there
    had a part in how many were accepted, or in how far the next round drafts, the same number again would bias what is
    emitted.

    Args:
        seed, step: int64, of shapes that broadcast; steps from 0.
    """
    return seed ^ (step << 32)


def draw_counters(positions: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return in place of positions what the noise of drawn drafts is counted by, for the reason of `step_seed`.

    Args:
        positions: [num_rows] int64, of each draft step's input token, less than `MAX_POSITION`.
        steps: [num_rows] int64, from 0.
    """
    return torch.add(positions, steps, alpha=MAX_POSITION)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return uniforms in (0, 1) as `tl.rand(seed, position)` gives them, zero excluded.

    Args:
        seed, position: int64, of shapes that broadcast.
    Returns:
        float32 of the broadcast shape.
    """
    seed, position = torch.broadcast_tensors(seed.long(), position.long())
    key0, key1 = seed & MASK, (seed >> 32) & MASK
    c0, c1 = position & MASK, (position >> 32) & MASK
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        # The wrapped 64-bit products hold both halves.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((b >> 32) & MASK) ^ c1 ^ key0, ((a >> 32) & MASK) ^ c3 ^ key1
        c1, c3 = b & MASK, a & MASK
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    signed = torch.where(c0 >= 1 << 31, MASK - c0, c0)
    return (signed.to(torch.float32) * UNIFORM_SCALE).clamp(min=UNIFORM_SCALE)


def _mix(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    key = (key * 0xCC9E2D51) & MASK
    key = ((key << 15) | (key >> 17)) & MASK
    h = h ^ ((key * 0x1B873593) & MASK)
    h = ((h << 13) | (h >> 19)) & MASK
    return (h * 5 + 0xE6546B64) & MASK


def murmur3_uniform(seed: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return uniforms in (0, 1), one per key.

    Args:
        seed, position, key: int64, of shapes that broadcast; a key is a token id.
    Returns:
        float32 of the broadcast shape.
    """
    seed, position = seed.long(), position.long()
    h = _mix(torch.zeros_like(seed), seed & MASK)
    h = _mix(h, (seed >> 32) & MASK)
    h = _mix(h, position & MASK)
    h = _mix(h, key & MASK) ^ 16
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    h = h ^ (h >> 16)
    high, low = (h >> 16).to(torch.float32), (h & 0xFFFF).to(torch.float32)
    return high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10


def gumbel(seed: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, -log(-log(1 - u)), float32 of the broadcast shape.

    Args:
        seed, position, key: int64, of shapes that broadcast; a key is a token id.
    """
    u = murmur3_uniform(seed, position, key)
    # V2's series for log(1 - u) near 0, where the winning noise comes from.
    polynomial = 1.0 / 8.0
    for denominator in (7, 6, 5, 4, 3, 2, 1):
        polynomial = 1.0 / denominator + u * polynomial
    log1p = torch.where(u < 0.25, -u * polynomial, torch.log((1.0 - u).clamp(min=TINY)))
    return -torch.log(-log1p)
