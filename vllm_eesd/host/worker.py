"""What a worker answers when asked for the drafter's numbers: `LLM(worker_extension_cls=...)`, `collective_rpc`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_eesd.trace import DenseRecorder


class WorkerExtension:
    """Mixed into vLLM's worker by its own option `worker_extension_cls`."""

    def eesd_stats(self) -> dict[str, Any]:
        """Return the counters of `DraftStats` and, as "policy", what `DraftLengthPolicy.metrics` gives."""
        drafter = self.model_runner.drafter
        return drafter.stats.as_dict() | {"policy": drafter.policy_metrics()}

    def eesd_reset_stats(self) -> None:
        """Start counting from zero."""
        self.model_runner.drafter.stats.reset()

    def eesd_costs(self) -> dict[str, Any]:
        """Return what steps cost so far, `vllm_eesd.policy.CostModel.state`."""
        return self.model_runner.drafter.policy.costs.state()

    def eesd_record_dense(self) -> None:
        """From now on draft from every position and verify nothing; wants a policy that drafts to the end."""
        drafter = self.model_runner.drafter
        drafter.recorder = DenseRecorder(drafter.num_speculative_tokens)

    def eesd_take_dense(self) -> list[dict[str, Any]]:
        """Stop that, and return the requests of `vllm_eesd.trace.DenseTrace` as plain mappings."""
        recorder, self.model_runner.drafter.recorder = self.model_runner.drafter.recorder, None
        requests = [] if recorder is None else recorder.requests()
        return [{"matches": r.matches.tolist(), "confidences": r.confidences.tolist()} for r in requests]

    def eesd_take_rounds(self) -> list[dict[str, Any]]:
        """Return the rounds since the last call as plain mappings; the first call starts the recording."""
        return [asdict(round_) for round_ in self.model_runner.drafter.stats.take_rounds()]
