"""What a worker wraps before it builds its model runner for EESD: what both runners share, then the runner's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_eesd.host import seams
from vllm_eesd.host.environment import read_platform
from vllm_eesd.host.seams import Seam
from vllm_eesd.host.v1 import seams as v1_seams
from vllm_eesd.host.v2 import seams as v2_seams


def _wrap_compile_or_warm_up_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self):
        drafter = getattr(self.model_runner, "drafter", None)
        if hasattr(drafter, "profile_costs"):  # V1's; vLLM's own have no such method
            drafter.profile_costs(self.model_runner)
        times = original(self)  # which resets the random seed
        # V2's, where that runs on a CPU. A vLLM that warms it up with requests of its own making does so in there:
        # nothing may be learned from them, and learning begins with this call.
        speculator = getattr(self.model_runner, "speculator", None)
        if hasattr(speculator, "profile_costs"):
            speculator.profile_costs(self.model_runner)
        return times

    return compile_or_warm_up_model


SEAMS = (
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        digests=("a69f3d323356ee82", "7ae60223a4c8c28c"),
        wrap=_wrap_compile_or_warm_up_model,
        why="draft lengths follow from what steps cost; they are timed once the model is compiled",
        retired_by="the worker warming up custom_class proposers",
        platform="cpu",
    ),
)


def seams_of(runner: str, platform: str) -> list[Seam]:
    """Return what a worker with that model runner ("V1" or "V2") wraps on that platform."""
    own = v1_seams.SEAMS if runner == "V1" else v2_seams.SEAMS
    return [seam for seam in (*SEAMS, *own) if seam.is_for(platform)]


def prepare_runner(expected: str, actual: str) -> None:
    """Make the worker's model runner ready for EESD.

    Args:
        expected: the runner the config was built for, "V1" or "V2".
        actual: the one vLLM takes after looking at everything else it was asked for.
    Raises:
        ValueError: they differ.
        RuntimeError: a seam does not fit the installed vLLM.
    """
    if expected != actual:
        raise ValueError(
            f"eesd: vLLM runs this engine on Model Runner {actual}, EESD was set up for {expected}: an option that "
            "vLLM's log names is not supported with eesd"
        )
    install(actual)


def install(runner: str) -> None:
    """Install a worker's seams if all of them fit the installed vLLM; called where vLLM has imported the worker.

    Raises:
        RuntimeError: one does not; nothing was installed.
    """
    records = seams_of(runner, read_platform())
    if misfits := [status for status in seams.check_all(records) if not status.ok]:
        raise RuntimeError(
            f"eesd: {misfits[0].target} {misfits[0].reason}: vLLM's Model Runner {runner} is not the one this "
            "vllm-eesd was written for; `eesd doctor` shows every seam"
        )
    for seam in records:
        seams.install(seam)
