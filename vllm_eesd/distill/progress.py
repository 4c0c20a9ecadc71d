"""How far a stretch of work is: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

from tqdm import tqdm

#: Nothing is silent for longer.
LINE_EVERY_S = 5.0
#: A bar without a total would stand still: its clock is drawn anew.
DRAW_EVERY_S = 1.0
UNCOUNTED = "{desc}: {elapsed} so far"
BEGUN = "{desc}: 0 of {total:g} {unit}, {elapsed} so far"
COUNTED = "{desc}: {n:g} of {total:g} {unit}, {elapsed} so far, about {remaining} to go"


@contextlib.contextmanager
def progress(
    doing: str | Callable[[], str], total: float | None = None, unit: str = ""
) -> Iterator[Callable[[float], object]]:
    """Show on stderr how far something is while the block runs; yields what counts steps that are done.

    A stretch that ends sooner than a line is due prints nothing where there is no terminal.

    Args:
        doing: what is going on, such as "measuring layers", or what returns it, asked whenever it is shown.
        total: how many steps there are; None where nothing can be counted, and time alone is shown.
        unit: of the steps.
    """
    terminal = sys.stderr.isatty()
    # Without a terminal tqdm, which would go back to the line's start, keeps count and formats; the thread prints.
    shown = {"file": sys.stderr if terminal else io.StringIO(), "leave": False}
    shown["bar_format"] = UNCOUNTED if total is None else BEGUN
    ended = threading.Event()
    told = doing if callable(doing) else lambda: doing
    with tqdm(desc=told(), total=total, unit=unit, **shown) as bar:

        def draw() -> None:
            bar.set_description_str(told(), refresh=terminal)
            if not terminal:
                print(bar, file=sys.stderr, flush=True)

        every_s = DRAW_EVERY_S if terminal else LINE_EVERY_S
        thread = threading.Thread(target=_repeat, args=(draw, every_s, ended), daemon=True)
        thread.start()
        try:
            yield partial(_count, bar)
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def telling(describe: Callable[[], str], quiet: bool = False) -> Iterator[None]:
    """Show what `describe` returns while the block runs, and print it once at the end; `quiet` does nothing."""
    with contextlib.nullcontext() if quiet else progress(describe):
        yield
    if not quiet:
        print(describe(), flush=True)


def _count(bar: tqdm, steps: float) -> None:
    bar.bar_format = UNCOUNTED if bar.total is None else COUNTED
    bar.update(steps)


def _repeat(draw: Callable[[], object], every_s: float, ended: threading.Event) -> None:
    while not ended.wait(every_s):
        draw()
