"""The entry point of group `vllm.general_plugins`: checks every seam, then installs them, or says why it does not.

vLLM calls `register` in every process, EESD asked for or not. Code is compared in vLLM's files and wrapped when vLLM
imports it: no module of vLLM is imported for it. A worker that is about to build its model runner for EESD installs
the seams of that runner (`prepare_worker`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_eesd.host import engine_seams, scheduler_seams, seams
from vllm_eesd.host.environment import read_platform, read_runner
from vllm_eesd.host.seams import Seam, SeamStatus
from vllm_eesd.host.v1 import seams as v1_seams
from vllm_eesd.host.v2 import seams as v2_seams

#: Releases the adapters were written and tested against.
SUPPORTED_VLLM = ("0.32", "0.33")
_SEAMS: list[Seam] = []


@seams.seam(
    _SEAMS,
    target="vllm.v1.worker.gpu_worker:Worker.__init__",
    digests=("c6d617e16f8e2c65", "7b204442e22ca33d"),
    why="the model runner's own seams go in where a worker is about to build it for EESD, not in every process",
    retired_by="a registry of speculators that plugins can add to",
)
def init_worker(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    config = self.vllm_config.speculative_config
    if engine_seams.is_eesd_config(config):
        prepare_worker(config.runner, "V2" if self.use_v2_model_runner else "V1")


#: Where seams are installed, in the words of `eesd doctor` and docs/seams.md.
PLACES: dict[str, Sequence[Seam]] = {
    "every process": (*engine_seams.SEAMS, *scheduler_seams.SEAMS, *_SEAMS),
    "worker": engine_seams.WORKER_SEAMS,
    "worker, V1": v1_seams.SEAMS,
    "worker, V2": v2_seams.SEAMS,
}


def seams_of(*places: str) -> list[Seam]:
    """Return the seams of these places that this platform needs."""
    platform = read_platform()
    return [seam for place in places for seam in PLACES[place] if seam.is_for(platform)]


def check_host() -> list[SeamStatus]:
    """Return the state of every seam that an engine would need here, against the installed vLLM."""
    return seams.check_all(seams_of("every process", "worker", f"worker, {read_runner()[0]}"))


def report() -> list[tuple[str, SeamStatus]]:
    """Return (place, state) of every seam there is, whatever an engine would need here."""
    return [(place, state) for place, records in PLACES.items() for state in seams.check_all(records)]


def register() -> None:
    """Have the seams installed if all of them fit the installed vLLM; otherwise leave vLLM's behaviour alone.

    Called by vLLM in every process. When a seam does not fit, the one thing added is the refusal: asking for EESD
    fails with the seam's name and the versions. Nothing is raised: a plain engine must start whatever is found.
    """
    try:
        misfit = next((f"{status.target} {status.reason}" for status in check_host() if not status.ok), "")
    except Exception as error:
        misfit = f"the seams cannot be checked ({type(error).__name__}: {' '.join(str(error).split())})"
    if misfit:
        refuse(misfit)
        return
    engine_seams.refusal = ""
    for seam in seams_of("every process"):
        seams.install_on_import(seam, otherwise=refuse)


def refuse(cause: str) -> None:
    """Make asking for EESD an error that names `cause`; everything else goes its usual way."""
    from vllm import __version__

    engine_seams.refusal = (
        f"vllm-eesd cannot run with vLLM {__version__} (written for {', '.join(SUPPORTED_VLLM)}): {cause}. "
        "Install a supported vLLM or a newer vllm-eesd; `eesd doctor` shows every seam."
    )
    log = logging.getLogger("vllm.eesd").warning
    log(engine_seams.refusal)
    # The place where EESD is asked for; where not even that exists, the warning must do.
    seams.install_on_import(engine_seams.SEAMS[0], otherwise=lambda reason: log("eesd: %s", reason))


def prepare_worker(expected: str, actual: str) -> None:
    """Install the seams of a worker's model runner, if all of them fit; called where vLLM has imported the worker.

    Args:
        expected: the runner the config was built for, "V1" or "V2".
        actual: the one vLLM takes after looking at everything else it was asked for.
    Raises:
        ValueError: they differ.
        RuntimeError: a seam does not fit the installed vLLM; nothing was installed.
    """
    if expected != actual:
        raise ValueError(
            f"eesd: vLLM runs this engine on Model Runner {actual}, EESD was set up for {expected}: an option that "
            "vLLM's log names is not supported with eesd"
        )
    records = seams_of("worker", f"worker, {actual}")
    if misfits := [status for status in seams.check_all(records) if not status.ok]:
        raise RuntimeError(
            f"eesd: {misfits[0].target} {misfits[0].reason}: vLLM's Model Runner {actual} is not the one this "
            "vllm-eesd was written for; `eesd doctor` shows every seam"
        )
    for seam in records:
        seams.install(seam)
