"""Token ids on disk, read a window at a time: a memory map's pages would count as this process's memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

# Token ids looked at or kept at one time: 4 MiB of uint32.
CHUNK_TOKENS = 1 << 20


class TokenFile:
    """Part of a file of token ids; behaves as a one-dimensional array that is read when it is used.

    Args:
        file: open for reading; kept open.
        dtype: of the ids.
        name: what an error calls it.
        first, length: the part, in tokens; None is up to the file's end.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype, name: str, first: int = 0, length: int | None = None) -> None:
        self.name = name
        self._file, self._dtype, self._first = file, np.dtype(dtype), first
        size = os.fstat(file.fileno()).st_size // self._dtype.itemsize - first
        self._length = size if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> TokenFile:
        """Return a part of this part; nothing is read."""
        first, last, step = part.indices(self._length)
        assert step == 1
        return TokenFile(self._file, self._dtype, self.name, self._first + first, max(0, last - first))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        size = self._dtype.itemsize
        raw = os.pread(self._file.fileno(), self._length * size, self._first * size)
        if len(raw) != self._length * size:
            raise ValueError(f"data: {self.name}: became shorter while it was read")
        tokens = np.frombuffer(raw, dtype=self._dtype)
        return tokens if dtype is None else tokens.astype(dtype)

    def largest(self) -> int:
        """Return the largest id, -1 if empty; the file is read in pieces."""
        pieces = range(0, self._length, CHUNK_TOKENS)
        return max((int(np.asarray(self[first : first + CHUNK_TOKENS]).max()) for first in pieces), default=-1)


class Spool:
    """Texts' token ids, one after the other in one temporary file, which vanishes with the last part of it.

    Args:
        dtype: of the ids.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype, self._ends = np.dtype(dtype), [0]
        with _room_needed():
            self._file = tempfile.TemporaryFile(prefix="eesd-tokens-")

    def add(self, pieces: Iterable[list[int]], name: str) -> TokenFile:
        """Return a text's ids, written after the others; one piece is in memory at a time.

        Raises:
            ValueError: the temporary directory has no room.
        """
        first = last = self._ends[-1]
        for piece in pieces:
            with _room_needed():
                self._file.write(np.array(piece, dtype=self._dtype).tobytes())
            last += len(piece)
        with _room_needed():
            self._file.flush()
        self._ends.append(last)
        return TokenFile(self._file, self._dtype, name, first, last - first)

    def packed(self, at_least: int) -> list[TokenFile]:
        """Return all ids in the order they came: texts are joined with those after them up to `at_least` tokens.

        What is left at the end belongs to the last of them, so only a single one can be shorter.
        """
        bounds = [0]
        for end in self._ends:
            if end - bounds[-1] >= at_least:
                bounds.append(end)
        if len(bounds) == 1:
            bounds.append(self._ends[-1])
        bounds[-1] = self._ends[-1]
        return [
            TokenFile(self._file, self._dtype, "all texts together", first, last - first)
            for first, last in itertools.pairwise(bounds)
        ]


@contextlib.contextmanager
def _room_needed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"data: {tempfile.gettempdir()}: no room for the token ids ({error.strerror}); set TMPDIR"
        ) from None
