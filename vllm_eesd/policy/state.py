"""What outlives a restart: learned priors and the calibration, in one JSON file."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from vllm_eesd.files import replacing
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.posterior import BetaPosterior

FORMAT, VERSION = "eesd-policy-state", 1
MAX_FILE_BYTES = 1 << 20

logger = logging.getLogger("vllm.eesd")


def save_state(path: str | os.PathLike, posterior: BetaPosterior, calibration: Calibration) -> None:
    """Write the state in one step: a reader sees the old file or the new one, whole.

    Raises:
        OSError: the directory cannot be written.
    """
    learned = {"priors": posterior.state(), "calibration": calibration.state()}
    state = {"format": FORMAT, "version": VERSION, **learned}
    with replacing(path, mode=0o600, make_directory=False) as file:
        file.write_text(json.dumps(state, separators=(",", ":")), encoding="utf-8")


def load_state(path: str | os.PathLike, posterior: BetaPosterior, calibration: Calibration) -> bool:
    """Take over the state in a file; return whether there was one.

    A file that is damaged or of another version is ignored with a warning: what it holds is learned again.
    """
    path = Path(path)
    if not os.path.exists(path):  # unlike Path.exists, also for a name no file can have
        return False
    try:
        if not path.is_file():
            raise ValueError("not a regular file")  # a pipe or a device would be read without end
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, a state has at most {MAX_FILE_BYTES}")
        state = json.loads(path.read_text(encoding="utf-8"))
        if (state["format"], state["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format and version must be {FORMAT!r} and {VERSION}")
        # Half a damaged file changes nothing: what is refused is refused whole, the calibration by a scratch copy.
        Calibration().restore(state["calibration"])
        posterior.restore(state["priors"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        logger.warning("eesd: state_file %s is ignored: %s", path, " ".join(str(error).split()))
        return False
    calibration.restore(state["calibration"])
    return True
