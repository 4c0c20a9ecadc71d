"""What the commands write: a JSON file, and the next command, ready to paste."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from itertools import groupby
from os.path import basename, commonprefix, dirname, join, splitext
from pathlib import Path
from typing import Any

from vllm_eesd.files import write_whole

#: So many names of one kind stand in a command as they are; of more a pattern is looked for, and from the second number
#: on they are left out without one.
FEW_FILES, MANY_FILES = 8, 32


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


class Pattern(str):
    """A pattern of file names, which the shell expands: `command` leaves it as it is."""


def command(*words: str | os.PathLike) -> str:
    """Return a shell command, quoted where it must be."""
    return " ".join(word if isinstance(word, Pattern) else shlex.quote(str(word)) for word in words)


def as_typed(names: Sequence[str]) -> list[str]:
    """Return the names as they would be typed: `DIR/*.txt` for many files that are all those files of DIR.

    More than `MANY_FILES` that no pattern says become the one word FILES, for the reader to fill in.

    Args:
        names: files, directories and data sets.
    """
    typed: list[str] = []
    for (directory, suffix), group in groupby(map(str, names), key=lambda name: (dirname(name), splitext(name)[1])):
        files = list(group)
        pattern = _pattern(directory, suffix, files) if len(files) > FEW_FILES else None
        typed += [pattern] if pattern else files if len(files) <= MANY_FILES else [Pattern("FILES")]
    return typed


def _pattern(directory: str, suffix: str, files: list[str]) -> Pattern | None:
    """Return the shortest pattern that the shell expands to these files of a directory, None if there is none."""
    bare, where = [basename(name) for name in files], Path(directory or ".")
    there = [name for name in os.listdir(where) if not name.startswith(".")] if where.is_dir() else []
    for prefix in ("", commonprefix(bare)):
        if sorted(name for name in there if name.startswith(prefix) and name.endswith(suffix)) == sorted(bare):
            fixed = shlex.quote(join(directory, prefix)) if directory or prefix else ""
            return Pattern(f"{fixed}*{shlex.quote(suffix) if suffix else ''}")
    return None


def serve_command(model: str, head: str | os.PathLike) -> str:
    """Return the command that serves `model` with the head in directory `head`."""
    if Path(head).resolve() == (Path(model) / "eesd").resolve():
        return command("vllm", "serve", model, "--speculative-config", "eesd")
    speculative = json.dumps({"method": "eesd", "model": str(head)})
    return command("vllm", "serve", model, "--speculative-config", speculative)
