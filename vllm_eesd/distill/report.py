"""What the commands write: a JSON file, and the next command, ready to paste."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from vllm_eesd.files import write_whole


def write_json(path: str | os.PathLike, outcome: dict[str, Any]) -> None:
    """Write `outcome` to `path` in one step; its directory is made if missing."""
    write_whole(path, json.dumps(outcome, indent=1) + "\n")


def check_writable(directory: str | os.PathLike, num_bytes: int, field: str) -> None:
    """Refuse, before any work, a directory that could not take the result; no file remains.

    Args:
        directory: need not exist; its nearest existing parent is tried.
        num_bytes: about how much will be written.
        field: the argument's name.
    Raises:
        ValueError: the directory cannot be written to, or its disk has too little room.
    """
    existing = Path(directory).resolve()
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            # Reserves the blocks: what statvfs calls free may be a quota's, or reserved for another user.
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
    except OSError as error:
        size = f"{num_bytes / 1e6:.1f} MB " if num_bytes >= 1e5 else ""
        raise ValueError(
            f"{field}: {directory}: cannot write {size}there ({error.strerror}); name another place"
        ) from None


def command(*words: str | os.PathLike) -> str:
    """Return a shell command, quoted where it must be."""
    return shlex.join(str(word) for word in words)


def serve_command(model: str, head: str | os.PathLike) -> str:
    """Return the command that serves `model` with the head in directory `head`."""
    if Path(head).resolve() == (Path(model) / "eesd").resolve():
        return command("vllm", "serve", model, "--speculative-config", "eesd")
    speculative = json.dumps({"method": "eesd", "model": str(head)})
    return command("vllm", "serve", model, "--speculative-config", speculative)
