"""Rounds written down on Model Runner V2: what a step emitted is still on the device when the host notes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_eesd.host.v2.batch import TargetStep
from vllm_eesd.host.v2.readback import HostCopy, StepClock
from vllm_eesd.round.counters import Round
from vllm_eesd.round.step import Drafted, Step
from vllm_eesd.traces.rounds import Judged, Verdict


def tokens_of_step(step: TargetStep, drafts: torch.Tensor) -> torch.Tensor:
    """Return all that a trace needs of a step in one tensor, [num_reqs, K + 2] int64, on the device.

    Drafts, the last token each request emitted, and how many it emitted; the others are the drafts' first ones.

    Args:
        drafts: [num_reqs, K] int64, what the step verified, as it was drafted.
    """
    return torch.cat([drafts, step.last_sampled[step.idx_mapping, :1], step.num_sampled.long()[:, None]], dim=1)


def pending_verdict(
    step: Step,
    clock: StepClock,
    drafted: Drafted | None,
    request_ids: Sequence[str],
    num_verified: np.ndarray,
    tokens: HostCopy,
) -> Callable[[], Verdict | None]:
    """Return what `RoundTrace.add_pending` asks for a step's outcome.

    Args:
        clock: of the step.
        drafted: what the round before drafted, if the trace shows its confidences.
        request_ids: num_reqs of them.
        num_verified: [num_reqs] int64, draft tokens judged; -1 where the host never learns, the accepted ones then.
        tokens: of `tokens_of_step`, on their way to the host.
    """
    rows, names = np.flatnonzero(step.decoded), list(request_ids)

    def verdict() -> Verdict | None:
        if not tokens.is_done():
            return None
        judged = judged_rows(rows, names, num_verified, tokens)
        rest_ms, steps_ms = clock.drafting_ms()
        confidences = None if drafted is None else confidences_of(step.slots, drafted)
        return Verdict(rows, judged, steps_ms, rest_ms, clock.verify_ms() or 0.0, confidences)

    return verdict


def judged_rows(
    rows: np.ndarray, request_ids: Sequence[str], num_verified: np.ndarray, tokens: HostCopy
) -> list[Judged]:
    """Return what became of these rows' drafts; waits for the device. The arguments are those of `pending_verdict`."""
    judged, on_host = [], tokens.numpy().tolist()
    for row in rows.tolist():
        *drafts, last, num_sampled = on_host[row]
        accepted, verified = drafts[: num_sampled - 1], num_verified[row]
        draft = accepted if verified < 0 else drafts[:verified]
        judged.append(Judged(request_ids[row], draft, [*accepted, last]))
    return judged


def recorded_rounds(
    rows: np.ndarray, request_ids: Sequence[str], num_verified: np.ndarray, tokens: HostCopy
) -> Callable[[], list[Round]]:
    """Return what `DraftStats.record` asks for; the arguments are those of `judged_rows`."""
    names = list(request_ids)

    def rounds() -> list[Round]:
        judged = judged_rows(rows, names, num_verified, tokens)
        return [Round(name, draft, len(emitted) - 1, emitted) for name, draft, emitted in judged if emitted]

    return rounds


def confidences_of(slots: np.ndarray, drafted: Drafted) -> np.ndarray:
    """Return the confidences of each row's draft, [num_reqs, K] float32; NaN where the round before had no such row."""
    confidences = drafted.confidences.numpy()
    here, there = np.nonzero(slots[:, None] == drafted.round.slots)
    found = np.full((len(slots), confidences.shape[1]), np.nan, dtype=np.float32)
    found[here] = confidences[there]
    return found
