"""A JSONL file that is written batch by batch, so that an interrupted run goes on after the last whole batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_eesd.distill.report import write_json


def made_otherwise(path: Path, described: Path) -> ValueError:
    """Return what refuses to go on with a file of `work` that another target or other settings have made.

    Args:
        described: the file beside it that says how it was made.
    """
    return ValueError(f"work: {path} was made with another target or other settings; remove it and {described.name}")


class Journal:
    """Lines on disk, and beside them how they were made and how far they are.

    Args:
        path: a `.jsonl` file; the same name with `.json` describes it.
        settings: what the lines depend on; a file that was made with others is refused.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.described = path, path.with_suffix(".json")
        self._settings = json.loads(json.dumps(settings))

    @property
    def generator(self) -> str | None:
        """What made the lines that are there; None if there are none."""
        return self._read().get("generator")

    @property
    def batches(self) -> int:
        """How many batches are whole."""
        return self._read().get("batches", 0)

    @property
    def has_ended(self) -> bool:
        """Whether `end` said that there is no more to come."""
        return self._read().get("ended", False)

    def check(self, generator: str) -> None:
        """Refuse to go on with lines that were made otherwise.

        Raises:
            ValueError: the file holds such.
        """
        found = self._read()
        if found and (found["settings"] != self._settings or found["generator"] != generator):
            raise made_otherwise(self.path, self.described)

    def append(self, rows: list[dict[str, Any]], generator: str) -> None:
        """Write a batch, which may be empty."""
        found = self._read()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(found.get("bytes", 0))  # of a batch that was interrupted
            file.seek(0, os.SEEK_END)
            for row in rows:
                file.write(json.dumps(row).encode() + b"\n")
            size = file.tell()
        done = {"settings": self._settings, "generator": generator, "batches": found.get("batches", 0) + 1}
        write_json(self.described, done | {"bytes": size})

    def end(self) -> None:
        """Say that no more batches come."""
        write_json(self.described, self._read() | {"ended": True})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of whole batches."""
        left = self._read().get("bytes", 0)
        if not left:
            return
        with self.path.open("rb") as file:
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield json.loads(line)

    def _read(self) -> dict[str, Any]:
        return json.loads(self.described.read_text()) if self.described.exists() else {}
