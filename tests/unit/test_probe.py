"""`eesd probe` on tiny random targets: what it measures is what drafting would see, and the verdict follows from it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch

from vllm_eesd.distill import probe as probing
from vllm_eesd.distill.layer_costs import LayerCosts, measure_costs
from vllm_eesd.distill.losses import CHUNK_LOGITS
from vllm_eesd.distill.probe import LayerResult, best_speedup, decide, headless_agreement, probe, run
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.text import own_text

VOCAB, LAYERS, SEQ_LEN = 64, 4, 32
# Sums of a few hundred float32 terms in another order.
FLOAT32_TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(model_dir):
    return load_target(str(model_dir), 1, "cpu")


@pytest.fixture
def windows():
    return torch.randint(VOCAB, (5, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def make_args(model_dir, **changes) -> Namespace:
    given = {"model": str(model_dir), "text": None, "windows": 3, "seq_len": SEQ_LEN, "json": None, "plot": None}
    given |= {"head_layers": 1, "chat_template": None}
    return Namespace(**(given | changes))


def make_result(exit_layer, headless=1.0, distilled=1.0) -> LayerResult:
    return LayerResult(exit_layer, 0.5, 0.5, [0.5], 1.0, headless, 4, distilled, 3, 1.0, 0)


@torch.no_grad()
def test_agreement_is_transformers_own(target, windows):
    output = target.model(windows, output_hidden_states=True)
    chosen, p = output.logits.argmax(-1), output.logits.softmax(-1)
    measured = headless_agreement(target, windows)
    assert len(measured) == LAYERS - 1
    for n, (agreement, overlap, leading) in enumerate(measured, start=1):
        logits = target.lm_head(target.model.model.norm(output.hidden_states[n]))
        match = logits.argmax(-1) == chosen
        assert agreement == pytest.approx(match.double().mean().item())
        shared = torch.minimum(p, logits.softmax(-1)).sum(-1).mean().item()
        assert overlap == pytest.approx(shared, abs=FLOAT32_TOLERANCE)
        for depth in range(8):
            runs = [row[i : i + depth + 1].all().item() for row in match for i in range(SEQ_LEN - 7)]
            assert leading[depth] == pytest.approx(np.mean(runs))


def test_chunks_change_nothing(target, windows, monkeypatch):
    whole = headless_agreement(target, windows)
    monkeypatch.setattr(probing, "CHUNK_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(probing, "CHUNK_STATES", 1)
    for one, other in zip(whole, headless_agreement(target, windows), strict=True):
        assert one[0] == other[0] and one[2] == other[2]
        assert one[1] == pytest.approx(other[1], abs=FLOAT32_TOLERANCE)


def test_memory_does_not_grow_with_the_windows(target, windows, monkeypatch):
    """Never more rows at once than the bound allows, nor more logits."""
    rows_seen, logits_seen = [], []
    walk, head = target.layer_inputs, probing.float_head(target)
    monkeypatch.setattr(target, "layer_inputs", lambda rows: rows_seen.append(len(rows)) or walk(rows))
    monkeypatch.setattr(probing, "float_head", lambda _: lambda x: logits_seen.append(head(x).numel()) or head(x))
    monkeypatch.setattr(probing, "CHUNK_STATES", 2 * (LAYERS + 1) * SEQ_LEN * 32)
    headless_agreement(target, windows.repeat(4, 1))
    assert set(rows_seen) == {2}
    assert max(logits_seen) <= CHUNK_LOGITS


def test_costs_are_of_every_layer(target):
    costs = measure_costs(target, 8)
    assert len(costs.layer_ms) == LAYERS and min(costs.layer_ms) > 0 and costs.outer_ms > 0
    assert len(costs.verify_ms) == 9 and costs.verify_ms == sorted(costs.verify_ms)
    costs = LayerCosts([1.0, 2.0, 4.0], 0.5, [7.5, 8.0])
    assert [costs.draft_ms(n) for n in (1, 2, 3)] == [1.5, 3.5, 7.5]


@pytest.mark.parametrize(
    ("leading", "draft_ms", "verify_ms", "expected"),
    [
        ([1.0, 1.0], 1.0, [10.0, 10.0, 10.0], (30 / 12, 2)),
        ([1.0, 0.0], 1.0, [10.0, 10.0, 10.0], (20 / 11, 1)),
        ([0.0, 0.0], 1.0, [10.0, 10.0, 10.0], (1.0, 0)),
        ([0.9, 0.8], 9.0, [10.0, 11.0, 12.0], (1.0, 0)),
        ([0.5, 0.4], 1.0, [10.0, 10.0, 30.0], (15 / 11, 1)),
    ],
)
def test_best_speedup(leading, draft_ms, verify_ms, expected):
    speedup, length = best_speedup(leading, draft_ms, verify_ms)
    assert (speedup, length) == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize(
    ("results", "words", "command"),
    [
        ([make_result(1, 1.0, 1.05)], "not worth it", "vllm serve M"),
        ([make_result(1, 1.0, 1.2), make_result(2, 1.0, 1.4)], "distilling at N=2", "eesd distill M --exit-layer 2"),
        ([make_result(1, 1.5, 1.55), make_result(2, 1.2, 1.5)], "use headless at N=1", '"exit_layer": 1'),
        ([make_result(1, 1.2, 1.5)], "distilling at N=1", "--data 'a b.txt' -o HEAD"),
    ],
)
def test_verdict(results, words, command):
    verdict = decide(results, "M", ["a b.txt"])
    assert words in verdict["verdict"] and command in verdict["next"]


def test_a_head_of_several_layers_is_charged_for_them(target, windows, monkeypatch):
    """A layer takes a millisecond, all else nothing: behind N layers M more."""
    costs = LayerCosts([1.0] * LAYERS, 0.0, [float(LAYERS)] * 9)
    monkeypatch.setattr(probing, "measure_costs", lambda *args: costs)
    drafts = []
    best = probing.best_speedup
    monkeypatch.setattr(
        probing, "best_speedup", lambda leading, ms, verify: drafts.append(ms) or best(leading, ms, verify)
    )
    results, _ = probe(target, windows, head_layers=2)
    # From each layer headless and distilled: greedy, drawn, and greedy at both ends of the range.
    assert drafts == [1, *[3] * 4, 2, *[4] * 4, 3, *[5] * 4]
    results = [*results[:2], make_result(3, 1.0, 9.0)]
    assert "--exit-layer 3 --head-layers 2" in decide(results, "M", None, head_layers=2)["next"]


def test_a_model_whose_last_layers_do_nothing_is_headless(model_dir, tmp_path):
    """LayerSkip's ideal: layers 1.. add nothing, so layer 1 already says what the target says."""
    target = load_target(str(model_dir), 1, "cpu")
    with torch.no_grad():
        for layer in target.model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    results, _ = probe(target, own_text(target, 4, SEQ_LEN))
    assert results[0].agreement == 1.0 and results[0].matches_per_position == [1.0] * 8
    assert results[0].overlap == pytest.approx(1, abs=FLOAT32_TOLERANCE)


