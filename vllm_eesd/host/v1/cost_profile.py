"""Model Runner V1's steps, timed at start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_eesd.host.adapters import without_adapters
from vllm_eesd.host.compat import create_forward_context, override_forward_context
from vllm_eesd.host.cost_profile import forward_call, profile, timed
from vllm_eesd.host.model.draft_step import DraftStep
from vllm_eesd.policy import CostModel

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def profile_costs(runner: GPUModelRunner, step: DraftStep, costs: CostModel) -> None:
    """Give `costs` something to start from.

    Without requests there is no attention: what is timed are the layers' matrices, the norms and the LM head, which is
    what grows with the number of tokens. What an engine step takes on top is learned from the first steps.

    Args:
        runner: vLLM's GPUModelRunner, its model compiled.
        step: the compiled draft step.
    """
    profile(
        runner,
        runner.num_spec_tokens,
        lambda num_tokens: timed(forward_call(runner, num_tokens)),
        lambda num_rows: timed(draft_call(runner, step, num_rows)),
        costs,
    )


def draft_call(runner: GPUModelRunner, step: DraftStep, num_rows: int) -> Callable[[], None]:
    """Return a call that runs a draft step of `num_rows` rows, without attention."""
    rows = torch.zeros(num_rows, dtype=torch.int64)
    model_config = runner.model_config
    hidden_states = torch.zeros(num_rows, model_config.get_hidden_size(), dtype=model_config.dtype)
    context = create_forward_context(None, runner.vllm_config)

    def draft() -> None:
        without_adapters(runner, num_rows)
        with torch.inference_mode(), override_forward_context(context):
            step(rows, rows, step.round_context(hidden_states))

    return draft
