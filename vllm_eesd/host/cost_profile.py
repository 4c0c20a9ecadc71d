"""What steps cost before any request is served: forwards and draft steps of a few sizes, timed at start-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_eesd.host.adapters import without_adapters
from vllm_eesd.host.compat import get_tp_group
from vllm_eesd.policy import CostModel

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

#: What is run, "forward" or "draft", and its size.
Job = tuple[str, int]
#: All of it together; a size that was begun is finished.
BUDGET_S = 0.3
#: In the order they are timed: with little time the first ones must do. The others lie between or beyond.
FORWARD_TOKENS = (1, 9, 3, 17, 5, 2, 33, 65)
DRAFT_ROWS = (1, 8, 2, 32)
MOST_PASSES = 6


def profile(
    runner: V1Runner | V2Runner,
    longest_draft: int,
    forward_ms: Callable[[int], float],
    draft_ms: Callable[[int], float],
    costs: CostModel,
) -> None:
    """Give `costs` something to start from.

    Args:
        longest_draft: in tokens.
        forward_ms: runs a forward of the target over so many tokens, and returns what it took.
        draft_ms: the same of a draft step of so many rows.
    """
    most_tokens = min(runner.max_num_reqs * (longest_draft + 1), runner.scheduler_config.max_num_batched_tokens)
    jobs = [("forward", n) for n in FORWARD_TOKENS if n <= most_tokens]
    jobs += [("draft", n) for n in DRAFT_ROWS if n <= runner.max_num_reqs]
    jobs.sort(key=lambda job: (FORWARD_TOKENS if job[0] == "forward" else DRAFT_ROWS).index(job[1]))
    times = _time(jobs, lambda kind, n: forward_ms(n) if kind == "forward" else draft_ms(n))
    medians = {job: statistics.median(ms[1:] or ms) for job, ms in times.items()}  # the first is a rehearsal
    forwards, drafts = ([(n, ms) for (kind, n), ms in medians.items() if kind == k] for k in ("forward", "draft"))
    if forwards and drafts:
        costs.start_from(forwards, drafts)


def _time(jobs: list[Job], run: Callable[[str, int], float]) -> dict[Job, list[float]]:
    """Return ms of every job that the budget had room for; every rank gets rank 0's, and does the same jobs."""
    group, times = get_tp_group(), {}
    deadline = time.perf_counter() + BUDGET_S
    for job in jobs * MOST_PASSES:
        going_on = time.perf_counter() < deadline
        if group.world_size > 1:
            going_on = group.broadcast_object(going_on, src=0)
        if not going_on:
            break
        times.setdefault(job, []).append(run(*job))
    return group.broadcast_object(times, src=0) if group.world_size > 1 else times


def forward_call(runner: V1Runner | V2Runner, num_tokens: int) -> Callable[[], None]:
    """Return a call that runs the target and its LM head over `num_tokens` tokens, which belong to no request."""

    def forward() -> None:
        hidden_states, _ = runner._dummy_run(num_tokens)
        # A dummy run maps no more of its tokens to adapters than there may be requests.
        without_adapters(runner, num_tokens)
        runner.model.compute_logits(hidden_states[:num_tokens])

    return forward


def timed(call: Callable[[], None]) -> float:
    """Return the ms that a call takes by the host's clock."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
