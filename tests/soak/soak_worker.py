"""The soak's hand inside the worker: counts what could leak, and makes drafting fail once."""

from __future__ import annotations

import gc
from typing import Any

from vllm_eesd.host.circuit_breaker import MAX_FAULTS
from vllm_eesd.host.worker import WorkerExtension


class SoakExtension(WorkerExtension):
    """Loaded by `--worker-extension-cls`."""

    def soak_footprint(self) -> dict[str, Any]:
        """Return Python objects, request slots in use, and faults that were met."""
        gc.collect()
        return {
            "objects": len(gc.get_objects()),
            "slots": len(self.model_runner.drafter._slots),
            "faults_met": getattr(self, "_faults_met", 0),
        }

    def soak_inject(self, place: str) -> None:
        """Make the next call at `place` do its work and then raise, unless one more fault would end speculation.

        Args:
            place: "step" (one draft step, its KV written), "policy" or "requests".
        """
        drafter = self.model_runner.drafter
        owner, name = {
            "step": (drafter._rows, "step"),
            "policy": (drafter.policy, "begin"),
            "requests": (drafter.session.requests, "draft_limits"),
        }[place]
        if owner is None or drafter.breaker.recent >= MAX_FAULTS - 1:
            return
        original = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> None:
            owner.__dict__.pop(name, None)
            original(*args, **kwargs)
            self._faults_met = getattr(self, "_faults_met", 0) + 1
            raise RuntimeError(f"a fault the soak planted in {name}")

        setattr(owner, name, faulty)
