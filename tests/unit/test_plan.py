"""benchmarks/roofline.py against figures worked out by hand, and benchmarks/plan.py."""

import json

import plan
import pytest
from roofline import GPUS, Roofline, Shape, costs_of
from synthetic import SPREADS, synthetic_trace

from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, DraftLayers, write

LLAMA_70B = Shape.of(80, 8192, 128256)


def trace(tmp_path, name="trace", acceptances=SPREADS["medium"], layers=None):
    made = synthetic_trace(acceptances, 0.8, num_requests=4, num_tokens=80)
    path = tmp_path / f"{name}.jsonl.gz"
    write(path, DenseTrace(made.model, "synthetic", 8, {}, made.requests, layers=layers))
    return str(path)


def test_llamas_proportions_give_llamas_size():
    assert LLAMA_70B.weights == pytest.approx(70.55e9, rel=1e-3)  # its model card's 70.6 B
    assert LLAMA_70B.kv_heads == 8 and LLAMA_70B.intermediate == 28672


def test_a_plain_step_reads_the_weights_once():
    """bfloat16 Llama-3-70B on four H200: 2 bytes of every weight but the embedding, 4.8 TB/s each: 7.25 ms."""
    machine = Roofline(LLAMA_70B, 5, 1, GPUS["h200"], tp=4, context=1)
    by_hand = (LLAMA_70B.weights - 128256 * 8192) * 2 / 4 / 4.8e12 * 1e3
    assert machine.verify_ms(1, 0) == pytest.approx(by_hand, rel=0.005)
    # Six of eighty layers and the LM head.
    share = (6 * LLAMA_70B.layer_weights + 128256 * 8192) / (80 * LLAMA_70B.layer_weights + 128256 * 8192)
    assert machine.draft_step_ms(1) == pytest.approx(share * by_hand, rel=0.005)


def test_many_tokens_are_bound_by_arithmetic():
    machine = Roofline(LLAMA_70B, 5, 1, GPUS["h200"], context=1)
    more = machine.verify_ms(1024, 1024) - machine.verify_ms(1024, 0)
    assert more == pytest.approx(1024 * 2 * (LLAMA_70B.weights - 128256 * 8192) / 989e12 * 1e3, rel=0.01)
    # The ridge: 989 TFLOPS over 4.8 TB/s are 206 FLOPs a byte, one a token with two-byte weights.
    assert machine.verify_ms(1, 150) == pytest.approx(machine.verify_ms(1, 0), rel=0.01)
    assert machine.verify_ms(1, 400) > 1.8 * machine.verify_ms(1, 0)


def test_context_costs_bandwidth_and_links_cost_time():
    near, far = (Roofline(LLAMA_70B, 5, 1, GPUS["h200"], context=c).verify_ms(32, 0) for c in (1, 8192))
    assert far - near == pytest.approx(32 * 8191 * 80 * 2 * 8 * 128 * 2 / 4.8e12 * 1e3, rel=0.01)
    alone, four = (Roofline(LLAMA_70B, 5, 1, GPUS["l40s"], tp=tp, context=1).verify_ms(8, 0) for tp in (1, 4))
    assert alone / 4 < four < alone


def test_what_is_known_of_overheads_is_added():
    bare = Roofline(LLAMA_70B, 5, 1, GPUS["h100"])
    known = Roofline(LLAMA_70B, 5, 1, GPUS["h100"], reached=0.5, step_overhead_ms=1.0, draft_overhead_ms=0.1)
    assert known.verify_ms(4, 4) == pytest.approx(2 * bare.verify_ms(4, 4) + 1)
    assert known.draft_step_ms(4) == pytest.approx(2 * bare.draft_step_ms(4) + 0.1)


