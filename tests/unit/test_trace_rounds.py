"""benchmarks/gpu/trace_rounds.py without a GPU: what it reads from a profiler's trace."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def trace_rounds():
    sys.path.append(str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("trace_rounds", BENCHMARKS / "gpu" / "trace_rounds.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def event(category, name, begin, end, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "args": arguments}


def test_kernels_gaps_and_waits_are_told_apart(trace_rounds):
    """Two rounds: a graph of the target with two kernels that overlap, then a draft step and a wait for it."""
    events = [{"ph": "M", "name": "process_name"}]
    for number in range(2):
        start, target, draft = 1000.0 * number, 2 * number, 2 * number + 1
        events += [
            event("cuda_runtime", "cudaGraphLaunch", start, start + 10, target),
            event("kernel", "gemm", start + 20, start + 120, target),
            event("kernel", "norm", start + 100, start + 140, target),
            event("user_annotation", trace_rounds.DRAFTING, start + 150, start + 300),
            event("cuda_runtime", "cudaLaunchKernel", start + 160, start + 165, draft),
            event("kernel", "draft", start + 200, start + 260, draft),
            event("cuda_runtime", "cudaEventSynchronize", start + 170, start + 265),
        ]
    rounds = trace_rounds.summarise(events, 2)
    assert rounds.span_ms == pytest.approx((1260 - 20) / 2e3)
    assert rounds.busy_ms == pytest.approx((120 + 60) / 1e3)
    assert rounds.gap_ms == pytest.approx(rounds.span_ms - rounds.busy_ms)
    assert rounds.draft_ms == pytest.approx(0.06)
    assert (rounds.kernels, rounds.draft_kernels) == (3, 1)
    assert (rounds.launches, rounds.draft_launches, rounds.waits) == (2, 1, 1)
    assert rounds.wait_ms == pytest.approx(0.095)
    assert [name for _, name in rounds.slowest] == ["gemm", "draft", "norm"]
    printed = trace_rounds.table([{"policy": "fixed", "batch": 1} | rounds._asdict()])
    assert "| fixed | 1 | 0.62 |" in printed and "0.100  gemm" in printed


def test_a_trace_without_kernels_is_refused(trace_rounds):
    with pytest.raises(ValueError, match="holds no kernel"):
        trace_rounds.summarise([event("cpu_op", "aten::add", 0, 1)], 1)


def test_the_hosts_time_is_whose_python_spent_it(trace_rounds):
    """A numpy call counts for EESD, which made it; what torch calls of its own is nobody's."""
    policy, runner = ("x/vllm_eesd/policy/goodput.py", 1, "begin"), ("x/vllm/v1/worker/gpu/model_runner.py", 2, "step")
    torch_ops, array, launch = ("x/torch/_ops.py", 3, "call"), ("~", 0, "<array>"), ("~", 0, "<launch>")
    stats = {
        runner: (2, 2, 0.004, 0.03, {}),
        policy: (2, 2, 0.002, 0.008, {runner: (2, 2, 0.002, 0.008)}),
        array: (9, 9, 0.007, 0.007, {policy: (6, 6, 0.006, 0.006), torch_ops: (3, 3, 0.001, 0.001)}),
        torch_ops: (2, 2, 0.003, 0.02, {runner: (2, 2, 0.003, 0.02)}),
        launch: (2, 2, 0.016, 0.016, {torch_ops: (2, 2, 0.016, 0.016)}),
    }
    found = trace_rounds.host_parts(stats, 2)
    assert found == {trace_rounds.OTHER_CODE: 8.5, "EESD": 4.0, "runner": 3.5}
    rounds = trace_rounds.summarise([event("kernel", "gemm", 0, 100)], 1)
    row = {"policy": "fixed", "batch": 1} | rounds._asdict() | {"wall_ms": 5.0, "host_ms": found}
    printed = trace_rounds.table([row])
    assert "without a profiler 5.00 ms a round" in printed and "EESD 4.00" in printed