def test_own_text_is_the_targets_and_repeatable(target):
    text = own_text(target, 3, SEQ_LEN)
    assert text.shape == (3, SEQ_LEN) and torch.equal(text, own_text(target, 3, SEQ_LEN))
    assert len(set(map(tuple, text.tolist()))) == 3


def test_run_prints_and_writes(model_dir, tmp_path, capsys):
    plot = tmp_path / "new" / "probe.svg"
    pytest.importorskip("matplotlib")
    (tmp_path / "out.json").write_text("of an earlier run")
    assert run(make_args(model_dir, json=str(tmp_path / "out.json"), plot=str(plot))) == 0
    out = capsys.readouterr().out
    assert "verdict: " in out and "\nnext: " in out
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert [layer["exit_layer"] for layer in outcome["layers"]] == [1, 2, 3]
    assert outcome["next"] in out and len(outcome["costs"]["layer_ms"]) == LAYERS
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere"}, ("model", "/nowhere")),
        ({"text": ["/nowhere.bin"]}, ("/nowhere.bin", "no such file")),
        ({"seq_len": 4_000}, ("seq_len", "4000", "128")),
        ({"plot": "probe.gif"}, ("plot", ".png")),
        ({"json": "/proc/nowhere/out.json"}, ("output", "cannot write")),
    ],
)
def test_refusals(model_dir, changes, words):
    with pytest.raises(ValueError) as caught:
        run(make_args(model_dir, **changes))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_plot_without_matplotlib_is_refused_first(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="matplotlib is not installed"):
        run(make_args(model_dir, model="/nowhere", plot="probe.png"))
