"""Counter-based random numbers inside Triton kernels: what `reference/noise.py` computes, bit for bit up to the last
place of a logarithm.

Source: vllm/v1/worker/gpu/sample/gumbel.py of vLLM 0.33, whose numbers these are.
"""

import triton
import triton.language as tl

UNIFORM_MIN = tl.constexpr(4.6566127342e-10)  # the smallest positive number tl.rand returns
TINY = tl.constexpr(5.960464477539063e-08)  # 2**-24: 1 - u must not round to 0


@triton.jit
def step_seed(seed, step):
    """A request's seed, int64, for draft `step`, from 0: a position is met again in the next round, at another step."""
    return seed ^ (step.to(tl.int64) << 32)


@triton.jit
def uniform(seed, position):
    """Uniform in (0, 1) that an acceptance test compares with: Philox."""
    return tl.maximum(tl.rand(seed, position), UNIFORM_MIN)


@triton.jit
def _rotate_left(x, SHIFT: tl.constexpr):
    return (x << SHIFT) | (x >> (32 - SHIFT))


@triton.jit
def _mix(h, key):
    key *= 0xCC9E2D51
    key = _rotate_left(key, 15)
    key *= 0x1B873593
    h ^= key
    return _rotate_left(h, 13) * 5 + 0xE6546B64


@triton.jit
def gumbel(seed, position, key):
    """Standard Gumbel noise of shape seed + position + key, all int64: murmur3, then -log(-log(1 - u))."""
    h = _mix((seed & 0).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (key & 0xFFFFFFFF).to(tl.uint32)) ^ 16
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    high = (h >> 16).to(tl.int32).to(tl.float32)
    low = (h & 0xFFFF).to(tl.int32).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    # log(1 - u): a series near 0, where the winning noise comes from and where 1 - u would round.
    polynomial = 1.0 / 8.0
    polynomial = 1.0 / 7.0 + u * polynomial
    polynomial = 1.0 / 6.0 + u * polynomial
    polynomial = 1.0 / 5.0 + u * polynomial
    polynomial = 1.0 / 4.0 + u * polynomial
    polynomial = 1.0 / 3.0 + u * polynomial
    polynomial = 1.0 / 2.0 + u * polynomial
    polynomial = 1.0 + u * polynomial
    log1p = tl.where(u < 0.25, -u * polynomial, tl.log(tl.maximum(1.0 - u, TINY)))
    return -tl.log(-log1p)
