"""`eesd top`: a server's drafting, live in the terminal."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_eesd.bench.scrape import Figures, Snapshot, between, fetch, metrics_url, parse

#: Snapshots kept: what "the last minute" and the lines of history are made from.
HISTORY = 60
SPARKS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 24
VLLM_ONLY = (
    "EESD's own counters are not at this endpoint (workers on other machines, or another method): shown are vLLM's. "
    "They leave rounds without drafts out, and of other methods may count placeholders as drafts; no speedup can be "
    "told from them."
)


class Watch:
    """A server's snapshots, and the view of them.

    Args:
        url: of its metrics endpoint.
        window_s: what "recent" means.
        clock: seconds, monotonic.
    """

    def __init__(self, url: str, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.url, self.window_s, self._clock = url, window_s, clock
        self._snapshots: deque[Snapshot] = deque(maxlen=HISTORY)
        self._first: Snapshot | None = None
        self._problem = ""

    def look(self) -> None:
        """Take a snapshot; a server that does not answer any more is remembered and shown as such.

        Raises:
            ValueError: it never answered.
        """
        try:
            snapshot = parse(fetch(self.url), self._clock())
        except ValueError as error:
            if self._first is None:
                raise
            self._problem = str(error)
            return
        self._problem = ""
        self._first = self._first or snapshot
        self._snapshots.append(snapshot)

    def view(self) -> RenderableType:
        """Return the terminal's picture: figures of the recent time and of the server's whole life."""
        last = self._snapshots[-1]
        recent = between(self._begin(), last)
        # Since the server's start: its counters began at zero; the time of that is not known.
        total = between(Snapshot(last.at_s, {}), last)
        parts: list[RenderableType] = [self._numbers(last, recent, total)]
        if recent.lengths or recent.positions:
            parts += [Text(), self._shapes(recent)]
        if not recent.own:
            parts += [Text(), Text(VLLM_ONLY, style="yellow")]
        if self._problem:
            parts += [Text(), Text(f"no answer: {self._problem}", style="red")]
        return Panel(Group(*parts), title=f"eesd top  {last.model}  {self.url}", title_align="left")

    def _begin(self) -> Snapshot:
        """The oldest snapshot within the window, or the newest before it if there is only the last one."""
        last = self._snapshots[-1]
        recent = [snapshot for snapshot in self._snapshots if last.at_s - snapshot.at_s <= self.window_s]
        if len(recent) > 1 or len(self._snapshots) == 1:
            return recent[0]
        return self._snapshots[-2]

    def _numbers(self, last: Snapshot, recent: Figures, total: Figures) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        table.add_column("")
        table.add_column(f"last {self.window_s:g} s", justify="right", min_width=10)
        table.add_column("since start", justify="right")
        table.add_column("history")
        waiting = f"{last.values.get('running', 0):.0f} + {last.values.get('waiting', 0):.0f}"
        table.add_row("requests running + waiting", waiting, "", "")
        rows = (
            ("goodput, tokens/s", "goodput", "{:.1f}"),
            ("estimated speedup over plain", "speedup", "{:.2f}x"),
            ("drafts accepted", "acceptance_rate", "{:.0%}"),
            ("tokens per round", "acceptance_length", "{:.2f}"),
            ("drafted per round", "draft_length", "{:.2f}"),
            ("rounds without a draft", "without_draft", "{:.0%}"),
        )
        for label, name, pattern in rows:
            history = [getattr(between(a, b), name) for a, b in self._pairs()]
            since = None if name == "goodput" else getattr(total, name)
            style = "bold" if name in ("goodput", "speedup") else ""
            cells = (_cell(getattr(recent, name), pattern), _cell(since, pattern))
            table.add_row(label, *cells, Text(sparkline(history), style="cyan"), style=style)
        return table

    def _pairs(self) -> list[tuple[Snapshot, Snapshot]]:
        shots = list(self._snapshots)[-1 - BAR_WIDTH :]
        return list(zip(shots, shots[1:], strict=False))

    @staticmethod
    def _shapes(recent: Figures) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("tokens", "rounds with a draft so long", "", "drafts accepted so far, by vLLM's count", ""):
            table.add_column(heading)
        for length in range(max(len(recent.lengths), len(recent.positions) + 1)):
            cells: list[RenderableType] = [str(length)]
            for shares, index in ((recent.lengths, length), (recent.positions, length - 1)):
                share = shares[index] if 0 <= index < len(shares) else None
                bar = Text() if share is None else Bar(1.0, 0.0, share, width=BAR_WIDTH, color="green")
                cells += [bar, _cell(share, "{:.0%}") if share is not None else ""]
            table.add_row(*cells)
        return table


def sparkline(values: list[float | None]) -> str:
    """Return one character per value, by its size relative to the largest; a blank where it is unknown."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest <= 0:
        return ""
    steps = len(SPARKS) - 1
    return "".join(" " if value is None else SPARKS[round(max(value, 0) / largest * steps)] for value in values)


def _cell(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def run(args: argparse.Namespace) -> int:
    """Show the view until interrupted, or `--count` times.

    Raises:
        ValueError: the URL is not valid, or no server answers there.
    """
    watch = Watch(metrics_url(args.url), args.window)
    console = Console(highlight=False)
    watch.look()
    if not console.is_terminal:
        return _print_views(watch, console, args)
    try:
        with Live(watch.view(), console=console, screen=not args.count, auto_refresh=False) as live:
            for _ in range(args.count or 2**62):
                time.sleep(args.interval)
                watch.look()
                live.update(watch.view(), refresh=True)
    except KeyboardInterrupt:
        pass  # the way to leave
    return 0


def _print_views(watch: Watch, console: Console, args: argparse.Namespace) -> int:
    """One view after another, as a log takes them; once if nothing else was asked for."""
    for _ in range(args.count or 1):
        time.sleep(args.interval)
        watch.look()
        console.print(watch.view())
    return 0