def test_a_head_of_several_layers_costs_as_many():
    """Trained layers run like the target's own, but they and their KV come on top of what it holds."""
    one, two = (Roofline(LLAMA_70B, n, m, GPUS["h200"], tp=4) for n, m in ((5, 1), (4, 2)))
    assert two.draft_step_ms(8) == one.draft_step_ms(8)
    added = two.memory_gb(8) - one.memory_gb(8)
    assert added * 4e9 == pytest.approx(2 * LLAMA_70B.layer_weights + 8 * 1024 * LLAMA_70B.kv_bytes)


def test_filling_the_heads_kv_costs_every_step_but_a_plain_one(tmp_path):
    """An 8B target, a head of two layers, five states: 5 * 4096 in, keys and values of 8 heads of 128 each out."""
    shape = Shape.of(32, 4096, 128256)
    bare, filled = (Roofline(shape, 1, 2, GPUS["h200"], context=1, fill_states=states) for states in (0, 5))
    weights = 5 * 4096 * 2 * (2 * 8 * 128)
    assert filled.verify_ms(1, 0) - filled.plain_ms(1) == pytest.approx(2 * weights / 4.8e12 * 1e3)
    assert filled.plain_ms(8) == bare.plain_ms(8) == bare.verify_ms(8, 0)
    assert filled.draft_step_ms(8) == bare.draft_step_ms(8)
    assert (filled.memory_gb(8) - bare.memory_gb(8)) * 1e9 == pytest.approx(2 * weights)
    # A head that is never right: every speedup is what is left after the fill.
    args = ["--layers", "32", "--hidden", "4096", "--vocab", "128256", "--exit-layer", "1", "--head-layers", "2"]
    args += ["--gpu", "h200", "--batch", "1", "--policy", "fixed", "--trace", trace(tmp_path, acceptances=(0.01,))]
    rows = {}
    for aux in ("0", "20"):
        assert plan.main([*args, "--aux-layers", aux, "--json", str(tmp_path / "plan.json")]) == 0
        rows[aux] = json.loads((tmp_path / "plan.json").read_text())["rows"][0]
    assert rows["0"]["plain_ms"] == rows["20"]["plain_ms"] and rows["20"]["best_fixed"] == 0
    assert 0.9 < rows["20"]["best_fixed_speedup"] < rows["0"]["best_fixed_speedup"] < 1


def test_the_world_has_the_machines_times():
    machine = Roofline(LLAMA_70B, 5, 1, GPUS["h200"], round_overhead_ms=0.3)
    world = World(costs_of(machine, 16, 8))
    for num_reqs, drafts in ((1, 0), (1, 5), (4, 9), (16, 0), (16, 128)):
        assert world.verify_ms(num_reqs, drafts) == pytest.approx(machine.verify_ms(num_reqs, drafts), rel=0.02)
    assert world.draft_step_ms(16) == pytest.approx(machine.draft_step_ms(16))
    assert world.draft_round_ms(16) == pytest.approx(0.3)


def test_the_command_plans(tmp_path, capsys):
    sizes = ["--layers", "80", "--hidden", "8192", "--vocab", "128256", "--batch", "1,256"]
    sizes += ["--exit-layer", "4", "--head-layers", "2"]
    out = tmp_path / "plan.json"
    machine = ["--gpu", "h200", "--tp", "4", "--context", "32768"]
    assert plan.main([*sizes, *machine, "--trace", trace(tmp_path), "--json", str(out)]) == 0
    alone, crowded = json.loads(out.read_text())["rows"]
    assert 1.2 < alone["speedup"] < 4 and alone["fits"] and not crowded["fits"]
    assert alone["best_fixed"] > crowded["best_fixed"]
    assert alone["exit_layer"] == 4 and alone["head_layers"] == 2
    assert "NVIDIA H200" in (printed := capsys.readouterr().out) and "upper bound" in printed


