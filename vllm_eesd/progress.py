"""What is going on and how far it is: a bar or a spinner on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
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
    told = doing if callable(doing) else lambda: doing
    with tqdm(desc=told(), total=total, unit=unit, **shown) as bar:

        def draw() -> None:
            bar.set_description_str(told(), refresh=terminal)
            if not terminal:
                print(bar, file=sys.stderr, flush=True)

        with _repeated(draw, DRAW_EVERY_S if terminal else LINE_EVERY_S):
            yield partial(_count, bar)


@contextlib.contextmanager
def telling(describe: Callable[[], str], quiet: bool = False) -> Iterator[None]:
    """Show what `describe` returns while the block runs, and print it once at the end; `quiet` does nothing."""
    with contextlib.nullcontext() if quiet else progress(describe):
        yield
    if not quiet:
        print(describe(), flush=True)


@contextlib.contextmanager
def told_again(show: Callable[[str], None], every_s: float) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text at once and, with the time it took, every so many seconds until the next."""
    lock, text, began, due = threading.Lock(), "", 0.0, float("inf")

    def say(new: str) -> None:
        nonlocal text, began, due
        with lock:
            text, began = new, time.monotonic()
            due = began + every_s
            show(text)

    def again() -> None:
        nonlocal due
        with lock:
            if (now := time.monotonic()) >= due:
                due = now + every_s
                show(f"{text} ({now - began:.0f} s)")

    with _repeated(again, every_s / 4):
        yield say


def _count(bar: tqdm, steps: float) -> None:
    bar.bar_format = UNCOUNTED if bar.total is None else COUNTED
    bar.update(steps)


@contextlib.contextmanager
def _repeated(call: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call a function every so many seconds while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
