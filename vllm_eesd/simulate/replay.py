"""The replay: continuous batching over recorded requests, one decision maker, the world's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy import DraftLengthPolicy
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import draft_tokens
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.round.second_drafter import DraftChances
from vllm_eesd.round.session import Session
from vllm_eesd.round.step import Known, Step
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace


@dataclass
class Batch:
    """The requests that decode in one step.

    Attributes:
        slots: [num_rows] int64, the policy's slot of each.
        new: [num_rows] bool, whether the slot's request has just begun.
        limits: [num_rows] int64, the longest draft each may have.
        matches: [num_rows] int64, how many tokens of a longest draft would be accepted; for hindsight only.
        confidences: [num_rows, K] float32.
        texts: [slots, any] int32, prompt and output of each slot's request to its end.
        num_tokens: [num_rows] int64, how much of its text there is by now; 0 where it was not recorded.
    """

    slots: np.ndarray
    new: np.ndarray
    limits: np.ndarray
    matches: np.ndarray
    confidences: np.ndarray
    texts: np.ndarray
    num_tokens: np.ndarray

    def num_right(self, row: int, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, from the first, a row's text goes on with."""
        followed = self.texts[self.slots[row], self.num_tokens[row] :][: len(tokens)]
        return np.cumprod(followed == tokens[: len(followed)]).sum()


class Drafter:
    """Decides drafts in a replay."""

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        """Return ([num_rows] tokens drafted, [num_rows] submitted for verification: of those, or n-gram drafts)."""
        raise NotImplementedError

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        """Take in the step's outcome; by default nothing is learned."""


@dataclass
class Replay:
    """What happened, step by step.

    Attributes:
        ms: true time of each step.
        plain_ms: what a plain step of the same batch would have taken.
        tokens: emitted in each step.
        num_reqs: requests in each step.
        draft_lengths: of every request in every step, n-gram drafts too.
    """

    ms: list[float] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_reqs: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)

    @property
    def goodput_vs_plain(self) -> float:
        """Emitted tokens per time, relative to a replay without drafts whose batches are as full."""
        plain = np.array(self.plain_ms) * np.array(self.tokens) / np.array(self.num_reqs)
        return float(plain.sum() / np.sum(self.ms))

    @property
    def mean_draft_length(self) -> float:
        return float(np.mean(self.draft_lengths))


@dataclass(frozen=True)
class PolicyReplay:
    """One policy's replay of one trace.

    Attributes:
        length: the draft length of `best_fixed`, the longest of `vllm_adaptive`.
    """

    trace: str
    policy: str
    replay: Replay
    length: int | None = None

    def row(self) -> dict[str, str | float | int]:
        """Return what `eesd simulate --json` writes of it."""
        row = {
            "trace": self.trace,
            "policy": self.policy,
            "goodput_vs_plain": round(self.replay.goodput_vs_plain, 4),
            "mean_draft_length": round(self.replay.mean_draft_length, 3),
        }
        return row if self.length is None else row | {"length": self.length}


def replay(
    trace: DenseTrace, drafter: Drafter, world: World, batch_size: int = 1, max_draft: int | None = None
) -> Replay:
    """Return what `drafter` makes of a trace.

    Args:
        trace: recorded requests, served in order; a request that ends makes room for the next.
        drafter: decides; sees outcomes only after its decisions.
        world: true costs.
        batch_size: requests that decode at once.
        max_draft: the longest draft; None: the trace's.
    """
    longest = trace.num_speculative_tokens if max_draft is None else max_draft
    waiting = [request for request in reversed(trace.requests) if len(request.matches)]
    running: list = [None] * batch_size
    position = np.zeros(batch_size, dtype=np.int64)
    texts = np.zeros((batch_size, max([len(request.text()) for request in waiting], default=0)), dtype=np.int32)
    result = Replay()
    while True:
        new = np.zeros(batch_size, dtype=bool)
        for slot in range(batch_size):
            if running[slot] is None and waiting:
                running[slot], position[slot], new[slot] = waiting.pop(), 0, True
                text = running[slot].text()
                texts[slot, : len(text)] = text
        slots = np.array([slot for slot in range(batch_size) if running[slot] is not None], dtype=np.int64)
        if not len(slots):
            return result
        remaining = np.array([len(running[slot].matches) - position[slot] for slot in slots])
        batch = Batch(
            slots=slots,
            new=new[slots],
            limits=np.minimum(longest, remaining - 1),
            matches=np.array([running[slot].matches[position[slot]] for slot in slots]),
            confidences=np.stack([running[slot].confidences[position[slot]] for slot in slots]),
            texts=texts,
            num_tokens=np.array([running[slot].num_tokens(position[slot]) for slot in slots]),
        )
        emitted = _step(batch, drafter, world, result)
        position[slots] += emitted
        for slot in slots:
            if position[slot] >= len(running[slot].matches):
                running[slot] = None


