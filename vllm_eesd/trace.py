"""Dense traces: what drafting would have been at every emitted position, so that any policy can be replayed exactly.

A file holds JSON lines, compressed if its name ends in .gz. The first is the header:

    {"format": "eesd-trace", "version": 1, "model": ..., "workload": ..., "num_speculative_tokens": K,
     "prior": [alpha, beta], "costs": {...}}

with `prior` the exit head's and `costs` as `vllm_eesd.policy.costs.CostModel.state` gives them; both may be left out.
Every further line is a request:

    {"matches": [T numbers], "confidences": [T * K numbers]}

At emitted position t a greedy draft of K tokens was made. `matches[t]` of them, from the left, are what the target
emitted next; `confidences[t * K + j]` is draft token j + 1's probability in thousandths.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.costs import CostModel

FORMAT, VERSION = "eesd-trace", 1
#: Three digits tell every calibration bin apart and keep a trace small.
SCALE = 1000
#: A trace of ten thousand requests has about a tenth of it; a compressed one can claim any size.
MAX_TEXT_BYTES = 1 << 28


@dataclass(frozen=True)
class RequestTrace:
    """One request's emitted positions.

    Attributes:
        matches: [T] int64, how many leading tokens of the draft made there the target emitted, 0..K.
        confidences: [T, K] float32, the draft tokens' probabilities.
    """

    matches: np.ndarray
    confidences: np.ndarray


@dataclass(frozen=True)
class DenseTrace:
    """A recorded workload.

    Attributes:
        model: the target's name.
        workload: what was generated.
        num_speculative_tokens: K.
        costs: `CostModel.state()` of the recording, or empty.
        requests: in the order they were served.
        prior: alpha and beta that a request's posterior starts from.
    """

    model: str
    workload: str
    num_speculative_tokens: int
    costs: dict[str, Any]
    requests: list[RequestTrace]
    prior: tuple[float, float] = (1.0, 1.0)


class DenseRecorder:
    """Collects drafts of K tokens from every emitted position, while the engine verifies none of them.

    Args:
        num_speculative_tokens: K; shorter drafts (a request near its end) are left out.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._emitted: dict[str, list[int]] = {}
        self._drafts: dict[str, list[list[int]]] = {}
        self._confidences: dict[str, list[list[float]]] = {}

    def add(
        self, request_ids: list[str], emitted: list[list[int]], drafts: list[list[int]], confidences: np.ndarray
    ) -> None:
        """Take in one step.

        Args:
            request_ids: of the batch's rows.
            emitted: the token each row emitted, or none (a prompt chunk).
            drafts: what each row would have drafted behind it.
            confidences: [num_rows, K or more] float32.
        """
        depth = self.num_speculative_tokens
        for row, (request_id, tokens, draft) in enumerate(zip(request_ids, emitted, drafts, strict=True)):
            self._emitted.setdefault(request_id, []).extend(tokens)
            if len(draft) == depth:
                self._drafts.setdefault(request_id, []).append(draft)
                self._confidences.setdefault(request_id, []).append(confidences[row, :depth].tolist())

    def requests(self) -> list[RequestTrace]:
        """Return the requests in the order they began, without drafts whose outcome is not known."""
        traces = []
        for request_id, drafts in self._drafts.items():
            emitted = np.array(self._emitted[request_id])
            known = min(len(drafts), len(emitted) - self.num_speculative_tokens)
            if known <= 0:
                continue
            followed = np.lib.stride_tricks.sliding_window_view(emitted[1:], self.num_speculative_tokens)[:known]
            matches = np.cumprod(np.array(drafts[:known]) == followed, axis=1).sum(axis=1)
            confidences = np.array(self._confidences[request_id][:known], dtype=np.float32)
            traces.append(RequestTrace(matches.astype(np.int64), confidences))
        return traces


def write_trace(path: str | os.PathLike, trace: DenseTrace) -> None:
    """Write a trace; compressed if the name ends in .gz, the same bytes for the same trace."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": trace.model,
        "workload": trace.workload,
        "num_speculative_tokens": trace.num_speculative_tokens,
        "prior": list(trace.prior),
        "costs": trace.costs,
    }
    lines = [header]
    for request in trace.requests:
        confidences = (request.confidences * SCALE).round().astype(int)
        lines.append({"matches": request.matches.tolist(), "confidences": confidences.ravel().tolist()})
    data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def read_trace(path: str | os.PathLike) -> DenseTrace:
    """Return the trace in a file.

    Raises:
        ValueError: not a trace of this version, damaged, or with values out of range; the line is named.
        OSError: no such file.
    """
    try:
        lines = _text(Path(path)).splitlines()
    except FileNotFoundError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: not a trace ({' '.join(str(error).split())})") from None
    number = 1
    try:
        trace = _header(json.loads(lines[0]) if lines else {})
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007  named in the error
            trace.requests.append(_request(json.loads(line), trace.num_speculative_tokens))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a trace: line {number} ({type(error).__name__}: {reason:.300})") from None
    return trace


def _text(path: Path) -> str:
    """The file's text, decompressed; no more of it is ever held than `MAX_TEXT_BYTES`."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        data = (gzip.GzipFile(fileobj=file) if compressed else file).read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"more than {MAX_TEXT_BYTES} bytes of text")
    return data.decode()


def _header(header: dict[str, Any]) -> DenseTrace:
    """A trace without requests yet."""
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"format and version must be {FORMAT!r} and {VERSION}")
    num_tokens = header["num_speculative_tokens"]
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"num_speculative_tokens={num_tokens!r:.80}, must be 1 to {MAX_SPECULATIVE_TOKENS}")
    costs, prior = header.get("costs") or {}, tuple(header.get("prior") or (1.0, 1.0))
    if len(prior) != 2 or not all(isinstance(count, (int, float)) and 0 < count < float("inf") for count in prior):
        raise ValueError(f"prior={list(prior)!r:.80}, must be two numbers above 0")
    if costs:
        CostModel().restore(costs)
    return DenseTrace(header["model"], header["workload"], num_tokens, costs, [], prior)


def _request(line: dict[str, Any], num_tokens: int) -> RequestTrace:
    matches = np.array(line["matches"], dtype=np.int64)
    confidences = np.array(line["confidences"], dtype=np.float32).reshape(len(matches), num_tokens) / SCALE
    if len(matches) and not (0 <= matches.min() and matches.max() <= num_tokens):
        raise ValueError(f"matches must be 0 to {num_tokens}")
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError(f"confidences must be 0 to {SCALE}")
    return RequestTrace(matches, confidences)
