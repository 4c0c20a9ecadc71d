"""What a worker answers when asked for the drafter's numbers: `LLM(worker_extension_cls=...)`, `collective_rpc`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker by its own option `worker_extension_cls`."""

    def eesd_stats(self) -> dict[str, Any]:
        """Return the counters of `vllm_eesd.stats.DraftStats`."""
        return self.model_runner.drafter.stats.as_dict()

    def eesd_reset_stats(self) -> None:
        """Start counting from zero."""
        self.model_runner.drafter.stats.reset()

    def eesd_take_rounds(self) -> list[dict[str, Any]]:
        """Return the rounds since the last call as plain mappings; the first call starts the recording."""
        return [asdict(round_) for round_ in self.model_runner.drafter.stats.take_rounds()]
