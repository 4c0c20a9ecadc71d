"""What Model Runner V1 hands back of a step: the tokens, and the drafts of the next round beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_eesd.host.v1.batch import count_thoughts_by_request, discarded_rows_draw_nothing, seed_requests

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: What a worker sends instead of drafts where no request has any.
NO_DRAFTS = ()


def with_drafts(
    sample: Callable[[], ModelRunnerOutput | None], runner: GPUModelRunner, seeds_every_request: bool
) -> ModelRunnerOutput | None:
    """Return the output of a step, its drafts as `eesd_drafts`: fetching them would be a message more.

    Args:
        sample: vLLM's, of this step.
        seeds_every_request: whether requests without a seed are verified by shared noise too.
    """
    count_thoughts_by_request(runner)
    seed_requests(runner, every=seeds_every_request)
    with discarded_rows_draw_nothing(runner):
        output = sample()
    if output is not None:
        drafts = runner.take_draft_token_ids()
        # Empty drafts need not travel: the scheduler empties a request's when it schedules them.
        output.eesd_drafts = drafts if drafts is None or any(drafts.draft_token_ids) else NO_DRAFTS
    return output
