"""The roofline against figures worked out by hand, the fit against a machine that is known, and the command."""

import json

import numpy as np
import pytest

from vllm_eesd import cli
from vllm_eesd.simulate.fit import FittedRoofline, fit, left_out, points_of
from vllm_eesd.simulate.roofline import GPUS, Overheads, Roofline, Shape, costs_of
from vllm_eesd.simulate.synthetic import SPREADS, synthetic_trace
from vllm_eesd.simulate.world import World
from vllm_eesd.trace import DenseTrace, write_trace

LLAMA_70B = Shape.of(80, 8192, 128256)


def trace(tmp_path, costs=None, **size):
    made = synthetic_trace(SPREADS["medium"], 0.8, **({"num_requests": 4, "num_tokens": 80} | size))
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, DenseTrace(made.model, "synthetic", 8, costs or {}, made.requests))
    return str(path)


def test_llamas_proportions_give_llamas_size():
    assert LLAMA_70B.weights == pytest.approx(70.55e9, rel=1e-3)  # its model card's 70.6 B
    assert LLAMA_70B.kv_heads == 8 and LLAMA_70B.intermediate == 28672


def test_a_plain_step_reads_the_weights_once():
    """bfloat16 Llama-3-70B on four H200: 2 bytes of every weight but the embedding, 4.8 TB/s each: 7.25 ms."""
    machine = Roofline(LLAMA_70B, 6, GPUS["h200"], tp=4, context=1)
    by_hand = (LLAMA_70B.weights - 128256 * 8192) * 2 / 4 / 4.8e12 * 1e3
    assert machine.verify_ms(1, 0) == pytest.approx(by_hand, rel=0.005)
    # Six of eighty layers and the LM head.
    share = (6 * LLAMA_70B.layer_weights + 128256 * 8192) / (80 * LLAMA_70B.layer_weights + 128256 * 8192)
    assert machine.draft_step_ms(1) == pytest.approx(share * by_hand, rel=0.005)


def test_many_tokens_are_bound_by_arithmetic():
    machine = Roofline(LLAMA_70B, 6, GPUS["h200"], context=1)
    more = machine.verify_ms(1024, 1024) - machine.verify_ms(1024, 0)
    assert more == pytest.approx(1024 * 2 * (LLAMA_70B.weights - 128256 * 8192) / 989e12 * 1e3, rel=0.01)
    # The ridge: 989 TFLOPS over 4.8 TB/s are 206 FLOPs a byte, one a token with two-byte weights.
    assert machine.verify_ms(1, 150) == pytest.approx(machine.verify_ms(1, 0), rel=0.01)
    assert machine.verify_ms(1, 400) > 1.8 * machine.verify_ms(1, 0)


def test_context_costs_bandwidth_and_links_cost_time():
    near, far = (Roofline(LLAMA_70B, 6, GPUS["h200"], context=c).verify_ms(32, 0) for c in (1, 8192))
    assert far - near == pytest.approx(32 * 8191 * 80 * 2 * 8 * 128 * 2 / 4.8e12 * 1e3, rel=0.01)
    alone, four = (Roofline(LLAMA_70B, 6, GPUS["l40s"], tp=tp, context=1).verify_ms(8, 0) for tp in (1, 4))
    assert alone / 4 < four < alone


def test_what_is_known_of_overheads_is_added():
    bare = Roofline(LLAMA_70B, 6, GPUS["h100"])
    known = Roofline(LLAMA_70B, 6, GPUS["h100"], reached=0.5, overheads=Overheads(1.0, 0.1, 0.2))
    assert known.verify_ms(4, 4) == pytest.approx(2 * bare.verify_ms(4, 4) + 1)
    assert known.draft_step_ms(4) == pytest.approx(2 * bare.draft_step_ms(4) + 0.1)


def test_the_world_has_the_machines_times():
    machine = Roofline(LLAMA_70B, 6, GPUS["h200"], overheads=Overheads(round_ms=0.3))
    world = World(costs_of(machine, 16, 8))
    for num_reqs, drafts in ((1, 0), (1, 5), (4, 9), (16, 0), (16, 128)):
        assert world.verify_ms(num_reqs, drafts) == pytest.approx(machine.verify_ms(num_reqs, drafts), rel=0.02)
    assert world.draft_step_ms(16) == pytest.approx(machine.draft_step_ms(16))
    assert world.draft_round_ms(16) == pytest.approx(0.3)


def test_the_fit_finds_a_machine_again():
    shape = Shape.of(24, 256, 4096)
    truth = FittedRoofline(shape, 3, "float32", 128, Overheads(0.4, 0.1, 0.0, 0.2), 20.0, 50.0)
    points = points_of(costs_of(truth, 8, 8))
    found = fit(points, shape, 3, "float32", 128)
    assert found.bandwidth_gb_s == pytest.approx(20, rel=1e-3) and found.gflops == pytest.approx(50, rel=1e-3)
    own = found.overheads
    assert (own.step_ms, own.draft_step_ms, own.verify_ms) == pytest.approx((0.4, 0.1, 0.2), rel=1e-3)
    errors = [error for _, error in left_out(points, shape, 3, "float32", 128)]
    assert len(errors) == sum(not point.is_draft for point in points) and np.abs(errors).max() < 1e-3


