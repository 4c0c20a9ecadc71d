"""Writing a file in one step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old content or the new one, whole.

    Its directory is made if missing. What is no regular file, like /dev/stdout, is written to as it is.

    Args:
        content: a text is written as UTF-8.
        mode: the new file's permissions.
    Raises:
        OSError: the directory cannot be written, or the disk is full; the old file is left.
    """
    path = Path(os.path.realpath(path))
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
