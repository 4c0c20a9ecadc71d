"""Dense traces: what drafting would have been at every emitted position, so that any policy can be replayed exactly.

A file holds JSON lines, compressed if its name ends in .gz. The first is the header:

    {"format": "eesd-trace", "version": 2, "model": ..., "workload": ..., "num_speculative_tokens": K,
     "prior": [alpha, beta], "costs": {...}}

with `prior` the exit head's and `costs` as `vllm_eesd.policy.costs.CostModel.state` gives them; both may be left out.
Every further line is a request:

    {"matches": [T numbers], "confidences": [T * K numbers], "prompt": [token ids], "emitted": [T or more token ids]}

At emitted position t a greedy draft of K tokens was made. `matches[t]` of them, from the left, are what the target
emitted next; `confidences[t * K + j]` is draft token j + 1's probability in thousandths. `emitted[t]` is the token
that draft follows. `prompt` and `emitted` may be left out together, and are not in version 1: such a request
is replayed without n-gram continuations, which are made of the text.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.costs import CostModel

FORMAT, VERSION = "eesd-trace", 2
#: Without texts.
TEXTLESS_VERSION = 1
#: Three digits tell every calibration bin apart and keep a trace small.
SCALE = 1000
#: A trace of ten thousand requests has about a tenth of it; a compressed one can claim any size.
MAX_TEXT_BYTES = 1 << 28
#: Of one request: no model reads more, and a replay holds so many for each of its slots. Ids are int32.
MAX_TEXT_TOKENS, MAX_TOKEN_ID = 1 << 20, (1 << 31) - 1


@dataclass(frozen=True)
class RequestTrace:
    """One request's emitted positions.

    Attributes:
        matches: [T] int64, how many leading tokens of the draft made there the target emitted, 0..K.
        confidences: [T, K] float32, the draft tokens' probabilities.
        prompt: [any] int32, its token ids; None where the text was not recorded.
        emitted: [T or more] int32, from the token that position 0 follows; None with `prompt`.
    """

    matches: np.ndarray
    confidences: np.ndarray
    prompt: np.ndarray | None = None
    emitted: np.ndarray | None = None

    def first(self, count: int) -> RequestTrace:
        """Return the request with its first `count` positions only; its text stays."""
        return replace(self, matches=self.matches[:count], confidences=self.confidences[:count])

    def num_tokens(self, position: int) -> int:
        """Return the length of the text at a position, its own token included; 0 where it was not recorded."""
        return 0 if self.prompt is None else len(self.prompt) + int(position) + 1

    def text(self) -> np.ndarray:
        """Return prompt and output, [any] int32; nothing where it was not recorded."""
        if self.prompt is None or self.emitted is None:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate([self.prompt, self.emitted]).astype(np.int32)


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
        self._prompts: dict[str, list[int]] = {}
        self._emitted: dict[str, list[int]] = {}
        self._drafts: dict[str, list[list[int]]] = {}
        self._confidences: dict[str, list[list[float]]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has begun."""
        return request_id in self._prompts

    def begin(self, request_id: str, prompt: list[int]) -> None:
        """Take in a new request's prompt, in token ids."""
        self._prompts[request_id] = prompt

    def add(
        self, request_ids: list[str], emitted: list[list[int]], drafts: list[list[int]], confidences: np.ndarray
    ) -> None:
        """Take in one step.

        Args:
            request_ids: of the batch's rows, all begun.
            emitted: the token each row emitted, or none (a prompt chunk).
            drafts: what each row would have drafted after it.
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
            prompt, text = (np.array(ids, dtype=np.int32) for ids in (self._prompts[request_id], emitted))
            traces.append(RequestTrace(matches.astype(np.int64), confidences, prompt, text))
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
        line = {"matches": request.matches.tolist(), "confidences": confidences.ravel().tolist()}
        if request.prompt is not None and request.emitted is not None:
            line |= {"prompt": request.prompt.tolist(), "emitted": request.emitted.tolist()}
        lines.append(line)
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
        header = json.loads(lines[0]) if lines else {}
        trace, has_texts = _header(header), header["version"] != TEXTLESS_VERSION
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007  named in the error
            trace.requests.append(_request(json.loads(line), trace.num_speculative_tokens, has_texts))
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
    version = header.get("version")
    if header.get("format") != FORMAT or isinstance(version, bool) or version not in (TEXTLESS_VERSION, VERSION):
        raise ValueError(f"format and version must be {FORMAT!r} and {TEXTLESS_VERSION} or {VERSION}")
    num_tokens = header["num_speculative_tokens"]
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"num_speculative_tokens={num_tokens!r:.80}, must be 1 to {MAX_SPECULATIVE_TOKENS}")
    costs, prior = header.get("costs") or {}, tuple(header.get("prior") or (1.0, 1.0))
    if len(prior) != 2 or not all(isinstance(count, (int, float)) and 0 < count < float("inf") for count in prior):
        raise ValueError(f"prior={list(prior)!r:.80}, must be two numbers above 0")
    if costs:
        CostModel().restore(costs)
    return DenseTrace(header["model"], header["workload"], num_tokens, costs, [], prior)


def _request(line: dict[str, Any], num_tokens: int, has_texts: bool) -> RequestTrace:
    matches = np.array(line["matches"], dtype=np.int64)
    confidences = np.array(line["confidences"], dtype=np.float32).reshape(len(matches), num_tokens) / SCALE
    if len(matches) and not (0 <= matches.min() and matches.max() <= num_tokens):
        raise ValueError(f"matches must be 0 to {num_tokens}")
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError(f"confidences must be 0 to {SCALE}")
    if not has_texts or ("prompt" not in line and "emitted" not in line):
        return RequestTrace(matches, confidences)
    prompt, emitted = _token_ids(line["prompt"]), _token_ids(line["emitted"])
    if len(emitted) < len(matches) or len(prompt) + len(emitted) > MAX_TEXT_TOKENS:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {len(emitted)} emitted, must be at least {len(matches)} emitted and "
            f"at most {MAX_TEXT_TOKENS} in all"
        )
    return RequestTrace(matches, confidences, prompt, emitted)


def _token_ids(ids: list[int]) -> np.ndarray:
    """[any] int32."""
    found = np.array(ids) if ids else np.zeros(0, dtype=np.int64)
    if not isinstance(ids, list) or found.ndim != 1 or found.dtype.kind != "i":
        raise ValueError("prompt and emitted must be lists of whole numbers")
    if len(found) and not (0 <= found.min() and found.max() <= MAX_TOKEN_ID):
        raise ValueError(f"token ids must be 0 to {MAX_TOKEN_ID}")
    return found.astype(np.int32)
