"""Model Runner V2's steps, timed at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_eesd.host.cost_profile import forward_call, profile
from vllm_eesd.host.v2.readback import Timestamps
from vllm_eesd.policy import CostModel

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_eesd.host.v2.draft_steps import DraftSteps


def profile_costs(runner: GPUModelRunner, speculator: DraftSteps, costs: CostModel) -> None:
    """Give `costs` something to start from: dummy runs, which have attention and replay CUDA graphs where serving does.

    Forwards and draft steps are both timed as the device sees them while it has work waiting, which is how steps are
    timed while serving: what the host does meanwhile is hidden by them.

    Args:
        runner: warmed up and its graphs captured.
        speculator: the runner's.
    """
    on_gpu = runner.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    @torch.inference_mode()
    def run(num_tokens: int) -> None:
        forward_call(runner, num_tokens)()

    def forward_ms(num_tokens: int) -> float:
        times, speculator.skips_dummy_runs = Timestamps(runner.device), True
        try:
            if on_gpu:
                run(num_tokens)  # the device is busy with it while the host prepares the one that is timed
            times.mark()
            run(num_tokens)
            times.mark()
            synchronize()
        finally:
            speculator.skips_dummy_runs = False
        return times.ms(times, 0, 1)

    def draft_ms(num_rows: int) -> float:
        runner._dummy_run(num_rows)
        synchronize()
        return speculator.dummy_times.ms(speculator.dummy_times, 0, 1)

    profile(runner, speculator.num_speculative_tokens, forward_ms, draft_ms, costs)