def test_of_several_heads_it_says_which_to_train(tmp_path, capsys):
    """N is as deep as it was recorded; what drafts better for more layers wins where layers cost least."""
    shallow = trace(tmp_path, "shallow", (0.2,), DraftLayers(exit=0, head=1, target=12))
    deep = trace(tmp_path, "deep", (0.9,), DraftLayers(exit=1, head=2, target=12))
    out = tmp_path / "plan.json"
    sizes = ["--layers", "32", "--hidden", "4096", "--vocab", "128256", "--batch", "1,8", "--gpu", "h100"]
    assert plan.main([*sizes, "--trace", shallow, deep, "--draft-vocab", "32k", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["batch"], row["exit_layer"], row["head_layers"]) for row in rows] == [
        (1, 0, 1),
        (1, 3, 2),
        (8, 0, 1),
        (8, 3, 2),
    ]
    assert rows[1]["head_speedup"] > rows[0]["head_speedup"] and rows[1]["draft_step_ms"] > 2 * rows[0]["draft_step_ms"]
    train = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("train: "))
    assert train.startswith("train: --exit-layer 3 --head-layers 2 for batch 1 (")
    whole = Roofline(Shape.of(32, 4096, 128256), 3, 2, GPUS["h100"])
    assert rows[1]["draft_step_ms"] < whole.draft_step_ms(1)


def test_a_draft_vocabulary_costs_its_rows():
    whole, part = (Roofline(LLAMA_70B, 0, 1, GPUS["h200"], draft_vocab=v) for v in (None, 32064))
    saved = whole.draft_step_ms(1) - part.draft_step_ms(1)
    assert saved == pytest.approx((128256 - 32064) * 8192 * 2 / 4.8e12 * 1e3)
    assert part.verify_ms(4, 4) == whole.verify_ms(4, 4)
    # A parallel drafter's seven tokens in one pass: the weights are read once.
    assert part.draft_step_ms(1, 7) == pytest.approx(part.draft_step_ms(1), rel=0.01)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gpu", "h300"], "--gpu 'h300' is not known; allowed: a100"),
        (["--gpu", "a100", "--dtype", "fp8"], "--dtype 'fp8' is not what a100 computes in; allowed: bfloat16"),
        (["--gpu", "h200", "--exit-layer", "80"], "--exit-layer 80 is out of range: 0 to 79"),
        (["--gpu", "h200", "--exit-layer", "0", "--headless"], "--exit-layer 0 is out of range: 1 to 79"),
        (["--gpu", "h200", "--reached", "1.5"], "--reached 1.5 is not allowed"),
        (["--gpu", "h200", "--step-overhead-ms", "-1"], "overheads and --aux-layers are not allowed to be below 0"),
        (["--gpu", "measured"], "--gpu 'measured' is not known; allowed: a100"),
        (["--gpu", "h200", "--draft-vocab", "200k"], "--draft-vocab 200000 is more than the vocabulary, 128256"),
        (["--gpu", "h200", "--model", "/nowhere"], "config.json cannot be used"),
        (["--gpu", "h200", "--policy", "luck"], "policy='luck' is not valid"),
    ],
)
def test_mistakes_are_one_line(tmp_path, flags, complaint, capsys):
    sizes = ["--layers", "80", "--hidden", "8192", "--vocab", "128256", "--exit-layer", "5", "--batch", "1"]
    assert plan.main([*sizes, "--trace", trace(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_what_drafted_must_be_known(tmp_path, capsys):
    sizes = ["--layers", "80", "--hidden", "8192", "--vocab", "128256", "--batch", "1", "--gpu", "h200"]
    assert plan.main([*sizes, "--trace", trace(tmp_path)]) == 2
    assert "does not say what drafted" in capsys.readouterr().err


def test_without_sizes_the_missing_one_is_named(tmp_path, capsys):
    flags = ["--gpu", "h200", "--exit-layer", "5", "--layers", "80", "--trace", trace(tmp_path)]
    assert plan.main([*flags]) == 2
    assert "--hidden is missing" in capsys.readouterr().err
