"""What engines print while they start: to a log, and from there the one line that says why one did not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The last line of a traceback, after a log prefix or at the start of a line.
ERROR_LINE = re.compile(r"(?:^|\] )([\w.]*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)


def debugging() -> bool:
    return os.environ.get("EESD_DEBUG") == "1"


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the log: a child started meanwhile keeps them for good."""
    if debugging():
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    with open(log, "ab") as file:
        for fd, _ in saved:
            os.dup2(file.fileno(), fd)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)


def complaint(method: str, error: Exception, log: Path) -> str:
    """Return why an engine did not start, in one line; the log stays where there is more to read in it."""
    if isinstance(error, ValueError):
        log.unlink()
        return f"{method}: {first_line(error)}"
    # The innermost process fails first; what the others say about it comes after.
    said = ERROR_LINE.findall(log.read_text(errors="replace"))
    return f"{method}: vLLM did not start: {said[0].strip() if said else first_line(error)} (log: {log})"


def first_line(error: Exception) -> str:
    """Return one line; pydantic's errors carry theirs in `errors()`."""
    errors = getattr(error, "errors", None)
    text = errors()[0]["msg"].removeprefix("Value error, ") if callable(errors) else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