def _step(batch: Batch, drafter: Drafter, world: World, result: Replay) -> np.ndarray:
    """Run one step; return the tokens each row emitted."""
    num_reqs = len(batch.slots)
    num_drafted, num_verified = drafter.draft(batch, world)
    num_accepted = np.minimum(num_verified, batch.matches)
    ms = world.round_ms(num_reqs, num_drafted, num_verified)
    drafter.observe(batch, num_verified, num_accepted)
    result.ms.append(ms)
    result.plain_ms.append(world.plain_ms(num_reqs))
    result.tokens.append(num_reqs + int(num_accepted.sum()))
    result.num_reqs.append(num_reqs)
    result.draft_lengths.extend(np.maximum(num_drafted, num_verified).tolist())
    return num_accepted + 1


class PolicyDrafter(Drafter):
    """A policy in a replay, driven by the same session as in the engine; it sees measurements only.

    Where it uses n-gram drafts and the trace holds texts, they are at most as long as the trace's longest draft.

    Args:
        policy: fresh.
        delay: see `Session`.
    """

    def __init__(self, policy: DraftLengthPolicy, delay: int = 0) -> None:
        self.policy = policy
        self.session = Session(policy, DraftStats(MAX_SPECULATIVE_TOKENS), MAX_SPECULATIVE_TOKENS, delay)

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        if self.session.ngrams is None and self.policy.uses_ngrams and batch.texts.shape[1]:
            self.session.ngrams = NgramDrafter(self.policy.posterior.max_num_reqs, batch.confidences.shape[1])
        if batch.new.any():
            self.session.admit(batch.slots[batch.new])
        round_ = self.session.begin(batch.slots, batch.limits, self._find_ngrams(batch))
        nothing = np.zeros(len(batch.slots), np.int64)
        drafts = draft_tokens(round_, _RecordedDrafts(batch, self.policy, world), nothing)
        self.session.end()
        for row in np.flatnonzero(round_.from_ngrams).tolist():
            batch.matches[row] = batch.num_right(row, drafts[row])
        num_drafted = np.where(round_.from_ngrams, 0, round_.lengths)
        if num_drafted.any():
            self.policy.costs.observe_draft_round(len(drafts), world.measured(world.draft_round_ms(len(drafts))))
        num_drafts = int(round_.lengths.sum())
        ms = world.measured(world.verify_ms(len(drafts), num_drafts))
        self.policy.costs.observe_verify(len(drafts), len(drafts) + num_drafts, ms)
        return num_drafted, round_.lengths

    def _find_ngrams(self, batch: Batch) -> DraftChances | None:
        """Find the rows' n-gram drafts; None if the policy uses none or no text is known."""
        ngrams = self.session.ngrams
        if isinstance(ngrams, NgramDrafter):
            rows = np.flatnonzero((batch.num_tokens > 0) & (batch.limits > 0))
            slots = batch.slots[rows]
            ngrams.update(slots, batch.texts, slots, batch.num_tokens[rows], np.ones(len(rows), dtype=bool))
        return ngrams

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        decoded, num_emitted = np.ones(len(batch.slots), dtype=bool), num_accepted[:, None] + 1
        self.session.verdict(Step(batch.slots, decoded, num_verified, Known(num_emitted)))


class _RecordedDrafts:
    """The draft model of a replay: recorded confidences, and measured times for the cost model."""

    def __init__(self, batch: Batch, policy: DraftLengthPolicy, world: World) -> None:
        self._batch, self._policy, self._world = batch, policy, world

    def step(self, rows: np.ndarray, offset: int, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        ms = self._world.measured(self._world.draft_step_ms(len(rows)))
        self._policy.costs.observe_draft_step(len(rows), ms)
        confidence = self._batch.confidences[rows, offset] if self._policy.needs_confidence else None
        return token_ids, confidence
