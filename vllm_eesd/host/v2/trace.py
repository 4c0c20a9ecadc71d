"""Round traces on Model Runner V2: what a step emitted is still on the device when the host notes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_eesd.host.v2.readback import RoundTimes, copy_to_host
from vllm_eesd.traces.rounds import Judged, Verdict


def tokens_of_step(drafts: torch.Tensor, last_sampled: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
    """Return all that a trace needs of a step in one tensor, [num_reqs, K + 2] int64, on the device.

    Args:
        drafts: [num_reqs, K] int64, what the step verified, as it was drafted.
        last_sampled: [num_reqs] int64, the last token each request emitted.
        num_sampled: [num_reqs] int32, how many it emitted; the others are the drafts' first ones.
    """
    return torch.cat([drafts, last_sampled[:, None], num_sampled.long()[:, None]], dim=1)


def pending_verdict(
    request_ids: Sequence[str],
    rows: np.ndarray,
    num_verified: np.ndarray,
    tokens: torch.Tensor,
    times: RoundTimes,
) -> Callable[[], Verdict | None]:
    """Return what `RoundTrace.add_pending` asks for a step's outcome; copying it to the host begins here.

    Args:
        request_ids: num_reqs of them.
        rows: [num_rows] int64, those of the batch that decoded.
        num_verified: [num_rows] int64, draft tokens judged; -1 where the host never learns, the accepted ones then.
        tokens: of `tokens_of_step`.
        times: of the round that begins as the step ends.
    """
    on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
    event = copy_to_host(tokens, on_host)
    names = [request_ids[row] for row in rows.tolist()]

    def verdict() -> Verdict | None:
        if event is not None and not event.query():
            return None
        # The moments the times are between came before the copy, so they are over too.
        _, rest_ms, steps_ms = times.drafting_ms()
        judged = []
        for name, verified, (*drafts, last, num_sampled) in zip(
            names, num_verified, on_host.numpy()[rows].tolist(), strict=True
        ):
            accepted = drafts[: num_sampled - 1]
            judged.append(Judged(name, accepted if verified < 0 else drafts[:verified], [*accepted, last]))
        return Verdict(rows, judged, steps_ms, rest_ms, times.verify_ms() or 0.0)

    return verdict
