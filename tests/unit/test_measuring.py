"""How much held-out text is measured follows from how long a run is."""

from __future__ import annotations

import pytest

from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.measuring import SHARE, WATCHED_WINDOWS, WINDOWS_TRAINED, num_windows


def config(**changes) -> DistillConfig:
    return DistillConfig(**({"model": "M", "exit_layer": 1, "output": "H", "data": ["t.txt"]} | changes))


def never() -> float:
    pytest.fail("a run of so many steps is as long on every machine: nothing is to be timed")


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"steps": 10_000}, 64),
        ({"steps": 1000}, 30),
        ({"steps": 1000, "self_generate": 64}, 12),
        ({"steps": 1000, "measure_greedy": True}, 12),
        ({"steps": 300}, 9),
        ({"steps": 10}, WATCHED_WINDOWS),
        ({"steps": 1000, "measure_every": 1}, WATCHED_WINDOWS),
    ],
)
def test_windows_of_so_many_steps(settings, windows):
    assert num_windows(config(**settings), never) == windows


def test_windows_of_so_many_minutes():
    """Measuring a window takes 2 s, training on one half a second: 30 minutes are 3600 windows and 45 to measure."""
    settings = {"steps": 100_000, "minutes": 30}
    assert WINDOWS_TRAINED == 4
    assert num_windows(config(**settings), lambda: 2.0) == (45 - 4 * WATCHED_WINDOWS) // 2
    assert num_windows(config(**settings), lambda: 0.1) == 64
    assert num_windows(config(**settings), lambda: 50.0) == WATCHED_WINDOWS
    assert num_windows(config(steps=10, minutes=300), lambda: 0.01) == WATCHED_WINDOWS


@pytest.mark.parametrize("steps", [1000, 3000, 8000])
def test_measuring_takes_no_more_than_its_share(steps):
    run = config(steps=steps, self_generate=8)
    measured = 5 * num_windows(run, never) + WATCHED_WINDOWS * (steps // run.measure_every)
    assert measured * WINDOWS_TRAINED <= SHARE * steps * run.batch
