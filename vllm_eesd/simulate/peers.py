"""What policies are compared with in a replay: hindsight, and vLLM's own controller."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit

from vllm_eesd.simulate.replay import Batch, Drafter, Replay, replay
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace

#: The oracle's throughput is found by repeating the replay with that of the last one.
_ORACLE_PASSES = 4
_NEWTON_STEPS = 25
#: The longest length among which the best is chosen in hindsight.
LONGEST_FIXED = 8


class Oracle(Drafter):
    """Knows every outcome: drafts no token that will be rejected, and stops where a token costs more than it is worth.

    Args:
        rate: tokens per ms that time is worth; at its own throughput it is the best rule that judges rounds singly.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        lengths, num_reqs = np.minimum(batch.matches, batch.limits), len(batch.slots)
        best, best_value, steps_ms = np.zeros_like(lengths), 0.0, world.draft_round_ms(num_reqs)
        for depth in range(1, int(lengths.max(initial=0)) + 1):
            cut = np.minimum(lengths, depth)
            steps_ms += world.draft_step_ms(int((lengths >= depth).sum()))
            num_drafts = int(cut.sum())
            ms = steps_ms + world.verify_ms(num_reqs, num_drafts) - world.plain_ms(num_reqs)
            if num_drafts - self.rate * ms > best_value:
                best, best_value = cut, num_drafts - self.rate * ms
        return best, best


def oracle(trace: DenseTrace, world: World, batch_size: int) -> Replay:
    """Return the replay of the `Oracle` at its own throughput."""
    rate = batch_size / world.plain_ms(batch_size)
    for _ in range(_ORACLE_PASSES):
        best = replay(trace, Oracle(rate), world, batch_size)
        rate = sum(best.tokens) / sum(best.ms)
    return best


class FixedLength(Drafter):
    """Drafts as many tokens as the replay allows; no policy's overhead, so that hindsight is quick to compute."""

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        return batch.limits, batch.limits


def best_fixed(trace: DenseTrace, world: Callable[[], World], batch_size: int) -> tuple[int, Replay]:
    """Return the best fixed draft length in hindsight, the shortest of equals, and its replay in a fresh world."""
    return _best_length(trace, world, batch_size, lambda length: FixedLength(), shortest=0)


def best_adaptive(trace: DenseTrace, world: Callable[[], World], batch_size: int) -> tuple[int, Replay]:
    """Return the K with which `AdaptiveVerification` is best in hindsight, 1 or more, and its replay likewise."""
    confidence = fit_confidence(trace)
    made = lambda length: AdaptiveVerification(confidence, batch_size, length)  # noqa: E731
    return _best_length(trace, world, batch_size, made, shortest=1)


def _best_length(
    trace: DenseTrace,
    world: Callable[[], World],
    batch_size: int,
    drafter: Callable[[int], Drafter],
    shortest: int,
) -> tuple[int, Replay]:
    lengths = range(shortest, min(LONGEST_FIXED, trace.num_speculative_tokens) + 1)
    replays = {length: replay(trace, drafter(length), world(), batch_size, length) for length in lengths}
    best = max(lengths, key=lambda length: replays[length].goodput_vs_plain)
    return best, replays[best]


class AdaptiveVerification(Drafter):
    """vLLM 0.32's controller: always drafts K tokens, then verifies those worth it by confidence and cost tables.

    A draft token's survival is the product of its request's confidences up to it. Tokens are admitted in the order of
    survival, as many as maximise (requests + sum of survival) / (draft cost + verify cost). As in vLLM how many is
    decided with the confidences of the step before (1 for a new request), which ones with the current ones. Its costs
    come from a profile; here it is given the true ones. Its confidence is a logistic function of what the draft model
    shows; here the one that fits the replayed trace best, which is more than it would have.

    Args:
        confidence: maps [...] float32 draft probabilities to acceptance probabilities.
        max_num_reqs: request slots.
        num_speculative_tokens: K.
    Source: vllm/v1/worker/gpu/spec_decode/adaptive_verification.py of vLLM 0.32.0, get_num_tokens and
        _assign_draft_token_budget.
    """

    def __init__(self, confidence, max_num_reqs: int, num_speculative_tokens: int) -> None:
        self._confidence = confidence
        self._last = np.ones((max_num_reqs, num_speculative_tokens))

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        num_reqs = len(batch.slots)
        self._last[batch.slots[batch.new]] = 1.0
        current = self._confidence(batch.confidences[:, : self._last.shape[1]])
        valid = np.arange(current.shape[1]) < batch.limits[:, None]
        budget = self._budget(self._last[batch.slots], valid, world)
        self._last[batch.slots] = current
        survival = np.where(valid, np.cumprod(current, axis=1), -np.inf).ravel()
        admitted = np.zeros(survival.size, dtype=bool)
        admitted[np.argsort(-survival, kind="stable")[:budget]] = True
        return batch.limits, admitted.reshape(num_reqs, -1).sum(axis=1)

    @staticmethod
    def _budget(confidence: np.ndarray, valid: np.ndarray, world: World) -> int:
        num_reqs = len(confidence)
        scores = np.sort(np.cumprod(confidence, axis=1)[valid])[::-1]
        tokens = num_reqs + np.r_[0.0, np.cumsum(scores)]
        draft_ms = world.draft_round_ms(num_reqs) + valid.shape[1] * world.draft_step_ms(num_reqs)
        verify_ms = np.array([world.verify_ms(num_reqs, drafts) for drafts in range(len(scores) + 1)])
        return int(np.argmax(tokens / (draft_ms + verify_ms)))


def fit_confidence(trace: DenseTrace):
    """Return the logistic function of the log-odds of draft probabilities that fits a trace's outcomes best."""
    confidences = np.concatenate([request.confidences for request in trace.requests])
    matches = np.concatenate([request.matches for request in trace.requests])[:, None]
    position = np.arange(confidences.shape[1])
    judged = position <= matches
    accepted = (position < matches)[judged].astype(np.float64)
    features = np.stack([np.ones(len(accepted)), _log_odds(confidences[judged])])
    weights = np.array([0.0, 1.0])
    for _ in range(_NEWTON_STEPS):
        predicted = expit(weights @ features)
        curvature = (features * (predicted * (1 - predicted))) @ features.T + 1e-6 * np.eye(2)
        weights = weights + np.linalg.solve(curvature, features @ (accepted - predicted))
    return lambda confidence: expit(weights[0] + weights[1] * _log_odds(confidence))


def _log_odds(probability: np.ndarray) -> np.ndarray:
    return logit(probability.astype(np.float64).clip(1e-3, 1 - 1e-3))
