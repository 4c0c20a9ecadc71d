"""What EESD times and learns of at start-up, beside the made-up requests that vLLM warms a worker up with."""

import contextlib
from types import SimpleNamespace

import pytest

from vllm_eesd.host import cost_profile, worker_seams


class Drafter:
    def __init__(self, order):
        self._order = order

    def profile_costs(self, runner):
        self._order.append("profile")


@pytest.mark.parametrize(
    ("attribute", "expected"),
    # On V1 vLLM then resets the random seed; on V2 its requests come first, which learning would take for a user's.
    [("drafter", ["profile", "vLLM"]), ("speculator", ["vLLM", "profile"])],
)
def test_costs_are_profiled_on_the_right_side_of_vllms_warm_up(attribute, expected):
    order = []

    def original(worker):
        order.append("vLLM")
        return "times"

    runner = SimpleNamespace(drafter=None, speculator=None)
    setattr(runner, attribute, Drafter(order))
    compile_or_warm_up_model = worker_seams._wrap_compile_or_warm_up_model(original)
    assert compile_or_warm_up_model(SimpleNamespace(model_runner=runner)) == "times"
    assert order == expected


@pytest.mark.parametrize("drafter", [None, object()], ids=["no drafter", "a drafter of vLLM's"])
def test_other_workers_are_warmed_up_as_ever(drafter):
    worker = SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter))
    assert worker_seams._wrap_compile_or_warm_up_model(lambda self: self)(worker) is worker


@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_experts_are_not_balanced_by_what_is_only_timed(monkeypatch, release):
    """0.33 keeps its own warm-up out of the expert loads by `eplb.suppress()`; 0.32 has no such thing."""
    state = SimpleNamespace(suppressed=False)

    @contextlib.contextmanager
    def suppress():
        state.suppressed = True
        yield
        state.suppressed = False

    eplb = SimpleNamespace(suppress=suppress) if release == "0.33" else SimpleNamespace()
    seen = []
    monkeypatch.setattr(cost_profile, "_profile", lambda *args: seen.append(state.suppressed))
    runner = SimpleNamespace(eplb=eplb, device=SimpleNamespace(type="cpu"))
    cost_profile.profile_v2_costs(runner, SimpleNamespace(num_speculative_tokens=4), None)
    assert seen == [release == "0.33"] and not state.suppressed
