"""No stretch of work is silent for long, on a terminal or not."""

from __future__ import annotations

import io
import time

import pytest

from vllm_eesd import progress as showing
from vllm_eesd.progress import progress


class Stderr(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown(monkeypatch, is_terminal: bool, wanted: str, done: int = 2, **of) -> str:
    """What is on stderr once `wanted` is, so many of whatever is counted being done."""
    stderr = Stderr(is_terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(showing, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(showing, "DRAW_EVERY_S", 0.001)
    with progress("timing layers", **of) as count:
        if done:
            count(done)
        while wanted not in stderr.getvalue():
            time.sleep(0.001)
    return stderr.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch):
    out = shown(monkeypatch, False, "to go\n", total=8, unit="steps")
    assert out.startswith("timing layers: 2 of 8 steps, 00:00 so far, about ")
    assert "\r" not in out and out.endswith("\n")


def test_before_anything_is_done(monkeypatch):
    assert "timing layers: 0 of 8 steps, 00:00 so far\n" in shown(monkeypatch, False, "\n", 0, total=8, unit="steps")


def test_what_cannot_be_counted_shows_its_time(monkeypatch):
    assert shown(monkeypatch, False, "\n").startswith("timing layers: 00:00 so far\n")


def test_a_bar_on_a_terminal_which_goes_when_the_work_is_done(monkeypatch):
    out = shown(monkeypatch, True, "2 of 8", total=8, unit="steps")
    assert "\n" not in out and out.endswith("\r")


def test_short_stretches_and_failed_ones_say_nothing(capsys):
    with progress("reading text"):
        pass
    with pytest.raises(ValueError, match="no text"), progress("reading text"):
        raise ValueError("no text")
    assert capsys.readouterr().err == ""
