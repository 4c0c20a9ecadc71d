"""A sign of life at least every few seconds, whatever takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from vllm_eesd.bench.latency import reporting

#: Seconds after which what is going on is told again: a spinner's seconds run, elsewhere it is a line more.
IN_TERMINAL_S, ELSEWHERE_S = 1.0, 3.0


@contextmanager
def never_silent(console: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is going on, which is told again, with how long it has taken, until it ends."""
    every = IN_TERMINAL_S if console.is_terminal else ELSEWHERE_S
    with reporting(console) as show, told_again(show, every) as say:
        yield say


@contextmanager
def told_again(show: Callable[[str], None], every: float) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text at once and, until the next one, every so many seconds."""
    lock, ended = threading.Lock(), threading.Event()
    text, began, due = "", 0.0, float("inf")

    def say(new: str) -> None:
        nonlocal text, began, due
        with lock:
            text, began = new, time.monotonic()
            due = began + every
            show(text)

    def repeat() -> None:
        nonlocal due
        while not ended.wait(every / 4):
            with lock:
                if (now := time.monotonic()) >= due:
                    due = now + every
                    show(f"{text} ({now - began:.0f} s)")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()
