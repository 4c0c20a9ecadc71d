"""The choice between a kernel and what it replaces, its times injected."""

from types import SimpleNamespace

import pytest
import torch

from vllm_eesd.host.v2 import kernel_choice
from vllm_eesd.host.v2.kernel_choice import Timing


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1]), (2, [1, 2]), (24, [1, 2, 4, 8, 16, 24]), (8, [1, 2, 4, 8])])
def test_every_order_of_magnitude_in_use_is_timed(limit, sizes):
    assert kernel_choice.sizes_up_to(limit) == sizes


@pytest.mark.parametrize(
    ("kernel_ms", "largest"),
    [
        ([1.0, 1.0, 1.0], 4),
        ([2.0, 2.0, 2.0], 4),  # a tie is not slower
        ([1.0, 1.9, 2.1], 2),
        ([1.0, 2.1, 1.0], 1),  # a size at which it loses ends it, whatever comes behind
        ([2.1, 1.0, 1.0], 0),
    ],
)
def test_the_kernel_is_used_up_to_where_it_first_loses(kernel_ms, largest):
    timings = [Timing(1 << n, ms, 2.0) for n, ms in enumerate(kernel_ms)]
    assert kernel_choice.fast_up_to(timings) == largest


def test_nothing_is_timed_on_a_cpu():
    assert kernel_choice.timer_for(torch.device("cpu"), in_graphs=False) is None


@pytest.fixture
def decide(monkeypatch):
    """Return decide(kernel's ms at 1, 2 and 4, everywhere): what is decided against 2 ms each."""
    monkeypatch.setattr(kernel_choice, "get_tp_group", lambda: SimpleNamespace(world_size=1))

    def decide(kernel_ms, everywhere=False):
        def time(size):
            if kernel_ms[size] is None:
                raise RuntimeError("no such kernel here")
            return Timing(size, kernel_ms[size], 2.0)

        return kernel_choice.decide("a_kernel", [1, 2, 4], time, everywhere)

    return decide


def test_what_serves_all_sizes_must_win_at_each(decide):
    wins, loses_once = {1: 1.0, 2: 1.0, 4: 1.0}, {1: 1.0, 2: 1.0, 4: 3.0}
    assert (decide(wins), decide(wins, everywhere=True)) == (4, 4)
    assert (decide(loses_once), decide(loses_once, everywhere=True)) == (2, 0)


def test_a_kernel_that_fails_while_it_is_timed_is_not_used(decide):
    assert decide({1: 1.0, 2: None, 4: 1.0}) == 0


def test_all_ranks_decide_as_rank_0(decide, monkeypatch):
    others = [Timing(1, 1.0, 2.0), Timing(2, 3.0, 2.0), Timing(4, 1.0, 2.0)]
    group = SimpleNamespace(world_size=2, broadcast_object=lambda mine, src: others)
    monkeypatch.setattr(kernel_choice, "get_tp_group", lambda: group)
    assert decide({1: 1.0, 2: 1.0, 4: 1.0}) == 1


def test_the_log_line_names_every_size():
    timings = [Timing(1, 0.5, 0.75), Timing(8, 1.25, 1.0)]
    assert kernel_choice.described(timings) == "1: 0.500 against 0.750 ms, 8: 1.250 against 1.000 ms"
