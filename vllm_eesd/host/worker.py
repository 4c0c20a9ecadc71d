"""What a worker answers when asked for the drafter's numbers: `LLM(worker_extension_cls=...)`, `collective_rpc`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_eesd.host import seams
from vllm_eesd.host.plugin import seams_of
from vllm_eesd.host.round_setup import build_policy_of
from vllm_eesd.host.v1.seams import PATCHED
from vllm_eesd.traces.dense import DenseRecorder


class WorkerExtension:
    """Mixed into vLLM's worker by its own option `worker_extension_cls`."""

    @property
    def _drafter(self) -> Any:
        """EESD's side of the model runner: V1 calls it its drafter, V2 its speculator."""
        runner = self.model_runner
        return runner.drafter if hasattr(runner, "drafter") else runner.speculator

    def eesd_stats(self) -> dict[str, Any]:
        """Return the counters of `DraftStats` and `CircuitBreaker`; "policy" is `DraftLengthPolicy.metrics`."""
        drafter = self._drafter
        return drafter.stats.as_dict() | drafter.breaker.as_dict() | {"policy": drafter.policy_metrics()}

    def eesd_reset_stats(self) -> None:
        """Start counting from zero."""
        self._drafter.stats.reset()

    def eesd_mend_sampling(self) -> None:
        """Have vLLM's own methods verify sampled drafts as EESD's are verified on this platform: for comparisons.

        Raises:
            RuntimeError: vLLM's code there is not what the mend was written for; nothing was changed.
        """
        patches = [seam for seam in seams_of("worker, V1") if seam.target in PATCHED]
        if misfits := [status for status in seams.check_all(patches) if not status.ok]:
            raise RuntimeError(f"eesd: {misfits[0].target} {misfits[0].reason}")
        for mend in patches:
            seams.install(mend)

    def eesd_use_policy(self, name: str) -> None:
        """Choose draft lengths by another policy from now on; one that was used before goes on with what it learned.

        For experiments: call it while no request runs. A policy that was not configured has its default arguments; all
        share the costs and the calibration.
        """
        drafter, known = self._drafter, self.__dict__.setdefault("_eesd_policies", {})
        known.setdefault(drafter.config.eesd.policy, drafter.policy)
        if name not in known:
            known[name] = build_policy_of(drafter.config, drafter.max_num_reqs, name, like=drafter.policy)
        drafter.use_policy(known[name])

    def eesd_costs(self) -> dict[str, Any]:
        """Return what steps cost so far, `vllm_eesd.policy.CostModel.state`."""
        return self._drafter.policy.costs.state()

    def eesd_record_dense(self) -> None:
        """From now on draft from every position and verify nothing; wants a policy that drafts to the end.

        Raises:
            RuntimeError: on Model Runner V2, where drafts stay on the device.
        """
        drafter = self._drafter
        if not hasattr(drafter, "recorder"):
            raise RuntimeError("eesd: dense traces are recorded on Model Runner V1 only (a CPU)")
        drafter.recorder = DenseRecorder(drafter.num_speculative_tokens)

    def eesd_take_dense(self) -> list[dict[str, Any]]:
        """Stop that, and return the requests of `vllm_eesd.traces.dense.DenseTrace` as plain mappings."""
        recorder, self._drafter.recorder = self._drafter.recorder, None
        requests = [] if recorder is None else recorder.requests()
        return [{name: array.tolist() for name, array in vars(request).items()} for request in requests]

    def eesd_take_rounds(self, last: bool = False) -> list[dict[str, Any]]:
        """Return the rounds since the last call as plain mappings; the first call starts the recording, `last` ends it.

        While rounds are recorded every one of them is decided on and none is skipped, which costs time.
        """
        return [asdict(round_) for round_ in self._drafter.stats.take_rounds(last)]
