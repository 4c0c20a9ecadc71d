"""The places wrapped in vLLM's scheduler, so that what it counts as drafts are drafts: placeholders are none."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from vllm_eesd.host.engine_seams import is_eesd_config
from vllm_eesd.host.seams import Seam, seam

SEAMS: list[Seam] = []
#: Set on the worker's output where drafts were trimmed after they were scheduled: per row of the batch, those verified.
NUM_VERIFIED = "eesd_num_verified"


def placeholders(
    scheduled: Mapping[str, Sequence[int]], known: Mapping[str, int], rows: Mapping[str, int], verified: Sequence | None
) -> dict[str, int]:
    """Return how many of each request's scheduled drafts were none, as vLLM counts those that a grammar cut.

    Args:
        scheduled: the drafts of each request; -1 is a placeholder, or a draft cut by a grammar.
        known: what vLLM counted so far: drafts that a grammar cut.
        rows: of the batch, by request.
        verified: drafts that the worker verified, by row; None: all that were scheduled and are no placeholders.
    """
    found = dict(known)
    for req_id, tokens in scheduled.items():
        num_none = tokens.count(-1) if verified is None else len(tokens) - verified[rows[req_id]]
        if num_none:
            found[req_id] = max(num_none, known.get(req_id, 0))
    return found


@functools.cache
def rounds_with_drafts() -> type:
    """Return vLLM's class of a request's figures, but for rounds without a draft, which it leaves out."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

    class RoundsWithDrafts(RequestSpecDecodeMetrics):
        def observe(self, num_draft_tokens: int, *args: object, **kwargs: object) -> None:
            if num_draft_tokens > 0:
                super().observe(num_draft_tokens, *args, **kwargs)

    return RoundsWithDrafts


@seam(
    SEAMS,
    target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    digests=("15d9998b30c36471", "ac1e382a83289aa5"),
    why="vLLM counts a request's placeholders as drafts, with asynchronous scheduling the longest draft in each round",
    retired_by="the scheduler counting the drafts that the worker says it has verified",
)
def update_from_output(original, self, scheduler_output, model_runner_output):
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    if scheduled and is_eesd_config(self.vllm_config.speculative_config):
        rows, verified = model_runner_output.req_id_to_index, getattr(model_runner_output, NUM_VERIFIED, None)
        known = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = placeholders(scheduled, known, rows, verified)
    return original(self, scheduler_output, model_runner_output)


@seam(
    SEAMS,
    target="vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
    digests=("71851a4a5cd92e2f",),
    why="a round of placeholders alone counts as one that drafted",
    retired_by="the scheduler leaving rounds without a draft out",
)
def make_spec_decoding_stats(
    original, self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
):
    given = spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
    if not is_eesd_config(self.vllm_config.speculative_config):
        return original(self, *given)
    request = self.requests[request_id]
    if request.spec_decode_metrics is not None and not isinstance(request.spec_decode_metrics, rounds_with_drafts()):
        request.spec_decode_metrics = rounds_with_drafts()(**vars(request.spec_decode_metrics))
    if num_draft_tokens <= (num_invalid_spec_tokens or {}).get(request_id, 0):
        return spec_decoding_stats
    return original(self, *given)
