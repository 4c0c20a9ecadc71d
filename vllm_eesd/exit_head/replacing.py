"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Yield where to write a file that then replaces `path` in one step; its directory is made if missing.

    After an error in the block `path` is as it was. The name yielded ends as `path` does.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".new.{path.name}")
    try:
        yield written
        with written.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)
