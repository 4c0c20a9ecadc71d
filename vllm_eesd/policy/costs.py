"""What steps cost, as learned: running medians by batch size and token count, made monotone and interpolated."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median_high
from typing import Any

import numpy as np

from vllm_eesd.policy.curves import interpolate, leaning_on_a_line, monotone, value_at

#: Times a median is taken over: it forgets slow drift (longer contexts) and shrugs off outliers, if just under half of
#: them are. And new times or rounds after which curves and rates are computed again: after each would cost more than it
#: teaches.
WINDOW = 16
#: A median of fewer is at the mercy of one compilation: such a cell is not used while others are.
MIN_SAMPLES = 3
#: The largest ratio of two batch sizes of which one's plain step says what the other's takes.
PLAIN_REACH = 1.5
#: Of a median, in median distances from it, for one normally distributed time: 1.253 times 1.483 (their deviation).
STANDARD_ERROR = 1.86
#: No step takes an hour: such a time is a fault of the clock.
MAX_MS = 3.6e6
#: What each further verified token costs before any measurement, relative to a plain step.
DEFAULT_VERIFY_GROWTH = 0.06
#: Sizes above 8 share a cell with those within about a fifth.
_SIZES = [*range(9), *(round(8 * 1.2**step) for step in range(1, 45))]


class CostModel:
    """Times of engine steps and draft steps, in ms; before any is measured, in units of a plain step.

    The runners record times; policies read curves. A step's prompt chunks must not be fed: their time would be
    taken for that of verification.

    Args:
        draft_ratio: a draft step relative to a plain step until measured; (N + 1) / L layers is a good guess.
    Attributes:
        all_rows_draft: whether a draft step runs all rows of a batch, those that draft nothing as well.
    """

    all_rows_draft = False

    def __init__(self, draft_ratio: float = 0.125) -> None:
        self.draft_ratio = draft_ratio
        self._verify: dict[int, _Medians] = {}
        # Steps of the target are timed whatever is decided; these only if drafting is believed to pay, so that a first
        # one that waited for a compiler would be the last.
        self._draft_step, self._draft_round, self._decision = (_Medians(only_trusted=True) for _ in range(3))
        #: (sizes, ms) of forwards by tokens and of draft steps by rows, timed before any request was there.
        self._profile: list[tuple[np.ndarray, np.ndarray]] | None = None
        #: By (num_reqs, max_drafts), by num_reqs and by max_rows, until new times come in.
        self._verify_curves: dict[tuple[int, int], np.ndarray] = {}
        self._round_ms: dict[int, float] = {}
        self._draft_curves: dict[int, np.ndarray] = {}

    def observe_verify(self, num_reqs: int, num_tokens: int, ms: float) -> None:
        """Count the time of one engine step outside drafting: forward, sampling, scheduler and communication.

        Args:
            num_reqs: requests of the step, all decoding.
            num_tokens: tokens they ran through the target: one each and their drafts.
        """
        medians = self._verify.setdefault(cell_of(num_reqs), _Medians())
        if ms > 0 and medians.add(num_tokens - num_reqs, ms):
            self._forget_curves()

    def observe_draft_step(self, num_rows: int, ms: float) -> None:
        """Count the time of one draft step for `num_rows` rows."""
        if ms > 0 and self._draft_step.add(num_rows, ms):
            self._draft_curves.clear()

    def observe_draft_round(self, num_rows: int, ms: float) -> None:
        """Count what a round that drafted took on top of its draft steps: preparing inputs, deciding."""
        if self._draft_round.add(num_rows, ms):
            self._forget_curves()

    def observe_decision(self, num_reqs: int, ms: float) -> None:
        """Count what a round took in which nothing was found worth drafting."""
        self._decision.add(num_reqs, ms)

    def decision_ms(self, num_reqs: int) -> float:
        """Return what finding nothing worth drafting costs, 0 before it was measured."""
        return 0.0 if self._decision.curve is None else value_at(num_reqs, self._decision.curve)

    def start_from(self, forwards: list[tuple[int, float]], draft_steps: list[tuple[int, float]]) -> None:
        """Take a profile for the truth until steps are timed; afterwards for what has not been timed.

        Args:
            forwards: (tokens, ms) of the target's forward and logits, at least one.
            draft_steps: (rows, ms), at least one.
        """
        curves = [np.array(sorted(points), dtype=np.float64).T for points in (forwards, draft_steps)]
        self._profile = [(sizes, monotone(ms.tolist())) for sizes, ms in curves]
        self._forget_curves()

    def lacks_plain(self, num_reqs: int) -> bool:
        """Return whether steps of this batch size were timed, but too few without drafts, of this size or one near it.

        A batch that runs empty passes through every size: half of its steps would be plain only to be timed.
        """
        medians = self._verify.get(cell_of(num_reqs))
        if medians is None or medians.samples(0) >= MIN_SAMPLES:  # asked in every round: mostly that is all
            return False
        known = (size for size, medians in self._verify.items() if medians.samples(0) >= MIN_SAMPLES)
        return not any(max(size, num_reqs) <= PLAIN_REACH * min(size, num_reqs) for size in known)

    @property
    def in_ms(self) -> bool:
        """Whether curves are times, of a profile or of steps timed often enough, and no shares of a plain step."""
        return self._profile is not None or any(medians.is_trusted for medians in self._verify.values())

    def is_settled(self, num_reqs: int) -> bool:
        """Return whether times of this batch size can be trusted, or are still those of others."""
        medians = self._verify.get(cell_of(num_reqs))
        return medians is None or medians.is_trusted

    def verify_curve(self, num_reqs: int, max_drafts: int) -> np.ndarray:
        """Return the time of a step in which 0..max_drafts draft tokens are verified, [max_drafts + 1], ascending.

        Entry 0 is a plain step; the others include what a drafted round costs on top of its draft steps.
        """
        key = num_reqs, max_drafts
        if key not in self._verify_curves:
            curve = self._verification(num_reqs, np.arange(max_drafts + 1))
            curve[1:] += self.round_ms(num_reqs)
            self._verify_curves[key] = curve
        return self._verify_curves[key]

    def draft_curve(self, max_rows: int) -> np.ndarray:
        """Return the time of a draft step for 0..max_rows rows, [max_rows + 1], ascending; 0 for no rows."""
        if max_rows not in self._draft_curves:
            points = self._draft_step.curve or (self._profile and self._profile[1])
            if not points:
                curve = np.full(max_rows + 1, self.draft_ratio * self._verification(max_rows, np.zeros(1))[0])
            else:
                curve = interpolate(np.arange(max_rows + 1), *points)
            if self.all_rows_draft:
                curve[:] = curve[-1]
            curve[0] = 0.0
            self._draft_curves[max_rows] = curve
        return self._draft_curves[max_rows]

    def _forget_curves(self) -> None:
        self._verify_curves.clear()
        self._round_ms.clear()
        self._draft_curves.clear()  # while no draft step was timed, a share of a plain step

    def _verification(self, num_reqs: int, num_drafts: np.ndarray) -> np.ndarray:
        """Time of steps with `num_drafts` drafts in all; growth is borrowed from the nearest batch size that has it."""
        measured = {size: medians.curve for size, medians in self._verify.items() if medians.curve is not None}
        plain = {size: ys[0] for size, (xs, ys) in measured.items() if xs[0] == 0}
        grown = {size: points for size, points in measured.items() if len(points[0]) > 1}
        if measured and not plain:  # only drafted steps were timed so far
            size = _nearest(measured, num_reqs)
            xs, ys = measured[size]
            guess = ys[0] / (1 + DEFAULT_VERIFY_GROWTH * xs[0])
            plain = {size: ys[0] - self._unmeasured_growth(size, xs[:1], guess)[0]}
        if plain:
            plain_ms = self._between(num_reqs, plain)
        else:
            plain_ms = self._unmeasured_plain(num_reqs)
        if not grown:
            return plain_ms + self._unmeasured_growth(num_reqs, num_drafts, plain_ms)
        xs, ys = grown[_nearest(grown, num_reqs)]
        if xs[0] > 0:
            xs, ys = np.r_[0, xs], np.r_[min(plain_ms, ys[0]), ys]
        return plain_ms + interpolate(num_drafts, xs, ys - ys[0], default_slope=DEFAULT_VERIFY_GROWTH * plain_ms)

    def _between(self, num_reqs: int, plain: dict[int, float]) -> float:
        """A plain step's time from those of other batch sizes; between and beyond them it grows as the profile does."""
        sizes = sorted(plain)
        times, of_profile = monotone([plain[size] for size in sizes]), 0.0
        if self._profile is not None:
            times = times - interpolate(np.array(sizes), *self._profile[0])
            of_profile = value_at(num_reqs, self._profile[0])
        return of_profile + float(np.interp(num_reqs, sizes, times))

    def _unmeasured_plain(self, num_reqs: int) -> float:
        """A plain step's time before any step was timed: its forward's, or 1 where draft steps say nothing else."""
        if self._profile is not None:
            return value_at(num_reqs, self._profile[0])
        draft = self._draft_step.curve
        return 1.0 if draft is None else float(draft[1][0]) / self.draft_ratio

    def _unmeasured_growth(self, num_reqs: int, num_drafts: np.ndarray, plain_ms: float) -> np.ndarray:
        """What verifying `num_drafts` adds to a plain step: what more tokens add to a forward, or a share of it."""
        if self._profile is None:
            return DEFAULT_VERIFY_GROWTH * plain_ms * num_drafts
        slope = DEFAULT_VERIFY_GROWTH * plain_ms
        forwards = interpolate(np.r_[num_reqs, num_reqs + num_drafts], *self._profile[0], default_slope=slope)
        return forwards[1:] - forwards[0]

    def round_ms(self, num_reqs: int) -> float:
        """Return what a drafted round costs on top of its draft steps, 0 before it was measured."""
        if num_reqs not in self._round_ms:
            curve = self._draft_round.curve
            self._round_ms[num_reqs] = 0.0 if curve is None else value_at(num_reqs, curve)
        return self._round_ms[num_reqs]

    def state(self) -> dict[str, Any]:
        """Return the medians, as JSON takes them: what rank 0 sends to the others, or a profile."""
        return {
            "verify_ms": {str(size): medians.points for size, medians in self._verify.items()},
            "draft_step_ms": self._draft_step.points,
            "draft_round_ms": self._draft_round.points,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Start from the medians that `state` gave; what is measured afterwards replaces them step by step."""
        self._verify = {int(size): _Medians(points) for size, points in state["verify_ms"].items()}
        self._draft_step = _Medians(state["draft_step_ms"], only_trusted=True)
        self._draft_round = _Medians(state["draft_round_ms"], only_trusted=True)
        self._forget_curves()


class _Medians:
    """Running medians of times by size; sizes that share a cell are averaged.

    Args:
        points: [size, ms] pairs to start from.
        only_trusted: whether a cell that cannot be trusted counts for nothing even while none can.
    Attributes:
        points: [size, median ms] of every cell that can be trusted, or of all while none can, by size.
        curve: (sizes ascending, ms ascending), or None while nothing was timed.
        is_trusted: whether these are of cells that can be trusted.
    """

    def __init__(self, points: list[list[float]] | tuple[()] = (), only_trusted: bool = False) -> None:
        self._only_trusted = only_trusted
        self._times: dict[int, deque[tuple[float, float]]] = {}
        self._since_refresh = 0
        self.is_trusted = False
        self.points: list[list[float]] = []
        self.curve: tuple[np.ndarray, np.ndarray] | None = None
        for size, ms in points:
            self._times[cell_of(int(size))] = deque([(size, ms)] * MIN_SAMPLES, WINDOW)
        if points:
            self._refresh()

    def add(self, size: int, ms: float) -> bool:
        """Take one time in; return whether the curve changed. What no clock shows is ignored."""
        if not 0 <= ms <= MAX_MS:
            return False
        times = self._times.setdefault(cell_of(size), deque(maxlen=WINDOW))
        times.append((size, ms))
        self._since_refresh += 1
        if len(times) == MIN_SAMPLES or self._since_refresh >= WINDOW or self.curve is None:
            self._refresh()
            return True
        return False

    def samples(self, size: int) -> int:
        return len(self._times.get(cell_of(size), ()))

    def _refresh(self) -> None:
        self._since_refresh = 0
        cells = [self._times[cell] for cell in sorted(self._times)]
        trusted = [times for times in cells if len(times) >= MIN_SAMPLES]
        self.is_trusted = bool(trusted)
        if self._only_trusted and not trusted:
            return
        cells = [tuple(zip(*times, strict=True)) for times in trusted or cells]
        self.points = [[sum(sizes) / len(sizes), median_high(ms)] for sizes, ms in cells]
        sizes, medians = np.array(self.points).T
        if trusted:
            counts = np.array([len(times) for times in trusted])
            spread = np.median([_scatter(times, median) for times, median in zip(trusted, medians, strict=True)])
            medians = leaning_on_a_line(sizes, medians, STANDARD_ERROR * spread * medians / np.sqrt(counts))
        self.curve = sizes, monotone(medians.tolist())


def _scatter(times: deque[tuple[float, float]], median: float) -> float:
    return median_high(abs(ms - median) for _, ms in times) / median if median else 0.0


def cell_of(size: int) -> int:
    """Return the size whose cell a size shares: itself up to 8, above that one within about a fifth."""
    return size if size <= 8 else _SIZES[min(bisect_left(_SIZES, size), len(_SIZES) - 1)]


def _nearest(sizes: dict[int, Any], size: int) -> int:
    return min(sizes, key=lambda other: abs(np.log((other + 1) / (size + 1))))