def test_a_size_the_others_do_not_explain_shows():
    shape = Shape.of(24, 256, 4096)
    truth = FittedRoofline(shape, 3, "float32", 128, Overheads(0.4, 0.1, 0.0, 0.2), 20.0, 50.0)
    costs = costs_of(truth, 8, 8)
    costs["verify_ms"]["4"] = [[drafts, 2 * ms] for drafts, ms in costs["verify_ms"]["4"]]
    worst = max(left_out(points_of(costs), shape, 3, "float32", 128), key=lambda pair: abs(pair[1]))
    assert worst[0].num_reqs == 4 and worst[1] < -0.4


def test_the_command_plans(tmp_path, capsys):
    sizes = ["--layers", "80", "--hidden", "8192", "--vocab", "128256", "--exit-layer", "5", "--batch", "1,256"]
    out = tmp_path / "plan.json"
    machine = ["--gpu", "h200", "--tp", "4", "--context", "32768"]
    assert cli.main(["plan", *sizes, *machine, "--trace", trace(tmp_path), "--json", str(out)]) == 0
    plan = json.loads(out.read_text())
    alone, crowded = plan["rows"]
    assert 1.2 < alone["speedup"] < 4 and alone["fits"] and not crowded["fits"]
    assert alone["best_fixed"] > crowded["best_fixed"]
    assert "NVIDIA H200" in (printed := capsys.readouterr().out) and "upper bound" in printed


def test_measured_mode_says_how_far_the_model_is_off(tmp_path, embedded_model, capsys):
    shape = Shape.read(str(embedded_model))
    truth = FittedRoofline(shape, 3, "float32", 256, Overheads(2.0, 0.2, 0.3), 10.0, 60.0)
    path, out = trace(tmp_path, costs_of(truth, 8, 8)), tmp_path / "plan.json"
    flags = ["--model", str(embedded_model), "--exit-layer", "2", "--gpu", "measured", "--context", "256"]
    assert cli.main(["plan", *flags, "--trace", path, "--json", str(out)]) == 0
    machine = json.loads(out.read_text())["machine"]
    assert machine["left_out_error_max"] < 0.01 and max(map(abs, machine["speedup_errors"].values())) < 0.05
    assert machine["bandwidth_gb_s"] == pytest.approx(10, rel=0.01)
    assert "off by" in capsys.readouterr().out


def test_measured_mode_finds_a_size_in_the_cell_that_it_shares(tmp_path, embedded_model):
    """The cost model keeps 16 requests under 17, the end of a cell."""
    shape = Shape.read(str(embedded_model))
    costs = costs_of(FittedRoofline(shape, 3, "float32", 256, Overheads(2.0, 0.2, 0.3), 10.0, 60.0), 16, 8)
    costs["verify_ms"]["17"] = costs["verify_ms"].pop("16")
    path, out = trace(tmp_path, costs), tmp_path / "plan.json"
    flags = ["--model", str(embedded_model), "--exit-layer", "2", "--gpu", "measured", "--context", "256"]
    assert cli.main(["plan", *flags, "--trace", path, "--batch", "1,16,64", "--json", str(out)]) == 0
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1, 16]


def test_the_model_explains_what_was_measured_on_the_embedded_model(tmp_path, embedded_model):
    """Recorded on a shared machine: single points are far off, so the median is what can be held to something."""
    path, out = embedded_model.parent / "traces" / "held_out_code.jsonl.gz", tmp_path / "plan.json"
    flags = ["--model", str(embedded_model), "--exit-layer", "2", "--gpu", "measured", "--context", "256"]
    assert cli.main(["plan", *flags, "--trace", str(path), "--batch", "1,4,8", "--json", str(out)]) == 0
    machine = json.loads(out.read_text())["machine"]
    assert machine["left_out_error_median"] <= 0.15
    assert set(machine["speedup_errors"]) == {"1", "4", "8"}
    assert max(map(abs, machine["speedup_errors"].values())) <= 0.15


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gpu", "h300"], "--gpu 'h300' is not known; allowed: a100"),
        (["--gpu", "a100", "--dtype", "fp8"], "--dtype 'fp8' is not what a100 computes in; allowed: bfloat16"),
        (["--gpu", "h200", "--exit-layer", "80"], "--exit-layer 80 is out of range: 1 to 79"),
        (["--gpu", "h200", "--reached", "1.5"], "--reached 1.5 is not allowed"),
        (["--gpu", "h200", "--step-overhead-ms", "-1"], "overheads are not allowed to be below 0"),
        (["--gpu", "measured"], "too few measured costs to fit"),
        (["--gpu", "h200", "--model", "/nowhere"], "config.json cannot be used"),
        (["--gpu", "h200", "--policy", "luck"], "policy='luck' is not valid"),
    ],
)
def test_mistakes_are_one_line(tmp_path, flags, complaint, capsys):
    sizes = ["--layers", "80", "--hidden", "8192", "--vocab", "128256", "--exit-layer", "5", "--batch", "1"]
    assert cli.main(["plan", *sizes, "--trace", trace(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_without_sizes_the_missing_one_is_named(tmp_path, capsys):
    flags = ["--gpu", "h200", "--exit-layer", "5", "--layers", "80", "--trace", trace(tmp_path)]
    assert cli.main(["plan", *flags]) == 2
    assert "--hidden is missing" in capsys.readouterr().err
