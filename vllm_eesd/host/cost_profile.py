"""What steps cost before any request is served: forwards and draft steps of a few sizes, timed at start-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_eesd.host.compat import create_forward_context, get_tp_group, override_forward_context
from vllm_eesd.host.draft_step import DraftStep
from vllm_eesd.host.v2_lag import Timestamps
from vllm_eesd.policy import CostModel

#: Runs a step of some size and returns the ms it took.
Job = Callable[[], float]
#: All of it together; a size that was begun is finished.
BUDGET_S = 0.3
#: In the order they are timed: with little time the first ones must do. The others lie between or beyond.
FORWARD_TOKENS = (1, 9, 3, 17, 5, 2, 33, 65)
DRAFT_ROWS = (1, 8, 2, 32)
MOST_PASSES = 6


def profile_costs(runner: Any, step: DraftStep, costs: CostModel) -> None:
    """Give `costs` something to start from, on Model Runner V1.

    Without requests there is no attention: what is timed are the layers' matrices, the norms and the LM head, which is
    what grows with the number of tokens. What an engine step takes besides is learned from the first steps.

    Args:
        runner: vLLM's GPUModelRunner, its model compiled.
        step: the compiled draft step.
    """
    longest = runner.num_spec_tokens

    def forward(num_tokens: int) -> Job:
        return _timed(forward_call(runner, num_tokens))

    _profile(runner, longest, forward, lambda num_rows: _timed(draft_call(runner, step, num_rows)), costs)


def profile_v2_costs(runner: Any, speculator: Any, costs: CostModel) -> None:
    """The same on Model Runner V2, whose dummy runs have attention and replay CUDA graphs where serving does.

    Forwards and draft steps are both timed as the device sees them while it has work waiting, which is how steps are
    timed while serving: what the host does meanwhile is hidden behind them.

    Args:
        runner: vLLM's GPUModelRunner, warmed up and its graphs captured.
        speculator: the `EarlyExitSpeculator`.
    """
    on_gpu = runner.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    @torch.inference_mode()
    def run(num_tokens: int) -> None:
        hidden_states, _ = runner._dummy_run(num_tokens)
        runner.model.compute_logits(hidden_states[:num_tokens])

    def forward(num_tokens: int) -> Job:
        def job() -> float:
            speculator.rests_in_dummy_runs = True
            try:
                if on_gpu:
                    run(num_tokens)  # the device is busy with it while the host prepares the one that is timed
                times = Timestamps(runner.device)
                times.mark()
                run(num_tokens)
                times.mark()
                synchronize()
            finally:
                speculator.rests_in_dummy_runs = False
            return times.ms(times, 0, 1)

        return job

    def draft(num_rows: int) -> Job:
        def job() -> float:
            runner._dummy_run(num_rows)
            synchronize()
            return speculator.dummy_times.ms(speculator.dummy_times, 0, 1)

        return job

    _profile(runner, speculator.num_speculative_tokens, forward, draft, costs)


def _profile(
    runner: Any, longest_draft: int, forward: Callable[[int], Job], draft: Callable[[int], Job], costs: CostModel
) -> None:
    most_tokens = min(runner.max_num_reqs * (longest_draft + 1), runner.scheduler_config.max_num_batched_tokens)
    jobs = {("forward", n): forward(n) for n in FORWARD_TOKENS if n <= most_tokens}
    jobs |= {("draft", n): draft(n) for n in DRAFT_ROWS if n <= runner.max_num_reqs}
    order = sorted(jobs, key=lambda job: (FORWARD_TOKENS if job[0] == "forward" else DRAFT_ROWS).index(job[1]))
    times = _time(jobs, order)
    medians = {job: statistics.median(ms[1:] or ms) for job, ms in times.items()}  # the first is a rehearsal
    forwards, drafts = ([(n, ms) for (kind, n), ms in medians.items() if kind == k] for k in ("forward", "draft"))
    if forwards and drafts:
        costs.start_from(forwards, drafts)


def _time(jobs: dict[Any, Job], order: list[Any]) -> dict[Any, list[float]]:
    """Return ms of every job that the budget had room for; every rank gets rank 0's, and does the same jobs."""
    group, times = get_tp_group(), {}
    deadline = time.perf_counter() + BUDGET_S
    for job in order * MOST_PASSES:
        going_on = time.perf_counter() < deadline
        if group.world_size > 1:
            going_on = group.broadcast_object(going_on, src=0)
        if not going_on:
            break
        times.setdefault(job, []).append(jobs[job]())
    return group.broadcast_object(times, src=0) if group.world_size > 1 else times


def _timed(call: Callable[[], None]) -> Job:
    def job() -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3

    return job


def forward_call(runner: Any, num_tokens: int) -> Callable[[], None]:
    """Return a call that runs the target and its LM head over `num_tokens` tokens, without attention."""

    def forward() -> None:
        hidden_states, _ = runner._dummy_run(num_tokens)
        runner.model.compute_logits(hidden_states[:num_tokens])

    return forward


def draft_call(runner: Any, step: DraftStep, num_rows: int) -> Callable[[], None]:
    """Return a call that runs a draft step of `num_rows` rows, without attention."""
    rows = torch.zeros(num_rows, dtype=torch.int64)
    model_config = runner.model_config
    hidden_states = torch.zeros(num_rows, model_config.get_hidden_size(), dtype=model_config.dtype)
    context = create_forward_context(None, runner.vllm_config)

    def draft() -> None:
        if runner.lora_config:  # the mapping of the last forward is for another number of tokens
            runner._set_active_loras((0,) * num_rows, (0,) * num_rows, set())
        with torch.inference_mode(), override_forward_context(context):
            step(rows, rows, step.round_context(hidden_states))

    return draft
