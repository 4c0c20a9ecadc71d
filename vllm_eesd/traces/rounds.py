"""Round traces: what happened in every round, written while the engine serves (`trace_file`).

A file holds JSON lines: one header per start of an engine,

    {"format": "eesd-rounds", "version": 1, "num_speculative_tokens": K, ...}

and one line per request and round (`RoundRecord`), in the order the target judged them. Lines are appended whole;
half a line, which a process that was killed may leave at the end or before the next header, is not read.

The posterior and the costs are those the round was drafted with, the times were measured (on Model Runner V2 by the
device; "at_s" is the host's clock, which runs ahead of it). A prompt's chunks and a request's first token are no
rounds. On V2 a last round may pass its request's end, and one after a fault is left out. Whose `request` it is
and what was generated can be read from the file: it is as confidential as the requests are.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter
from scipy.special import betaincinv
from typing_extensions import TypedDict

from vllm_eesd.policy import NGRAM, DraftLengthPolicy

FORMAT, VERSION = "eesd-rounds", 1
#: What a header's line begins with.
HEADER = b'{"format"'
#: A round takes about 400 bytes: a million rounds fit. Then the file is full and nothing more is written.
MAX_FILE_BYTES = 512 << 20
#: Records wait in memory for so long, and no longer than that is lost if a process is killed.
FLUSH_EVERY_S = 0.5
#: More than can pile up in that time, unless the disk hangs: then rounds are dropped, not memory filled.
MAX_WAITING = 100_000
#: The probabilities between which a posterior lies: its middle 90%.
INTERVAL = (0.05, 0.95)
#: Instead of a draft token's id where that was not recorded; no engine writes it.
UNKNOWN = -1

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

logger = logging.getLogger("vllm.eesd")


class RoundRecord(TypedDict):
    """One line of the file.

    Attributes:
        request: the engine's id.
        at_s: seconds since the header, when the round's drafting began.
        draft: token ids the target judged.
        confidences: one per draft token, as the policy was told them, 3 digits, None if unknown.
        copied: whether the draft is an n-gram draft (then it has no confidences).
        accepted: how many of them, from the left.
        emitted: token ids: the accepted ones and the target's own.
        batch: requests that decoded in the step.
        draft_steps_ms, draft_rest_ms: of the batch; drafting within and outside its steps.
        verify_ms: the step outside drafting.
        plain_ms, draft_step_ms: what the cost model takes a plain step and a draft step of that batch to cost.
        posterior_mean, posterior_interval: of the request's acceptance, and its middle 90%.
    """

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)  # type: ignore[misc]

    request: str
    at_s: float
    draft: list[TokenId]
    confidences: list[float | None]
    copied: bool
    accepted: NonNegativeInt
    emitted: list[TokenId]
    batch: int
    draft_steps_ms: list[float]
    draft_rest_ms: float
    verify_ms: float
    plain_ms: float
    draft_step_ms: float
    posterior_mean: float
    posterior_interval: tuple[float, float]


_ROUND = TypeAdapter(RoundRecord)


def parse(lines: list[bytes]) -> Iterator[RoundRecord | None]:
    """Yield for each of a file's lines its round, None for a header, nothing or half a line.

    Args:
        lines: with what stands after the last line end.
    Raises:
        ValueError: the next line is damaged.
    """
    for line, following in pairwise(lines):
        torn = following.startswith(HEADER) and not line.endswith(b"}")
        if torn or line.startswith(HEADER):
            yield None
            continue
        record = _ROUND.validate_json(line)
        if not record["accepted"] == len(record["emitted"]) - 1 <= len(record["draft"]):
            raise ValueError("accepted must be the emitted tokens but one, and no more than were drafted")
        yield record


class Judged(NamedTuple):
    """One batch row whose draft the target just judged; `emitted` are the accepted tokens and the target's own."""

    request_id: str
    draft: list[int]
    emitted: list[int]


class Drafts(NamedTuple):
    """How the drafts of a step's rows were made."""

    slots: np.ndarray  # [num_rows] int64, the policy's slot of each
    confidences: np.ndarray  # [num_rows, any] float32, of the draft tokens; NaN if unknown
    source: np.ndarray  # [num_rows] int8, see `vllm_eesd.policy.source`


class Verdict(NamedTuple):
    """What became of a step's rounds, where that is known only after the step; times as in `RoundRecord`.

    Attributes:
        confidences: as in `Drafts`, where they too are known only then.
    """

    rows: np.ndarray  # [len(judged)] int64, which of the step's slots decoded
    judged: list[Judged]
    draft_steps_ms: list[float]
    draft_rest_ms: float
    verify_ms: float
    confidences: np.ndarray | None = None


class _Step(NamedTuple):
    """One step's rounds until they are written; `shared` is the same in all of their lines."""

    verdict: Callable[[], Verdict | None]
    drafts: Drafts
    posterior: np.ndarray
    shared: dict[str, Any]


