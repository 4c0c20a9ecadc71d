"""`eesd top`: a server's drafting, live in the terminal, read from its metrics endpoint."""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections import Counter, deque
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TIMEOUT_S, MAX_BYTES, HISTORY, BAR_WIDTH, SPARKS = 10.0, 16 << 20, 60, 24, "▁▂▃▄▅▆▇█"
GENERATED, DRAFTS = "vllm:generation_tokens_total", "vllm:spec_decode_num_drafts_total"
POSITIONS, LENGTHS = "vllm:spec_decode_num_accepted_tokens_per_pos_total", "eesd:draft_length_rounds_total"
VLLM_ONLY = """EESD's own counters are not at this endpoint (workers on other machines, or another method): shown are \
vLLM's. They know no speedup, leave out rounds without drafts and, with other methods, may count placeholders."""
#: Rows of the table: label, key of `between`'s result, format.
ROWS = (
    ("goodput, tokens/s", "goodput", "{:.1f}"),
    ("estimated speedup over plain", "speedup", "{:.2f}x"),
    ("drafts accepted", "acceptance_rate", "{:.0%}"),
    ("tokens per round", "acceptance_length", "{:.2f}"),
    ("drafted per round", "draft_length", "{:.2f}"),
    ("rounds without a draft", "without_draft", "{:.0%}"),
)


class Snapshot(NamedTuple):
    """Metrics at one moment, summed over engines: by name; with a label position or length by (name, number)."""

    at_s: float
    values: dict[Any, float]
    model: str = ""


def fetch(url: str) -> str:
    """Return the text of a metrics endpoint; ValueError, in one line, if none answers there."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.read(MAX_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: no metrics ({error}); allowed: the address of a running vLLM server") from None


def parse(text: str, at_s: float) -> Snapshot:
    """Return the metrics in an endpoint's text; ValueError, in one line, if it is not vLLM's."""
    values, model = Counter(), ""
    try:
        for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
            number = sample.labels.get("position", sample.labels.get("length", ""))
            values[(sample.name, int(number)) if number.isdecimal() else sample.name] += sample.value
            model = sample.labels.get("model_name", model)
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # whatever the parser meets
        raise ValueError(f"not a metrics endpoint's text ({error!r:.200})") from None
    if GENERATED not in values:
        raise ValueError(f"the endpoint has no metric {GENERATED}: not a vLLM server's")
    return Snapshot(at_s, values, model)


def between(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return what happened between two snapshots, or since a restart: the keys of ROWS, None where unknown; and

    own: whether by EESD's counters; lengths: share of rounds by draft length; positions: of drafts accepted so far.
    """
    restarted = any(after.values.get(k, 0) < count for k, count in before.values.items() if "_total" in str(k))
    then = {} if restarted else before.values
    grown = Counter({key: count - then.get(key, 0) for key, count in after.values.items()})
    own, drafts, rounds = "eesd:rounds_total" in grown, grown[DRAFTS], grown["eesd:rounds_total"]
    emitted, accepted, drafted = (grown[f"eesd:{what}_tokens_total"] for what in ("emitted", "accepted", "drafted"))
    if not own:  # vLLM's: a prompt's first token counts as a round, and rounds without a draft are not known
        emitted, accepted = grown[GENERATED], grown["vllm:spec_decode_num_accepted_tokens_total"]
        drafted, rounds = grown["vllm:spec_decode_num_draft_tokens_total"], emitted - accepted
    ratios = {"goodput": (grown[GENERATED], after.at_s - before.at_s), "acceptance_rate": (accepted, drafted)}
    ratios |= {"speedup": (grown["eesd:plain_seconds_total"], grown["eesd:decode_seconds_total"])}
    ratios |= {"acceptance_length": (emitted, rounds), "draft_length": (drafted, rounds if own else drafts)}
    ratios |= {"without_draft": (grown[LENGTHS, 0], rounds if own else 0)}
    found = {key: part / whole if whole > 0 else None for key, (part, whole) in ratios.items()}
    for key, name, whole in (("lengths", LENGTHS, rounds), ("positions", POSITIONS, drafts)):
        found[key] = [grown[k] / whole for k in sorted(k for k in grown if k[:1] == (name,))] if whole > 0 else []
    return found | {"own": own}


class Watch:
    """Looks at a metrics endpoint, and shows what happened in the last `window_s` seconds."""

    def __init__(self, url: str, window_s: float) -> None:
        self.url, self.window_s, self._problem = url, window_s, ""
        self._snapshots: deque[Snapshot] = deque(maxlen=HISTORY)

    def look(self) -> None:
        """Take a snapshot; ValueError if the server never answered, else its silence is shown."""
        try:
            self._snapshots.append(parse(fetch(self.url), time.monotonic()))
            self._problem = ""
        except ValueError as error:
            if not self._snapshots:
                raise
            self._problem = f"no answer: {error}"

    def recent(self) -> dict[str, Any]:
        """Return what happened within the window, or since the look before where that is longer ago."""
        *before, last = self._snapshots
        within = [snapshot for snapshot in before if last.at_s - snapshot.at_s <= self.window_s]
        return between([*within, *before[-1:], last][0], last)

    def view(self) -> Panel:
        """Return the terminal's picture: figures of the recent time and of the server's whole life."""
        last, recent = self._snapshots[-1], self.recent()
        total = between(last._replace(values={}), last)  # how long that took is not known
        history = [between(*pair) for pair in pairwise(list(self._snapshots)[-1 - BAR_WIDTH :])]
        table = Table("", f"last {self.window_s:g} s", "since start", "history", box=None, padding=(0, 3, 0, 0))
        table.columns[1].justify = table.columns[2].justify = "right"
        waiting = (f"{last.values.get(f'vllm:num_requests_{what}', 0):.0f}" for what in ("running", "waiting"))
        table.add_row("requests running + waiting", " + ".join(waiting))
        for label, key, pattern in ROWS:
            cells = ("-" if value is None else pattern.format(value) for value in (recent[key], total[key]))
            table.add_row(label, *cells, sparkline([figures[key] for figures in history]))
        shapes = Table("tokens", "rounds with a draft so long", "drafts accepted so far, by vLLM's count", box=None)
        for number, pair in enumerate(zip_longest(recent["lengths"], [None, *recent["positions"]])):
            bars = ("" if share is None else f"{share:4.0%} {'█' * round(BAR_WIDTH * share)}" for share in pair)
            shapes.add_row(str(number), *bars)
        warnings = Text("" if recent["own"] else VLLM_ONLY, "yellow"), Text(self._problem, "red")
        parts = [table, Text(), *([shapes] if shapes.row_count > 1 else []), *filter(None, warnings)]
        return Panel(Group(*parts), title=f"eesd top  {last.model}  {self.url}", title_align="left")


def sparkline(values: list[float | None]) -> str:
    """Return one character per value, by its size relative to the largest; a blank where it is unknown."""
    largest = max((value for value in values if value is not None), default=0)
    heights = [None if v is None else round(max(v, 0) / largest * (len(SPARKS) - 1)) for v in values if largest > 0]
    return "".join(" " if height is None else SPARKS[height] for height in heights)


def run(args: argparse.Namespace) -> int:
    """Show the view until interrupted, or `--count` times; ValueError if no server answers at `--url`."""
    watch, console = Watch(args.url.rstrip("/").removesuffix("/metrics") + "/metrics", args.window), Console()
    watch.look()
    for _ in range(args.count or (2**62 if console.is_terminal else 1)):
        time.sleep(args.interval)
        watch.look()
        console.clear()
        console.print(watch.view())
    return 0
