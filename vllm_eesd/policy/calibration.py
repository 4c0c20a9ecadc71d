"""Calibration: what a draft token's confidence says of its acceptance, by position in the draft, learned online.

Each kind of draft has a table of its own: acceptance of a drawn one, the sum of min(p, q), moves far less with
confidence than whether both models would choose the same token (on the embedded model at temperature 0.8 from 0.57 to
1, of a greedy draft from 0.41 to 1, in between 0.2 apart). Of drafts verified by shared noise the confidence is another
quantity, see `margin_confidence`.

`calibration.json` (beside a head's weights, made by counting on held-out text) is an object:

    "edges"     ascending inner edges of the confidence bins, within (0, 1); must be `EDGES`
    "observed"  [positions][bins] numbers >= 0: greedy draft tokens that the target judged, position 1 first
    "accepted"  [positions][bins] of those, the accepted ones
    "drawn_observed", "drawn_accepted"  the same of drawn draft tokens; both may be missing
    "shared_noise_observed", "shared_noise_accepted"  of those verified by shared noise; both may be missing

Bin b holds confidences in [edge b-1, edge b). A token after a rejected one was not judged and is not counted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import vllm_eesd.policy.costs as costs
from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.source import GREEDY, SHARED_NOISE

FILE_NAME = "calibration.json"
#: Finer towards 1, where most confidences are and where a product of several tells 0.9 from 0.99.
EDGES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
NUM_BINS = len(EDGES) + 1
#: Outcomes a cell remembers: older ones fade, so that a new workload is learned.
MEMORY = 2000.0
#: Pseudo-counts with which a cell leans on its bin at all positions, a bin on its centre (one of drawn drafts on the
#: greedy ones'), a position on the one before.
SMOOTHING = 16.0
MAX_FILE_BYTES = 1 << 20

#: The prefixes of the tables' names in a file, by source of the drafts: GREEDY, DRAWN, SHARED_NOISE.
PREFIXES = ("", "drawn_", "shared_noise_")


def margin_confidence(margin: np.ndarray) -> np.ndarray:
    """Return the confidence of drafts verified by shared noise, in [0, 1]: 1 - exp(-margin).

    The margin grows with the chance that the target's scores have the same maximum, and has no upper end. Of many
    tokens that are equally likely it is exponentially distributed with mean 1 (the gap between the two largest of
    Gumbel variables), so that this confidence is uniform where the draft model knows least.

    Args:
        margin: of any shape, the gap between the two largest of log q + noise, at least 0.
    """
    return -np.expm1(-margin)


class Calibration:
    """Counts of judged and accepted draft tokens by position and confidence bin, and the smoothed rates they give.

    Attributes:
        mean_rate: [3] acceptance of all judged tokens, by kind of draft.
        bin_rates: [3, NUM_BINS] of those of each bin.
        position_rates: [3, MAX_SPECULATIVE_TOKENS] of those at each position.
        exponents: [3, MAX_SPECULATIVE_TOKENS] how much harder than the average token each is, in powers of its
            acceptance.
        rates: [3, MAX_SPECULATIVE_TOKENS, NUM_BINS + 1] by position and bin; the last is for unknown confidences.
    """

    def __init__(self) -> None:
        # The last bin is for tokens whose confidence was not computed: they still tell how positions differ.
        self._observed = np.zeros((len(PREFIXES), MAX_SPECULATIVE_TOKENS, NUM_BINS + 1))
        self._accepted = np.zeros_like(self._observed)
        self.edges = np.array(EDGES, dtype=np.float32)
        edges = np.array((0.0, *EDGES, 1.0))
        self._centers = (edges[1:] + edges[:-1]) / 2
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._refresh()

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Calibration:
        """Return the calibration shipped with a head, or an empty one where there is none.

        Raises:
            ValueError: the file is not in the format above.
        """
        calibration, path = cls(), Path(directory) / FILE_NAME
        if path.is_file():
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"{path}: {path.stat().st_size} bytes, a calibration has at most {MAX_FILE_BYTES}")
            try:
                calibration.restore(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise ValueError(f"{path}: not a calibration ({' '.join(str(error).split())})") from None
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        return calibration

    def acceptance(self, confidence: np.ndarray, position: int, kinds: np.ndarray | int = GREEDY) -> np.ndarray:
        """Return the probability that a draft token is accepted, given that all before it are.

        Args:
            confidence: [num_rows] float32 in [0, 1]; NaN where unknown.
            position: of the token in its draft, from 0.
            kinds: [num_rows] integers, of each draft.
        Returns:
            [num_rows] float64 in (0, 1).
        """
        return self.rates[np.asarray(kinds, dtype=np.int64), position, self._bin(confidence)]

    def observe(
        self,
        confidences: np.ndarray,
        num_verified: np.ndarray,
        num_accepted: np.ndarray,
        updates_shared_prior: np.ndarray | None = None,
        kinds: np.ndarray | None = None,
    ) -> None:
        """Take in one round's outcomes; they show within `costs.WINDOW` rounds.

        Args:
            confidences: [num_rows, longest draft] float32, NaN where unknown; equally wide in every call.
            num_verified: [num_rows] draft tokens the target judged.
            num_accepted: [num_rows] of those, the leading ones accepted.
            updates_shared_prior: [num_rows] bool, which rows count; None: all.
            kinds: [num_rows] integers, of the drafts; None: all are greedy.
        """
        num_judged = np.minimum(num_verified, num_accepted + 1)
        if updates_shared_prior is not None:
            num_judged = num_judged * updates_shared_prior
        tables = np.zeros(len(num_judged), dtype=np.int64) if kinds is None else kinds.astype(np.int64)
        self._waiting.append((confidences, num_judged, num_accepted, tables))
        if len(self._waiting) >= costs.WINDOW:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if not self._waiting:
            return
        waiting = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        confidences, num_judged, num_accepted, tables = waiting
        self._waiting.clear()
        rows, positions = np.nonzero(np.arange(MAX_SPECULATIVE_TOKENS) < num_judged[:, None])
        self.count(tables[rows], positions, confidences[rows, positions], 1.0, positions < num_accepted[rows])

    def count(
        self,
        kinds: np.ndarray | int,
        positions: np.ndarray,
        confidences: np.ndarray,
        judged: np.ndarray | float,
        accepted: np.ndarray,
    ) -> None:
        """Count draft tokens, [num_tokens] each or the same for all.

        Args:
            kinds: of their drafts.
            positions: in their drafts, from 0.
            confidences: float32, NaN where unknown.
            judged, accepted: how often; the chance of it where the target's judgement was not drawn.
        """
        where = np.broadcast_arrays(np.asarray(kinds, dtype=np.int64), positions, self._bin(confidences))
        cells = np.ravel_multi_index(where, self._observed.shape)
        judged = np.broadcast_to(judged, cells.shape)
        self._observed += np.bincount(cells, judged, self._observed.size).reshape(self._observed.shape)
        self._accepted += np.bincount(cells, accepted, self._accepted.size).reshape(self._accepted.shape)
        self._refresh()

    def _bin(self, confidence: np.ndarray) -> np.ndarray:
        # NaN sorts after every edge; it belongs in the bin of its own after the last.
        return np.searchsorted(self.edges, confidence, side="right") + np.isnan(confidence)

    def _refresh(self) -> None:
        fade = np.minimum(1.0, MEMORY / np.maximum(self._observed, 1.0))
        self._observed *= fade
        self._accepted *= fade
        leaning, mean = self._centers, 0.5
        self.bin_rates, self.mean_rate = np.empty((len(PREFIXES), NUM_BINS)), np.empty(len(PREFIXES))
        for table, (observed, accepted) in enumerate(zip(self._observed, self._accepted, strict=True)):
            if table == SHARED_NOISE:  # its confidences are on another scale
                leaning = self._centers
            known = observed[:, :NUM_BINS].sum(0), accepted[:, :NUM_BINS].sum(0)
            self.bin_rates[table] = leaning = (known[1] + SMOOTHING * leaning) / (known[0] + SMOOTHING)
            self.mean_rate[table] = mean = (accepted.sum() + SMOOTHING * mean) / (observed.sum() + SMOOTHING)
        # Each position leans on the one before it: the deep ones are rarely reached.
        self.position_rates, rate = np.empty((len(PREFIXES), MAX_SPECULATIVE_TOKENS)), self.mean_rate
        counts = self._observed.sum(2).T, self._accepted.sum(2).T
        for position, (num_observed, num_accepted) in enumerate(zip(*counts, strict=True)):
            rate = (num_accepted + SMOOTHING * rate) / (num_observed + SMOOTHING)
            self.position_rates[:, position] = rate
        self.exponents = np.log(self.position_rates) / np.log(self.mean_rate)[:, None]
        self.rates = np.empty_like(self._observed)
        cells = self._observed[..., :NUM_BINS], self._accepted[..., :NUM_BINS]
        self.rates[..., :NUM_BINS] = (cells[1] + SMOOTHING * self.bin_rates[:, None]) / (cells[0] + SMOOTHING)
        self.rates[..., NUM_BINS] = self.position_rates

    def expected_calibration_error(self) -> float:
        """Return the mean gap between a bin's confidence and its acceptance, weighted by how often it occurs.

        Drafts verified by shared noise are left out: their confidence is no probability.
        Source: arXiv 1706.04599, section 2; bins by `EDGES`, a bin's confidence is its centre.
        """
        self._count_waiting()
        observed, accepted = (of_all[:SHARED_NOISE, :, :NUM_BINS].sum(1) for of_all in (self._observed, self._accepted))
        gaps = np.abs(accepted - observed * self._centers)
        return float(gaps.sum() / max(observed.sum(), 1.0))

    def state(self) -> dict[str, Any]:
        """Return the tables in the format above."""
        self._count_waiting()
        counts = {"observed": self._observed, "accepted": self._accepted}
        return {"edges": list(EDGES)} | {
            prefix + name: of_all[table, :, :NUM_BINS].round(3).tolist()
            for table, prefix in enumerate(PREFIXES)
            for name, of_all in counts.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over tables in the format above.

        Raises:
            ValueError: wrong edges or shapes, or counts that are not finite, negative or accepted more than observed.
        """
        if tuple(state["edges"]) != EDGES:
            raise ValueError(f"edges are {state['edges']!r:.80}, must be {list(EDGES)}")
        present = [table for table, prefix in enumerate(PREFIXES) if any(name.startswith(prefix) for name in state)]
        tables = {table: _read_table(state, PREFIXES[table]) for table in present}
        for table, (observed, accepted) in tables.items():
            self._observed[table, : len(observed), :NUM_BINS] = observed
            self._accepted[table, : len(accepted), :NUM_BINS] = accepted
        self._refresh()


def _read_table(state: dict[str, Any], prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what was observed and accepted, [positions, NUM_BINS] float64 each, checked."""
    names = prefix + "observed", prefix + "accepted"
    observed, accepted = (np.array(state[name], dtype=np.float64) for name in names)
    positions = len(observed)
    if observed.shape != accepted.shape or observed.shape[1:] != (NUM_BINS,) or positions > MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"{names[0]} is {list(observed.shape)} and {names[1]} {list(accepted.shape)}, both must be [positions, "
            f"{NUM_BINS}] with at most {MAX_SPECULATIVE_TOKENS} positions"
        )
    if not (np.isfinite(observed).all() and (accepted >= 0).all() and (accepted <= observed).all()):
        raise ValueError(f"counts must be finite with 0 <= {names[1]} <= {names[0]}")
    return observed, accepted
