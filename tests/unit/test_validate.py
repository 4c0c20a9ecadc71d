"""The plan of closed batches, against figures worked out by hand, and against steps it must not have looked at."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vllm_eesd.policy import Calibration, CostModel
from vllm_eesd.simulate.plan_costs import BatchCosts, full_batch_points, pooled
from vllm_eesd.simulate.roofline import Shape, costs_of
from vllm_eesd.simulate.validate import Setting, closed_batches, validate
from vllm_eesd.trace import DenseTrace, RequestTrace

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape.of(24, 192, 4096, intermediate=512, heads=6, kv_heads=2, head_dim=32)


class Linear:
    """A machine that a roofline with nothing but overheads describes."""

    class overheads:
        round_ms = 0.0

    def verify_ms(self, num_reqs, num_drafts):
        return 4.0 + (1.0 if num_drafts else 0.0)

    def draft_step_ms(self, num_reqs):
        return 0.5


def setting(matches, tokens=9):
    """Each request's drafts all match so far; drafts of two, which is as far as it was recorded."""
    requests = [RequestTrace(np.full(20, m), np.full((20, 2), 0.9, dtype=np.float32)) for m in matches]
    trace = DenseTrace("model", "workload", 2, {}, requests, (1.0, 1.0))
    return Setting(trace, Calibration(), "fixed", tokens, SHAPE, 3, 100)


def costing(costs, prompt_ms=0.0, eesd_prompt_share=1.0, plain_share=1.0):
    return BatchCosts(costs, prompt_ms, eesd_prompt_share, plain_share)


def test_a_request_alone():
    """Eight tokens behind the first: rounds of 3, 3 and 2 (one draft is enough for that), each 5 ms and its drafts."""
    costs = costs_of(Linear(), 2, 2)
    assert closed_batches(setting([2]), costing(costs), 1) == pytest.approx(8 * 4 / (6 + 6 + 5.5))
    assert closed_batches(setting([0]), costing(costs), 1) < 1
    assert closed_batches(setting([2]), costing(costs, plain_share=0.75), 1) == pytest.approx(8 * 3 / 17.5)
    assert closed_batches(setting([2]), costing(costs, 10.0), 1) == pytest.approx((10 + 32) / (10 + 17.5))
    assert closed_batches(setting([2]), costing(costs, 10.0, 1.2), 1) == pytest.approx((10 + 32) / (12 + 17.5))


def test_the_slowest_request_of_a_closed_batch_keeps_it_running():
    """Beside one that nothing is accepted for, the other gains nothing: the batch ends when that one does."""
    costs = costing(costs_of(Linear(), 2, 2))
    alone, together = closed_batches(setting([0]), costs, 1), closed_batches(setting([0, 2]), costs, 2)
    assert together == pytest.approx(alone)
    # Two after one another: what the first gains counts.
    assert closed_batches(setting([0, 2]), costs, 1) > alone


def test_copies_are_not_planned_for():
    """The plan is compared with the exit head alone, also where the trace holds texts that repeat themselves."""
    case = replace(setting([0]), policy="goodput")
    (request,) = case.trace.requests
    told = replace(request, prompt=np.array([1]), emitted=np.ones(20, dtype=np.int32))
    with_text = replace(case, trace=replace(case.trace, requests=[told]))
    costs = costing(costs_of(Linear(), 1, 2))
    assert closed_batches(with_text, costs, 1) == closed_batches(case, costs, 1)


def test_modelled_costs_know_nothing_of_the_size_they_predict():
    costs = costs_of(Linear(), 4, 2)
    tripled = costs | {"verify_ms": costs["verify_ms"] | {"2": [[k, 3 * ms] for k, ms in costs["verify_ms"]["2"]]}}
    # Plain vLLM's step takes three quarters of EESD's without drafts; of two requests nobody measured it.
    batches = {size: costing(costs, 1.0, plain_share=0.75) for size in (1, 2, 4)}
    spoilt = {**batches, 2: costing(tripled, 1.0, plain_share=3.0)}
    case = setting([2, 0, 2])
    (honest,), (row,) = (validate(case, some, {2: 1.25}) for some in (batches, spoilt))
    assert row.at_modelled_costs == honest.at_modelled_costs == pytest.approx(honest.at_measured_costs, rel=0.01)
    assert row.at_measured_costs != honest.at_measured_costs
    assert replace(row, measured=0.5 * row.at_measured_costs).errors[0] == pytest.approx(1.0)


