"""A server's metrics endpoint, read: counters at one moment, and what happened between two."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0
#: A server's whole answer has some hundred KB.
MAX_BYTES = 16 << 20
#: Samples that are summed over engines and models, under the name they get here.
SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated",
    "vllm:spec_decode_num_drafts_total": "vllm_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "vllm_drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "vllm_accepted",
    "eesd:rounds_total": "rounds",
    "eesd:drafted_tokens_total": "drafted",
    "eesd:accepted_tokens_total": "accepted",
    "eesd:emitted_tokens_total": "emitted",
    "eesd:decode_seconds_total": "decode_s",
    "eesd:plain_seconds_total": "plain_s",
}
#: Samples of which each value of one label is kept.
LISTED = {
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "position",
    "eesd:draft_length_rounds_total": "length",
}


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment.

    Attributes:
        at_s: a monotonic clock's.
        values: by the names of SUMMED, those the server has.
        lists: by the labels of LISTED, value of the label -> count.
        model: the served model's name, "" if unknown.
    """

    at_s: float
    values: dict[str, float]
    lists: dict[str, dict[int, float]] = field(default_factory=dict)
    model: str = ""


@dataclass(frozen=True)
class Figures:
    """What happened between two snapshots; None is unknown.

    Attributes:
        goodput: generated tokens per second.
        own: whether EESD's own counters were there. vLLM's leave rounds without drafts out, and know no times; they are
            what remains where workers are on other machines.
        acceptance_rate: accepted / drafted.
        acceptance_length: tokens per round; with vLLM's counters prompts' first tokens are rounds too.
        draft_length: drafted tokens per round; with vLLM's counters per round that drafted.
        without_draft: share of rounds.
        speedup: estimated, over plain decoding.
        lengths: share of rounds by draft length.
        positions: share of drafts that were accepted at least so far, from position 1.
    """

    goodput: float | None
    own: bool
    acceptance_rate: float | None
    acceptance_length: float | None
    draft_length: float | None
    without_draft: float | None
    speedup: float | None
    lengths: list[float]
    positions: list[float]


def metrics_url(url: str) -> str:
    """Return the metrics endpoint of a server's URL.

    Raises:
        ValueError: not an http or https URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url {url!r} is not valid: must be like http://127.0.0.1:8000")
    return url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"


def fetch(url: str) -> str:
    """Return the text of a metrics endpoint.

    Raises:
        ValueError: no answer, or not one of a metrics endpoint; one line.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            data = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"{url}: no metrics ({reason}); allowed: the address of a running vLLM server") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{url}: more than {MAX_BYTES} bytes, not a server's metrics")
    return data.decode("utf-8", errors="replace")


def parse(text: str, at_s: float) -> Snapshot:
    """Return the counters in a metrics endpoint's text.

    Raises:
        ValueError: not such a text, or not vLLM's.
    """
    values: dict[str, float] = defaultdict(float)
    lists: dict[str, dict[int, float]] = {label: defaultdict(float) for label in LISTED.values()}
    model = ""
    for sample in _samples(text):
        if name := SUMMED.get(sample.name):
            values[name] += sample.value
            model = sample.labels.get("model_name", model)
        elif (label := LISTED.get(sample.name)) and sample.labels.get(label, "").isdecimal():
            lists[label][int(sample.labels[label])] += sample.value
    if "generated" not in values:
        raise ValueError("the endpoint has no metric vllm:generation_tokens_total: not a vLLM server's")
    return Snapshot(at_s, dict(values), {label: dict(counts) for label, counts in lists.items()}, model)


def _samples(text: str) -> Iterator[Any]:
    try:
        for family in text_string_to_metric_families(text):
            yield from family.samples
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # whatever its parser meets
        reason = " ".join(str(error).split())
        raise ValueError(f"not a metrics endpoint's text ({type(error).__name__}: {reason:.200})") from None


def between(before: Snapshot, after: Snapshot) -> Figures:
    """Return what happened between two snapshots of a server; if it was restarted, since then."""

    def grown(name: str) -> float:
        now = after.values.get(name, 0.0)
        return now - then if (then := before.values.get(name, 0.0)) <= now else now

    def listed(label: str) -> list[float]:
        now, then = after.lists.get(label, {}), before.lists.get(label, {})
        restarted = any(now.get(key, 0.0) < count for key, count in then.items())
        return [now[key] - (0.0 if restarted else then.get(key, 0.0)) for key in sorted(now)]

    own, generated, seconds = "rounds" in after.values, grown("generated"), after.at_s - before.at_s
    drafted, accepted = (grown(name if own else f"vllm_{name}") for name in ("drafted", "accepted"))
    rounds = grown("rounds") if own else generated - accepted
    lengths, drafts = listed("length"), grown("vllm_drafts")
    return Figures(
        goodput=_ratio(generated, seconds),
        own=own,
        acceptance_rate=_ratio(accepted, drafted),
        acceptance_length=_ratio(grown("emitted") if own else generated, rounds),
        draft_length=_ratio(drafted, rounds if own else drafts),
        without_draft=_ratio(lengths[0], rounds) if own and lengths else None,
        speedup=_ratio(grown("plain_s"), grown("decode_s")),
        lengths=[count / rounds for count in lengths] if rounds > 0 else [],
        positions=[count / drafts for count in listed("position")] if drafts > 0 else [],
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