class RoundTrace:
    """Appends rounds to a file; formatting and writing happen in a thread of its own, off the engine's path.

    Args:
        header: further fields of the header line, as JSON takes them.
        max_bytes: the file's size at which writing ends.
    """

    def __init__(self, path: str, header: dict[str, Any], max_bytes: int = MAX_FILE_BYTES) -> None:
        self._file = _open(path)
        self._path, self._max_bytes = path, max_bytes
        self._began_s = time.perf_counter()
        self._waiting: deque[_Step] = deque()
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._write_lines([{"format": FORMAT, "version": VERSION, **header}])
        self._writer = threading.Thread(target=self._write_on, name="eesd-round-trace", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def add(
        self,
        judged: list[Judged],
        drafts: Drafts,
        policy: DraftLengthPolicy,
        drafted_s: float,
        draft_steps_ms: list[float],
        draft_rest_ms: float,
    ) -> None:
        """Take in one step's rounds, before the policy learns of their outcome.

        Args:
            judged, drafts: of the rows that decoded.
            policy: still holds the beliefs the drafts were made with.
            drafted_s: when drafting ended and the step began, `time.perf_counter()`.
            draft_steps_ms, draft_rest_ms: see `RoundRecord`.
        """
        began_s = drafted_s - (sum(draft_steps_ms) + draft_rest_ms) / 1e3
        verify_ms = (time.perf_counter() - drafted_s) * 1e3
        verdict = Verdict(np.arange(len(judged)), judged, draft_steps_ms, draft_rest_ms, verify_ms)
        self.add_pending(drafts, policy, began_s, len(judged), lambda: verdict)

    def add_pending(
        self,
        drafts: Drafts,
        policy: DraftLengthPolicy,
        began_s: float,
        num_reqs: int,
        verdict: Callable[[], Verdict | None],
    ) -> None:
        """Take in one step's rounds whose outcome is still under way, before the policy learns of anything.

        Args:
            drafts: of every row of the step.
            policy: still holds the beliefs the drafts were made with.
            began_s: when the rounds' drafting began, `time.perf_counter()`.
            num_reqs: requests that decoded in the step.
            verdict: called from another thread; None as long as it is not known. Must not wait.
        """
        shared = {
            "at_s": began_s - self._began_s,
            "batch": num_reqs,
            "plain_ms": float(policy.costs.verify_curve(num_reqs, 0)[0]),
            "draft_step_ms": float(policy.costs.draft_curve(num_reqs)[num_reqs]),
        }
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(_Step(verdict, drafts, policy.posterior.parameters(drafts.slots), shared))

    def close(self) -> None:
        """Write what waits and end; a second call changes nothing."""
        self._closing.set()
        self._writer.join()
        self._file.close()
        atexit.unregister(self.close)

    def _write_on(self) -> None:
        while not self._closing.wait(FLUSH_EVERY_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._flushing:
            known = []
            # In order: what follows a step that is under way waits with it.
            while self._waiting and (verdict := self._waiting[0].verdict()) is not None:
                known.append((self._waiting.popleft(), verdict))
            if self._max_bytes and known:
                self._write_lines(line for step, verdict in known for line in _lines(step, verdict))

    def _write_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        try:
            data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
            if self._file.write(data) < len(data):
                raise OSError("the disk is full")
            if os.fstat(self._file.fileno()).st_size >= self._max_bytes:
                logger.warning("eesd: trace_file %s is full, no more rounds are written", self._path)
                self._max_bytes = 0
        except OSError as error:
            logger.warning("eesd: trace_file %s: writing ends: %s", self._path, error)
            self._max_bytes = 0


def _open(path: str) -> FileIO:
    """Open to append at the begin of a line; a new file is its owner's alone, for it holds what users generated."""
    # Unbuffered: what a full disk refused must not be tried again when the file is closed.
    file = open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))
    if os.path.isfile(path) and os.path.getsize(path):
        with suppress(OSError), open(path, "rb") as written:  # of a full disk the header's writing says so
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write(b"\n")
    return file


def _lines(step: _Step, verdict: Verdict) -> Iterator[RoundRecord]:
    """The file's lines for one step, floats cut to the digits that mean something."""
    times = {name: getattr(verdict, name) for name in ("draft_steps_ms", "draft_rest_ms", "verify_ms")}
    shared = {key: _rounded(value) for key, value in (step.shared | times).items()}
    alpha, beta = step.posterior[:, verdict.rows]
    means, intervals = alpha / (alpha + beta), betaincinv(alpha[:, None], beta[:, None], INTERVAL)
    known = step.drafts.confidences if verdict.confidences is None else verdict.confidences
    for number, (row, judged) in enumerate(zip(verdict.rows, verdict.judged, strict=True)):
        confidences = known[row, : len(judged.draft)].tolist()
        yield {
            "request": judged.request_id,
            "draft": judged.draft,
            "confidences": [None if value != value else round(value, 3) for value in confidences],
            "copied": bool(step.drafts.source[row] == NGRAM),
            "accepted": len(judged.emitted) - 1,
            "emitted": judged.emitted,
            **shared,
            "posterior_mean": _rounded(float(means[number])),
            "posterior_interval": _rounded(intervals[number].tolist()),
        }


def _rounded(value: Any) -> Any:
    """Tenths of microseconds, for ms; a ten-thousandth for a probability."""
    return [_rounded(item) for item in value] if isinstance(value, list) else round(value, 4)
