"""Batches of whole conversations: rows that begin where a conversation begins, of about equal length in a batch.

A conversation begins its row and never stands beside another one in it, so the head sees tokens at the positions and
after the context that it will meet them at when it is served. What is beyond `seq_len` is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_eesd.conversations import Conversation
from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.distill.data import TokenData

#: Rows are padded to a multiple of this many tokens: conversations of one length so come in many pairings.
LENGTH_STEP = 32


class Batch(NamedTuple):
    """What one step trains on.

    Attributes:
        ids: [num_rows, seq_len] int64; padding repeats id 0, after a conversation's end, where nothing sees it.
        weights: [num_rows, seq_len] float32, how much the prediction made at each position counts; None: all alike.
        rows: [num_rows] which conversations, for what is kept of them; None where windows are cut at random.
        num_tokens: those that are no padding.
    """

    ids: Tensor
    weights: Tensor | None = None
    rows: np.ndarray | None = None
    num_tokens: int = 0

    @property
    def count(self) -> float:
        """What all predictions together count."""
        return float(self.ids.numel() if self.weights is None else self.weights.sum())

    def part(self, chosen: slice) -> Batch:
        """Return some of its rows."""
        weights, rows = (None if of is None else of[chosen] for of in (self.weights, self.rows))
        return self._replace(ids=self.ids[chosen], weights=weights, rows=rows)

    def shares(self, rank: int, num_processes: int, num_parts: int) -> list[tuple[Batch, float]]:
        """Return what one of several processes computes, in at most so many parts, and each part's share of all.

        Shares are of the mean over processes: those of one process alone add up to 1. Every process has as many parts,
        and so a gradient to average: one with fewer rows than others computes a row that counts nothing.
        """
        own, most = self.part(slice(rank, None, num_processes)), -(-len(self.ids) // num_processes)
        size = -(-most // num_parts)
        parts = [own.part(slice(first, first + size)) for first in range(0, most, size)]
        return [
            (part, num_processes * part.count / self.count) if len(part.ids) else (self.part(slice(1)), 0.0)
            for part in parts
        ]


class Rows:
    """Conversations to train on.

    Args:
        conversations: each at least two tokens.
        seq_len: the longest row; what is beyond it is left out.
        answers_only: whether only predictions of the assistant's tokens count.
    Raises:
        ValueError: none of them has a token that counts.
    """

    def __init__(self, conversations: Sequence[Conversation], seq_len: int, answers_only: bool) -> None:
        self._ids = [np.asarray(one.ids[:seq_len], dtype=np.int64) for one in conversations]
        self._counts = [
            np.asarray(one.answers[1:seq_len] if answers_only else np.ones(len(ids) - 1), dtype=np.float32)
            for one, ids in zip(conversations, self._ids, strict=True)
        ]
        self._used = np.array([i for i, counts in enumerate(self._counts) if counts.any()], dtype=np.int64)
        if not len(self._used):
            raise ValueError(f"data: no conversation has an answer within its first {seq_len} tokens (seq_len)")
        self._padded = np.array([-(-len(ids) // LENGTH_STEP) * LENGTH_STEP for ids in self._ids])
        # Asked in every step, the same for a whole run and for a whole epoch.
        self._cuts, self._epoch = (lru_cache(maxsize=1)(of) for of in (self._cuts_of, self._epoch_of))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation, those that are never used too."""
        return [len(ids) for ids in self._ids]

    @property
    def digest(self) -> str:
        """Of the tokens, in order."""
        found = hashlib.sha256()
        for ids in self._ids:
            found.update(np.array([len(ids), *ids], dtype="<i8"))
        return found.hexdigest()

    def steps_per_epoch(self, tokens: int) -> int:
        """Return how many batches of at most `tokens` tokens, padding included, hold every conversation once."""
        return len(self._cuts(tokens)) - 1

    def batch_at(self, step: int, tokens: int, seed: int) -> Batch:
        """Return a batch of at most `tokens` tokens, or of one row; it depends on the arguments only."""
        epoch, number = divmod(step, self.steps_per_epoch(tokens))
        return self.batch_of(self._epoch(epoch, tokens, seed)[number])

    def batch_of(self, rows: np.ndarray) -> Batch:
        """Return these conversations as a batch."""
        seq_len = int(self._padded[rows].max())
        ids = torch.zeros(len(rows), seq_len, dtype=torch.int64)
        weights = torch.zeros(len(rows), seq_len)
        for at, row in enumerate(rows):
            ids[at, : len(self._ids[row])] = torch.from_numpy(self._ids[row])
            weights[at, : len(self._counts[row])] = torch.from_numpy(self._counts[row])
        return Batch(ids, weights, rows, sum(len(self._ids[row]) for row in rows))

    def _cuts_of(self, tokens: int) -> list[int]:
        """Return where batches begin in the conversations sorted by padded length, and where the last one ends."""
        lengths, cuts = np.sort(self._padded[self._used]), [0]
        for end, length in enumerate(lengths):
            if end > cuts[-1] and (end + 1 - cuts[-1]) * length > tokens:
                cuts.append(end)
        return [*cuts, len(lengths)]

    def _epoch_of(self, epoch: int, tokens: int, seed: int) -> list[np.ndarray]:
        """Return the conversations of each of an epoch's batches."""
        rng = np.random.default_rng((seed, epoch, 2))
        shuffled = rng.permutation(self._used)
        # Stable: which conversations of one length meet is another matter in every epoch.
        order = shuffled[np.argsort(self._padded[shuffled], kind="stable")]
        batches = np.split(order, self._cuts(tokens)[1:-1])
        return [batches[which] for which in rng.permutation(len(batches))]


class Batches:
    """What a run trains on, step by step: windows of text, whole conversations, or both in turn by their sizes.

    Args:
        data: what there is.
        config: how large a batch is, and what counts.
    """

    def __init__(self, data: TokenData, config: TrainConfig) -> None:
        self._text, self._config = replace(data, conversations=None), config
        self.rows = None
        if data.conversations:
            self.rows = Rows(data.conversations, config.seq_len, config.train_on == "answers")
        in_rows = sum(self.rows.lengths) if self.rows else 0
        in_text = sum(map(len, data.text)) + (0 if data.generated is None else data.generated.size)
        self._share_of_rows = in_rows / max(1, in_rows + in_text)

    def at(self, step: int) -> Batch:
        """Return a step's batch; it depends on the step and the seed only."""
        config = self._config
        before, after = (round(done * self._share_of_rows) for done in (step, step + 1))
        if after > before:
            return self.rows.batch_at(before, config.batch * config.seq_len, config.seed)
        ids = self._text.batch_at(step, config.batch, config.seq_len, config.seed)
        return Batch(ids, num_tokens=ids.numel())

    def sees_again(self, steps: float) -> bool:
        """Return whether so many steps see conversations more than once."""
        a_epoch = self.rows.steps_per_epoch(self._config.batch * self._config.seq_len)
        return steps * self._share_of_rows > a_epoch
