"""Dense traces: what drafting would have been at every emitted position, so that any policy can be replayed exactly.

A file holds JSON lines, compressed if its name ends in .gz. The first is the header:

    {"format": "eesd-trace", "version": 2, "model": ..., "workload": ..., "num_speculative_tokens": K,
     "prior": [alpha, beta], "layers": {"exit": N, "head": M, "target": L}, "costs": {...}}

with `model` the target's name, whose tokenizer spells the ids, `prior` and `layers` the exit head's and `costs` as
`vllm_eesd.policy.costs.CostModel.state` gives them; the last three may be left out. Every further line is a request:

    {"matches": [T numbers], "confidences": [T * K numbers], "prompt": [token ids], "emitted": [T or more token ids]}

At emitted position t a greedy draft of K tokens was made. `matches[t]` of them, from the left, are what the target
emitted next; `confidences[t * K + j]` is draft token j + 1's probability in thousandths. `emitted[t]` is the token
that draft follows. `prompt` and `emitted` may be left out together: such a request is replayed without n-gram
drafts, which are made of the text.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass
from scipy.special import betaincinv

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.files import write_whole
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.traces.rounds import INTERVAL, UNKNOWN, RoundRecord

FORMAT, VERSION = "eesd-trace", 2
#: Three digits tell every calibration bin apart and keep a trace small.
SCALE = 1000
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

    def num_tokens(self, position: int) -> int:
        """Return the length of the text at a position, its own token included; 0 where it was not recorded."""
        return 0 if self.prompt is None else len(self.prompt) + int(position) + 1

    def text(self) -> np.ndarray:
        """Return prompt and output, [any] int32; nothing where it was not recorded."""
        if self.prompt is None or self.emitted is None:
            return np.zeros(0, dtype=np.int32)
        return np.concatenate([self.prompt, self.emitted]).astype(np.int32)


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True))
class DraftLayers:
    """How many layers drafted, and of how many.

    Attributes:
        exit: N, the target's layers that a draft step ran.
        head: M, the exit head's after them.
        target: all layers of the target.
    """

    exit: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]
    target: Annotated[int, Field(ge=1)]


@pydantic_dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))
class DenseTrace:
    """A recorded workload; all but its requests are the file's header.

    Attributes:
        model: the target's name.
        workload: what was generated.
        num_speculative_tokens: K.
        costs: `CostModel.state()` of the recording, or empty.
        requests: in the order they were served.
        prior: alpha and beta that a request's posterior starts from.
        layers: what drafted; None where that was not recorded.
    """

    model: str
    workload: str
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)]
    costs: dict[str, Any] = Field(default_factory=dict)
    requests: list[RequestTrace] = Field(default_factory=list)
    prior: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    layers: DraftLayers | None = None


class DenseRecorder:
    """Collects drafts of K tokens from every emitted position, while the engine verifies none of them.

    Args:
        num_speculative_tokens: K; shorter drafts (a request near its end) are left out.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        #: By request: its prompt, emitted tokens, drafts and their confidences.
        self._requests: dict[str, tuple[list[int], list[int], list[list[int]], list[list[float]]]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has begun."""
        return request_id in self._requests

    def begin(self, request_id: str, prompt: list[int]) -> None:
        """Take in a new request's prompt, in token ids."""
        self._requests[request_id] = prompt, [], [], []

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
            _, all_emitted, all_drafts, all_confidences = self._requests[request_id]
            all_emitted.extend(tokens)
            if len(draft) == depth:
                all_drafts.append(draft)
                all_confidences.append(confidences[row, :depth].tolist())

    def requests(self) -> list[RequestTrace]:
        """Return the requests in the order they began, without drafts whose outcome is not known."""
        traces = []
        for prompt, emitted, drafts, confidences in self._requests.values():
            known = min(len(drafts), len(emitted) - self.num_speculative_tokens)
            if known <= 0:
                continue
            text = np.array(emitted, dtype=np.int32)
            followed = np.lib.stride_tricks.sliding_window_view(text[1:], self.num_speculative_tokens)[:known]
            matches = np.cumprod(np.array(drafts[:known]) == followed, axis=1).sum(axis=1)
            shown = np.array(confidences[:known], dtype=np.float32)
            traces.append(RequestTrace(matches.astype(np.int64), shown, np.array(prompt, dtype=np.int32), text))
        return traces


def as_served(trace: DenseTrace, request: RequestTrace) -> list[RoundRecord]:
    """Return the rounds a request takes alone, if every one drafts K tokens and takes as long as was recorded.

    Draft tokens that were rejected are UNKNOWN: a dense trace does not hold them.

    Args:
        request: with its text.
    """
    assert request.emitted is not None
    costs, depth, (alpha, beta) = CostModel(), trace.num_speculative_tokens, trace.prior
    if trace.costs:
        costs.restore(trace.costs)
    round_ms, step_ms, verify_ms = costs.round_ms(1), float(costs.draft_curve(1)[1]), costs.verify_curve(1, depth)
    took = {"batch": 1, "draft_steps_ms": [step_ms] * depth, "draft_rest_ms": round_ms, "draft_step_ms": step_ms}
    took |= {"verify_ms": float(verify_ms[depth]) - round_ms, "plain_ms": float(verify_ms[0])}
    total_ms = float(verify_ms[depth]) + depth * step_ms
    position, rounds = 0, []
    while position < len(request.matches):
        accepted = int(request.matches[position])
        emitted = request.emitted[position + 1 : position + accepted + 2].tolist()
        if len(emitted) <= accepted:
            break  # the text ends within the round
        rounds.append(
            RoundRecord(
                request="",
                at_s=len(rounds) * total_ms / 1e3,
                draft=emitted[:accepted] + [UNKNOWN] * (depth - accepted),
                confidences=request.confidences[position].astype(np.float64).round(3).tolist(),
                copied=False,
                accepted=accepted,
                emitted=emitted,
                posterior_mean=alpha / (alpha + beta),
                posterior_interval=tuple(betaincinv(alpha, beta, INTERVAL).tolist()),
                **took,
            )
        )
        alpha, beta, position = alpha + accepted, beta + (accepted < depth), position + accepted + 1
    return rounds


class _Line(BaseModel):
    """Of a request."""

    model_config = ConfigDict(strict=True)

    matches: list[int]
    confidences: list[int]
    prompt: list[int] | None = None
    emitted: list[int] | None = None


_HEADER = TypeAdapter(DenseTrace)


def parse(lines: list[bytes]) -> Iterator[DenseTrace | RequestTrace]:
    """Yield for each of a file's lines what it holds: the trace, without requests yet, then these.

    Args:
        lines: with what stands after the last line end.
    Raises:
        ValueError: the next line is damaged, or holds values out of range.
    """
    trace = _HEADER.validate_json(lines[0])
    if trace.costs:
        CostModel().restore(trace.costs)
    yield trace
    for line in lines[1:] if lines[-1] else lines[1:-1]:
        yield _request(_Line.model_validate_json(line), trace.num_speculative_tokens)


def _request(line: _Line, num_speculative_tokens: int) -> RequestTrace:
    matches = _array("matches", line.matches, num_speculative_tokens, np.int64)
    scaled = _array("confidences", line.confidences, SCALE, np.float32)
    confidences = scaled.reshape(len(matches), num_speculative_tokens) / SCALE
    if line.prompt is None and line.emitted is None:
        return RequestTrace(matches, confidences)
    if line.prompt is None or line.emitted is None:
        raise ValueError("prompt and emitted must stand together")
    prompt, emitted = (_array("token ids", ids, MAX_TOKEN_ID, np.int32) for ids in (line.prompt, line.emitted))
    if len(emitted) < len(matches) or len(prompt) + len(emitted) > MAX_TEXT_TOKENS:
        raise ValueError(
            f"{len(prompt)} tokens of prompt and {len(emitted)} emitted, must be at least {len(matches)} emitted "
            f"and at most {MAX_TEXT_TOKENS} in all"
        )
    return RequestTrace(matches, confidences, prompt, emitted)


def _array(name: str, values: list[int], highest: int, dtype: type[np.generic]) -> np.ndarray:
    if values and not (0 <= min(values) and max(values) <= highest):
        raise ValueError(f"{name} must be 0 to {highest}")
    return np.array(values, dtype=dtype)


def write(path: str | os.PathLike, trace: DenseTrace) -> None:
    """Write a trace; compressed if the name ends in .gz, the same bytes for the same trace."""
    fields = {name: getattr(trace, name) for name in ("model", "workload", "num_speculative_tokens", "prior", "costs")}
    fields |= {} if trace.layers is None else {"layers": asdict(trace.layers)}
    lines: list[dict[str, Any]] = [{"format": FORMAT, "version": VERSION, **fields}]
    for request in trace.requests:
        confidences = (request.confidences * SCALE).round().astype(int)
        line = {"matches": request.matches.tolist(), "confidences": confidences.ravel().tolist()}
        if request.prompt is not None and request.emitted is not None:
            line |= {"prompt": request.prompt.tolist(), "emitted": request.emitted.tolist()}
        lines.append(line)
    data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    write_whole(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
