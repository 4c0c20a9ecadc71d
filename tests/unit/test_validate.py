"""The plan of closed batches, against figures worked out by hand, and against steps it must not have looked at."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_eesd.policy import Calibration
from vllm_eesd.simulate.roofline import Shape, costs_of
from vllm_eesd.simulate.validate import Setting, closed_batches, validate
from vllm_eesd.trace import DenseTrace, RequestTrace

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


def test_a_request_alone():
    """Eight tokens behind the first: rounds of 3, 3 and 2 (one draft is enough for that), each 5 ms and its drafts."""
    costs = costs_of(Linear(), 2, 2)
    assert closed_batches(setting([2]), costs, 1, 0.0, 4.0) == pytest.approx(8 * 4 / (6 + 6 + 5.5))
    assert closed_batches(setting([0]), costs, 1, 0.0, 4.0) < 1
    # The prompt takes as long with drafts as without.
    assert closed_batches(setting([2]), costs, 1, 0.0, 3.0) == pytest.approx(8 * 3 / 17.5)
    assert closed_batches(setting([2]), costs, 1, 10.0, 4.0) == pytest.approx((10 + 32) / (10 + 17.5))


def test_the_slowest_request_of_a_closed_batch_keeps_it_running():
    """Beside one that nothing is accepted for, the other gains nothing: the batch ends when that one does."""
    costs = costs_of(Linear(), 2, 2)
    alone, together = (
        closed_batches(setting([0]), costs, 1, 0.0, 4.0),
        closed_batches(setting([0, 2]), costs, 2, 0.0, 4.0),
    )
    assert together == pytest.approx(alone)
    # Two after one another: what the first gains counts.
    assert closed_batches(setting([0, 2]), costs, 1, 0.0, 4.0) > alone


def test_modelled_costs_know_nothing_of_the_size_they_predict():
    costs = costs_of(Linear(), 4, 2)
    spoilt = costs | {"verify_ms": costs["verify_ms"] | {"2": [[k, 3 * ms] for k, ms in costs["verify_ms"]["2"]]}}
    # Plain vLLM's step takes three quarters of EESD's without drafts; of two requests nobody measured it.
    case, plain = setting([2, 0, 2]), {1: (1.0, 3.0), 2: (1.0, 3.0), 4: (1.0, 3.0)}
    spoilt_plain = plain | {2: (1.0, 9.0)}
    (honest,), (row,) = (
        validate(case, some, times, {2: 1.25}) for some, times in ((costs, plain), (spoilt, spoilt_plain))
    )
    assert row.at_modelled_costs == honest.at_modelled_costs == pytest.approx(honest.at_measured_costs, rel=0.01)
    assert row.at_measured_costs != honest.at_measured_costs
    assert replace(row, measured=0.5 * row.at_measured_costs).errors[0] == pytest.approx(1.0)


def test_costs_of_one_size_only_are_refused():
    costs = costs_of(Linear(), 2, 2)
    few = costs | {"draft_step_ms": [[2, 0.5]]}
    with pytest.raises(ValueError, match="steps of 2 requests only; allowed: target and draft steps of other sizes"):
        validate(setting([2]), few, {2: (1.0, 4.0)}, {2: 1.25})
