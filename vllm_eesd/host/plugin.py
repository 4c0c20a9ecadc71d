"""The entry point of group `vllm.general_plugins`: checks every seam, then installs them, or says why it does not.

vLLM calls `register` in every process, EESD asked for or not. Code is compared in vLLM's files and wrapped when vLLM
imports it: no module of vLLM is imported for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_eesd.host import engine_seams, seams, worker_seams
from vllm_eesd.host.environment import read_platform, read_runner
from vllm_eesd.host.seams import Seam, SeamStatus
from vllm_eesd.host.v1 import seams as v1_seams
from vllm_eesd.host.v2 import seams as v2_seams

#: Releases the adapters were written and tested against.
SUPPORTED_VLLM = ("0.32", "0.33")
#: Where seams are installed, in the words of `eesd doctor` and docs/seams.md.
PLACES: dict[str, Sequence[Seam]] = {
    "every process": engine_seams.SEAMS,
    "worker": worker_seams.SEAMS,
    "worker, V1": v1_seams.SEAMS,
    "worker, V2": v2_seams.SEAMS,
}


def check_host() -> list[SeamStatus]:
    """Return the state of every seam that an engine would need here, against the installed vLLM."""
    platform, (runner, _) = read_platform(), read_runner()
    here = [seam for seam in engine_seams.SEAMS if seam.is_for(platform)]
    return seams.check_all([*here, *worker_seams.seams_of(runner, platform)])


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
    for seam in engine_seams.SEAMS:
        if seam.is_for(read_platform()):
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
    # Where not even the place to say so exists, the warning must do.
    seams.install_on_import(engine_seams.SIGNPOST, otherwise=lambda reason: log("eesd: %s", reason))
