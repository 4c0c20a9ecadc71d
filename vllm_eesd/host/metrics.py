"""EESD's own numbers at vLLM's /metrics: the worker keeps a small file up to date, the API server's registry reads it.

vLLM's statistics travel from engine to API server in messages of fixed fields, so these go beside them: through a
directory that the config names, made by the process that reads the user's arguments and removed when it ends. Several
API servers read what Prometheus' client keeps in a directory of its own, which vLLM names in the environment: there the
worker counts as one of that client's processes. Of workers on other machines EESD's numbers are missing.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import REGISTRY, Counter, Gauge, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_eesd.files import replacing
from vllm_eesd.round.counters import DraftStats

PUBLISH_EVERY_S = 1.0
#: Fields of a published file and what they count.
COUNTERS = {
    "rounds": "Decoding rounds, one per request and step, those without a draft among them.",
    "drafted_tokens": "Draft tokens the target judged; placeholders are none.",
    "accepted_tokens": "Draft tokens the target accepted.",
    "copied_tokens": "Of the draft tokens judged, those copied from the text (n-gram continuations), not drafted.",
    "copied_accepted_tokens": "Of the draft tokens accepted, those copied from the text.",
    "emitted_tokens": "Tokens that rounds emitted: the accepted drafts and one of the target's own each.",
    "decode_seconds": "Time of the steps in which every request decoded, drafting included.",
    "plain_seconds": "What the tokens of those steps would have taken without drafts: an estimate.",
    "drafter_faults": "Faults while drafting; each cost a round of drafts, see docs/reliability.md.",
}
OFF = "speculation_off"
OFF_HELP = "1 once repeated faults have switched speculation off until a restart, else 0."
LENGTHS = "draft_length_rounds"
LENGTHS_HELP = "Rounds by the number of draft tokens judged."


class Faults(Protocol):
    """What counts the faults while drafting: a `CircuitBreaker`."""

    def as_dict(self) -> dict[str, int]: ...


class DraftCollector(Collector):
    """Reads published files for Prometheus; each is an engine."""

    def __init__(self) -> None:
        self._directories: list[Path] = []

    def add(self, directory: str) -> None:
        """Read this directory too, from now on."""
        self._directories.append(Path(directory))

    def describe(self) -> list[Metric]:
        """Nothing is read when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        published = dict(self._published())
        families = [(CounterMetricFamily, name, text) for name, text in COUNTERS.items()]
        for kind, name, text in (*families, (GaugeMetricFamily, OFF, OFF_HELP)):
            family = kind(f"eesd:{name}", text, labels=["engine"])
            for engine, figures in published.items():
                family.add_metric([engine], figures[name])
            yield family
        family = CounterMetricFamily(f"eesd:{LENGTHS}", LENGTHS_HELP, labels=["engine", "length"])
        for engine, figures in published.items():
            for length, rounds in enumerate(figures[LENGTHS]):
                family.add_metric([engine, str(length)], rounds)
        yield family

    def _published(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for directory in self._directories:
            for path in sorted(directory.glob("[!.]*.json")):  # files being written have a dot in front
                with suppress(FileNotFoundError):  # its engine has just ended
                    yield path.stem, json.loads(path.read_text(encoding="utf-8"))


_collector: DraftCollector | None = None


def make_metrics_directory() -> str:
    """Return a new directory of which this process' registry reads what workers publish."""
    global _collector
    directory = tempfile.mkdtemp(prefix="eesd-metrics-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if _collector is None:
        _collector = DraftCollector()
        REGISTRY.register(_collector)
    _collector.add(directory)
    return directory


def publish(directory: str, engine: int, stats: DraftStats, breaker: Faults) -> None:
    """Keep these counters published from a thread, for as long as `stats` exists and they have a reader.

    Args:
        directory: of `make_metrics_directory`.
        engine: its number, the label of its metrics.
        stats: what rounds counted.
        breaker: what faults while drafting did.
    """
    # As vLLM asks it, where it chooses what /metrics reads.
    sink = _SharedCounters(engine) if os.getenv("PROMETHEUS_MULTIPROC_DIR") is not None else _File(directory, engine)
    arguments = (sink, weakref.ref(stats), breaker)
    threading.Thread(target=_publish_on, args=arguments, name="eesd-metrics", daemon=True).start()


class _Sink(Protocol):
    """Where figures are published."""

    def write(self, figures: dict[str, Any]) -> bool:
        """Publish figures that have changed; False where they have no reader any more."""

    def close(self) -> None:
        """Its engine has ended."""


class _File:
    """A file for `DraftCollector`."""

    def __init__(self, directory: str, engine: int) -> None:
        self._path = Path(directory) / f"{engine}.json"

    def write(self, figures: dict[str, Any]) -> bool:
        try:
            with replacing(self._path, mode=0o600, make_directory=False) as file:
                file.write_text(json.dumps(figures), encoding="utf-8")
        except OSError:
            return False  # removed: its reader has ended, or is on another machine
        return True

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class _SharedCounters:
    """Counters in the directory of Prometheus' client, which adds up those of all processes."""

    def __init__(self, engine: int) -> None:
        if values.ValueClass is values.MutexValue:  # it was imported before vLLM named the directory
            values.ValueClass = values.MultiProcessValue()
        options = {"labelnames": ["engine"], "registry": None}
        counters = {name: Counter(f"eesd:{name}", text, **options) for name, text in COUNTERS.items()}
        self._counters = {name: counter.labels(engine) for name, counter in counters.items()}
        self._off = Gauge(f"eesd:{OFF}", OFF_HELP, multiprocess_mode="livemax", **options).labels(engine)
        lengths = Counter(f"eesd:{LENGTHS}", LENGTHS_HELP, labelnames=["engine", "length"], registry=None)
        self._of_length: Callable[[int], Counter] = lambda length: lengths.labels(engine, length)
        self._written: dict[str, Any] = {LENGTHS: []}

    def write(self, figures: dict[str, Any]) -> bool:
        before, self._written = self._written, figures
        for name, counter in self._counters.items():
            counter.inc(max(figures[name] - before.get(name, 0), 0))  # less: they were reset
        self._off.set(figures[OFF])
        for length, rounds in enumerate(figures[LENGTHS]):
            known = before[LENGTHS][length] if before[LENGTHS] else 0
            self._of_length(length).inc(max(rounds - known, 0))
        return True

    def close(self) -> None:
        """Counters of a process that has ended stay counted."""


def _publish_on(sink: _Sink, reference: weakref.ref[DraftStats], breaker: Faults) -> None:
    last, pause = None, threading.Event()
    while (stats := reference()) is not None:
        figures = _figures(stats) | breaker.as_dict()
        del stats
        if figures != last and not sink.write(figures):
            return
        last = figures
        pause.wait(PUBLISH_EVERY_S)
    sink.close()


def _figures(stats: DraftStats) -> dict[str, Any]:
    counted = stats.as_dict()
    return {
        "rounds": counted["rounds"],
        "drafted_tokens": counted["drafted"],
        "accepted_tokens": counted["accepted"],
        "copied_tokens": counted["copied"],
        "copied_accepted_tokens": counted["copied_accepted"],
        "emitted_tokens": counted["emitted"],
        "decode_seconds": stats.decode_ms / 1e3,
        "plain_seconds": stats.plain_ms / 1e3,
        LENGTHS: counted["draft_length_histogram"],
    }
