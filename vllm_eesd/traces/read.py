"""Reading a trace of either format."""

from __future__ import annotations

import gzip
import os
import reprlib
import zlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_eesd.traces import dense, rounds
from vllm_eesd.traces.dense import DenseTrace
from vllm_eesd.traces.rounds import RoundRecord

#: A trace of ten thousand requests has about a tenth of it; a compressed one can claim any size.
MAX_UNPACKED_BYTES = 1 << 28
#: Of what is not compressed: more than a round trace grows to.
MAX_BYTES = 2 * rounds.MAX_FILE_BYTES


class _Header(BaseModel):
    model_config = ConfigDict(strict=True)

    format: Literal["eesd-trace", "eesd-rounds"]
    version: int


def read(path: str | os.PathLike) -> DenseTrace | list[RoundRecord]:
    """Return what a trace's file holds, by the format that its first line names.

    Raises:
        ValueError: not a trace of this version, damaged, or with values out of range; one line that names the file's.
        OSError: no such file.
    """
    try:
        lines = _unpacked(Path(path)).split(b"\n")
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: not a trace ({' '.join(str(error).split())})") from None
    found: list[Any] = []
    try:
        header = _Header.model_validate_json(lines[0])
        form = dense if header.format == dense.FORMAT else rounds
        if header.version != form.VERSION:
            raise ValueError(f"version={header.version}: this reads version {form.VERSION}")
        for content in form.parse(lines):
            found.append(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # costs may hold anything
        raise ValueError(f"{path}: not a trace: line {len(found) + 1} ({_reason(error)})") from None
    if form is rounds:
        return list(filter(None, found))
    found[0].requests.extend(found[1:])
    return found[0]


def read_dense(path: str | os.PathLike) -> DenseTrace:
    """Return the dense trace in a file.

    Raises:
        ValueError: as `read`, or a server's rounds.
        OSError: no such file.
    """
    if isinstance(found := read(path), DenseTrace):
        return found
    raise ValueError(f"{path}: not a dense trace but a server's rounds; `eesd trace-record` makes one")


def _unpacked(path: Path) -> bytes:
    """The file's content, decompressed; no more of it is ever held than is allowed."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        limit = MAX_UNPACKED_BYTES if compressed else MAX_BYTES
        data = (gzip.GzipFile(fileobj=file) if compressed else file).read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes of text")
    return data


def _reason(error: Exception) -> str:
    """Pydantic's first complaint, or the error's own words, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        said = f"{field}={reprlib.repr(first['input'])}: {first['msg']}" if field else first["msg"]
    else:
        said = f"{type(error).__name__}: {error}"
    return f"{' '.join(said.split()):.300}"
