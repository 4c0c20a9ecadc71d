"""Token ids on disk, read a window at a time: a memory map's pages would count as this process's memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

# Token ids looked at or kept at one time: 4 MiB of uint32.
CHUNK_TOKENS = 1 << 20


class TokenFile:
    """Part of a file of token ids; behaves as a one-dimensional array that is read when it is used.

    Args:
        file: open for reading; kept open.
        dtype: of the ids.
        first, length: the part, in tokens; None is up to the file's end.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype, first: int = 0, length: int | None = None) -> None:
        self._file, self._dtype, self._first = file, np.dtype(dtype), first
        size = os.fstat(file.fileno()).st_size // self._dtype.itemsize - first
        self._length = size if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> TokenFile:
        """Return a part of this part; nothing is read."""
        first, last, step = part.indices(self._length)
        assert step == 1
        return TokenFile(self._file, self._dtype, self._first + first, max(0, last - first))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        size = self._dtype.itemsize
        raw = os.pread(self._file.fileno(), self._length * size, self._first * size)
        if len(raw) != self._length * size:
            raise ValueError(f"data: {self._file.name}: became shorter while it was read")
        tokens = np.frombuffer(raw, dtype=self._dtype)
        return tokens if dtype is None else tokens.astype(dtype)

    def largest(self) -> int:
        """Return the largest id, -1 if empty; the file is read in pieces."""
        pieces = range(0, self._length, CHUNK_TOKENS)
        return max((int(np.asarray(self[first : first + CHUNK_TOKENS]).max()) for first in pieces), default=-1)


def spool(pieces: Iterable[list[int]], dtype: np.dtype) -> TokenFile:
    """Return all these ids, from a temporary file that vanishes with the result; one piece is in memory at a time.

    Raises:
        ValueError: the temporary directory has no room.
    """
    file = tempfile.TemporaryFile(prefix="eesd-tokens-")
    try:
        for piece in pieces:
            file.write(np.array(piece, dtype=dtype).tobytes())
        file.flush()
    except OSError as error:
        raise ValueError(
            f"data: {tempfile.gettempdir()}: no room for the token ids ({error.strerror}); set TMPDIR"
        ) from None
    return TokenFile(file, dtype)
