"""Files and directories that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: int = 0o644, make_directory: bool = True) -> Iterator[Path]:
    """Yield where to write a file that then replaces `path` in one step.

    A reader, or a crash at any moment, finds the old content or the new one; after an error in the block the old one.
    The name yielded ends as `path` does.

    Args:
        mode: the new file's permissions.
        make_directory: whether a missing directory is made, not an error.
    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    if make_directory:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new.", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        os.chmod(name, mode)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file in one step, see `replacing`; what is no regular file, like /dev/stdout, is written to as it is.

    Args:
        content: a text is written as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(data)
        return
    with replacing(path, mode) as file:
        file.write_bytes(data)


@contextlib.contextmanager
def replacing_directory(path: str | os.PathLike) -> Iterator[Path]:
    """Yield an empty directory to write files into, which then takes the place of `path`, if that is there.

    After an error in the block, or a crash, the old directory is there or none, never a part of the new one.

    Raises:
        OSError: the directory cannot be written, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True) as made:
        new, old = Path(made) / "new", Path(made) / "old"
        new.mkdir()
        yield new
        for written in new.iterdir():
            written.chmod(0o644)
            with open(written, "rb") as file:
                os.fsync(file.fileno())
        if path.exists():
            os.rename(path, old)
        os.rename(new, path)