def test_a_roofline_is_fitted_to_full_batches_only():
    """Smaller ones are the tails of those: a few steps of a moment, which say little."""
    batches = {size: costing(costs_of(Linear(), size, 2)) for size in (1, 4, 8, 16)}
    tail = batches[8].costs["verify_ms"]
    noisy = {size: curve if size == "8" else [[k, 9 * ms] for k, ms in curve] for size, curve in tail.items()}
    spoilt = {**batches, 8: costing(batches[8].costs | {"verify_ms": noisy})}
    (honest,), (row,) = (validate(setting([2, 0] * 2), some, {4: 1.25}) for some in (batches, spoilt))
    assert row.at_modelled_costs == honest.at_modelled_costs


def test_sixteen_requests_are_found_in_the_cell_they_share():
    """The cost model keeps them under 17, the end of a cell."""
    model = CostModel()
    for drafts in (0, 8, 40):
        for _ in range(3):
            model.observe_verify(16, 16 + drafts, 5.0 + drafts)
            model.observe_draft_step(16, 0.5)
    found = full_batch_points(model.state(), 16)
    assert [tuple(point) for point in found] == [
        (False, 16, 0, 5.0),
        (False, 16, 8, 13.0),
        (False, 16, 40, 45.0),
        (True, 16, 0, 0.5),
    ]
    assert full_batch_points(model.state(), 8) == []


def test_a_moment_that_was_slow_is_outvoted():
    def state(ms, **more):
        return {
            "verify_ms": {"4": [[0, ms], [8, 2 * ms]], **more},
            "draft_step_ms": [[4, ms / 8]],
            "draft_round_ms": [],
        }

    found = pooled([state(4.0), state(40.0), state(5.0, **{"3": [[0, 3.0]]})])
    assert found["verify_ms"] == {"3": [[0, 3.0]], "4": [[0, 5.0], [8, 10.0]]}
    assert found["draft_step_ms"] == [[4, 0.625]] and found["draft_round_ms"] == []
    CostModel().restore(found)


def test_costs_of_too_few_other_sizes_are_refused():
    batches = {size: costing(costs_of(Linear(), size, 2)) for size in (1, 2)}
    with pytest.raises(
        ValueError, match="beside batch 2 hold target steps of 1 batch sizes and draft steps of 1; allo"
    ):
        validate(setting([2]), batches, {2: 1.25})


class Paced:
    """An engine whose prompts and steps take a fixed time, times what the machine is slower by in this call."""

    def __init__(self, clock, prompt_ms, step_ms, slower):
        self.clock, self.prompt_ms, self.step_ms, self.slower = clock, prompt_ms, step_ms, iter(slower)

    def generate(self, prompts, max_tokens, options=None):
        factor = next(self.slower) if options in (None, {"eesd_max_draft_tokens": 0}) and max_tokens in (1, 25) else 1
        self.clock[0] += 1e-3 * factor * (self.prompt_ms + (max_tokens - 1) * self.step_ms)

    def costs(self):
        return {"verify_ms": {"2": [[0, self.step_ms]]}, "draft_step_ms": [], "draft_round_ms": []}

    def forget_prefixes(self):
        pass


def test_pairs_do_not_see_that_the_machine_slows_down(monkeypatch):
    """Three passes of two groups, two calls each: the second three times slower, in the third plain alone tenfold."""
    spec = importlib.util.spec_from_file_location("plan_costs", ROOT / "benchmarks" / "plan_costs.py")
    measuring = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measuring)
    clock = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: clock[0])
    plain = Paced(clock, 20.0, 4.0, [1] * 4 + [3] * 4 + [10] * 4)
    eesd = Paced(clock, 22.0, 5.0, [1] * 4 + [3] * 4 + [1] * 4)
    found = measuring.batch_costs(plain, eesd, [[7]] * 5, 2, 8)
    assert found["plain_share"] == pytest.approx(0.8) and found["eesd_prompt_share"] == pytest.approx(1.1)
    assert found["costs"]["verify_ms"] == {"2": [[0, 5.0]]}
    assert not list(plain.slower) and not list(eesd.slower), "as many passes and groups as this reckons with"
