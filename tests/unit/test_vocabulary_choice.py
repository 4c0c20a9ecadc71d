"""A draft vocabulary by default: what it covers, what it costs, when it is chosen and that a run keeps to it."""

from __future__ import annotations

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eesd.distill import expected, layer_costs, vocabulary_choice
from vllm_eesd.distill import probe as probing
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.expected import MEASURED, choose_vocabulary, closing, lm_head_dominates, most_alike
from vllm_eesd.distill.layer_costs import LayerCosts, lm_head_costs
from vllm_eesd.distill.probe import decide, probe, vocabulary_line
from vllm_eesd.distill.run import run
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.vocabulary import coverage, own_text
from vllm_eesd.distill.vocabulary_choice import can_be_cut
from vllm_eesd.exit_head.checkpoint import TRAINING_NAME, ExitHeadConfig

VOCAB, SEQ_LEN = 1024, 32
#: A layer takes a millisecond, the LM head 4 and, of V / 16 rows, a sixteenth of that; verifying costs one step.
COSTS = LayerCosts([1.0] * 3, 4.0, [8.0] * 9, [(64, 0.25), (1024, 4.0)])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory):
    """Directory of a random Llama whose LM head has more parameters than two of its layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    directory = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, eos_token_id=2, **sizes, **heads)).save_pretrained(directory)
    return directory


@pytest.fixture
def wide_text(tmp_path):
    """Some hundred tokens are nearly all of it."""
    np.random.default_rng(0).geometric(0.03, 20_000).clip(max=900).astype(np.uint16).tofile(tmp_path / "wide.bin")
    return tmp_path / "wide.bin"


def make_args(model, text, output, **changes) -> Namespace:
    given = {"model": str(model), "exit_layer": 1, "data": [str(text)], "output": str(output), "steps": 3}
    return Namespace(**(given | {"batch": 2, "seq_len": SEQ_LEN, "head_layers": 1} | changes))


def covering(size: int, share: float) -> np.ndarray:
    """So many tokens cover a share of the text, evenly; the others, evenly, the rest."""
    first = np.linspace(0, share, size + 1)
    return np.concatenate([first, np.linspace(share, 1, VOCAB - size + 1)[1:]])


def test_coverage_is_of_text_that_was_not_counted():
    halves = [np.array(ids, np.uint16) for ids in ([0, 0, 1, 2], [0, 3, 3, 3])] * 16
    covered = coverage(halves, 5, always=[])
    # Counted in the first: 0, 1, 2, then 3 and 4; of the second they are a quarter, none, none, three quarters. The
    # other way round 3, 0, then 1, 2, 4: none of it, half of it, a quarter, a quarter.
    assert covered.tolist() == [0, (0.25 + 0) / 2, (0.25 + 0.5) / 2, (0.25 + 0.75) / 2, 1, 1]
    assert coverage(halves, 5, always=[4])[1] == 0
    # One text is cut into pieces that take turns; what occurs once is never covered by having been counted.
    once = coverage([np.arange(64, dtype=np.uint16)], 64, always=[])
    assert once[32] == 0 and once[64] == 1


def test_the_targets_own_text_is_what_counts():
    text, own = [np.zeros(9, np.uint16)], np.ones((4, 3), np.uint16)
    assert own_text(TokenData(text)) is text
    assert [row.tolist() for row in own_text(TokenData(text, own))] == own.tolist()


def test_the_size_that_pays_best():
    """Whole: drafts of 1 + 1 + 4 ms. Of 128 tokens that are all of the text: 2.5 ms."""
    choice = choose_vocabulary(covering(128, 1.0), 0.8, COSTS, 1, 1)
    assert choice.size == 128 and choice.coverage == 1 and choice.lm_head_share == pytest.approx(4 / 6)
    assert (choice.draft_ms, choice.whole_draft_ms) == (2.5, 6.0)
    by_hand = max((sum(0.8**i for i in range(k + 1)) * 8 / (2.5 * k + 8), k) for k in range(1, 9))
    assert (choice.speedup, choice.draft_tokens) == (pytest.approx(by_hand[0]), by_hand[1])
    assert choice.whole_speedup < choice.speedup
    # Where the same tokens cover little, more are worth their time, or all.
    assert choose_vocabulary(covering(512, 0.999), 0.8, COSTS, 1, 1).size == 512
    flat = choose_vocabulary(covering(512, 0.5), 0.8, COSTS, 1, 1)
    assert flat.size is None and flat.speedup == flat.whole_speedup and flat.draft_ms == 6


def test_a_vocabulary_that_wins_nothing_is_not_taken():
    cheap = LayerCosts([1.0] * 3, 0.01, [8.0] * 9, [(64, 0.001), (1024, 0.01)])
    assert choose_vocabulary(covering(64, 1.0), 0.8, cheap, 1, 1).size is None


def test_times_of_a_busy_machine_leave_layers_their_share():
    """The LM head took three times as long alone as within a step: a sixteenth of it is a sixteenth of the step's."""
    busy = LayerCosts([1.0] * 3, 4.0, [8.0] * 9, [(64, 0.75), (1024, 12.0)])
    assert busy.draft_ms(1, 1, 64) == COSTS.draft_ms(1, 1, 64) == 2.25
    assert choose_vocabulary(covering(128, 1.0), 0.8, busy, 1, 1).lm_head_share == pytest.approx(4 / 6)


def test_where_no_draft_pays_the_cheapest_is_still_the_best():
    dear = LayerCosts([4.0] * 3, 4.0, [8.0] * 9, [(64, 0.25), (1024, 4.0)])
    choice = choose_vocabulary(covering(64, 1.0), 0.5, dear, 1, 1)
    assert choice.size == 64 and (choice.speedup, choice.whole_speedup, choice.draft_tokens) == (1.0, 1.0, 0)


def test_rows_of_a_quantised_lm_head_cannot_be_gathered(wide_dir):
    target = load_target(str(wide_dir), 1, "cpu")
    assert can_be_cut(target)
    target.config.quantization_config = {"quant_method": "compressed-tensors"}
    assert not can_be_cut(target)
    target = load_target(str(wide_dir), 1, "cpu")
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    assert not can_be_cut(target)


def test_the_lm_head_is_timed_at_several_sizes(wide_dir, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(layer_costs, "_now", lambda tensor: next(clock))
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(layer_costs.F, "linear", lambda x, weight: seen.append(len(weight)) or linear(x, weight))
    measured = lm_head_costs(load_target(str(wide_dir), 1, "cpu"), torch.tensor([3]))
    assert [rows for rows, _ in measured] == [64, 128, 192, 384, 512, 1024] == seen[:6] == seen[-6:]
    assert {ms for _, ms in measured} == {1000.0}


def test_where_the_lm_head_is_most_of_a_draft(wide_dir, model_dir):
    wide, narrow = load_target(str(wide_dir), 1, "cpu"), load_target(str(model_dir), 1, "cpu")
    assert lm_head_dominates(wide, 1, 1) and lm_head_dominates(wide, 2, 1) and not lm_head_dominates(wide, 2, 3)
    assert not lm_head_dominates(narrow, 1, 1)


@pytest.mark.usefixtures("in_bfloat16")
def test_a_run_chooses_and_keeps_its_choice(wide_dir, wide_text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vocabulary_choice, "measure_costs", lambda *_: COSTS)
    head, work = tmp_path / "head", tmp_path / "work"
    assert run(make_args(wide_dir, wide_text, head, work=str(work))) == 0
    size = ExitHeadConfig.load(head).draft_vocab_size
    assert size % 64 == 0 and 64 <= size < 512
    out = capsys.readouterr().out
    assert f"draft vocabulary: the LM head is 67% of a draft step: with {size} of {VOCAB} draft tokens (" in out
    assert f"--draft-vocab {size}" in json.loads((head / TRAINING_NAME).read_text())["command"]
    # Resumed, with other times, it stays what it was.
    monkeypatch.setattr(vocabulary_choice, "measure_costs", lambda *_: pytest.fail("measured again"))
    assert run(make_args(wide_dir, wide_text, head, work=str(work), steps=4)) == 0
    assert ExitHeadConfig.load(head).draft_vocab_size == size


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("changes", [{"draft_vocab": "all"}, {"loss": "ce_text"}, {"head_layers": 3, "exit_layer": 2}])
def test_a_run_that_has_no_choice(wide_dir, wide_text, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(vocabulary_choice, "measure_costs", lambda *_: pytest.fail("nothing is to be chosen"))
    assert run(make_args(wide_dir, wide_text, tmp_path / "head", **changes)) == 0
    assert ExitHeadConfig.load(tmp_path / "head").draft_vocab_size is None


def test_probe_compares_with_and_without(wide_dir, monkeypatch):
    monkeypatch.setattr(probing, "measure_costs", lambda *_: COSTS)
    monkeypatch.setattr(probing, "headless_agreement", lambda *_: [(0.7, 0.7, [0.7**k for k in range(1, 9)])] * 2)
    target, windows = load_target(str(wide_dir), 1, "cpu"), torch.arange(640).view(20, 32) % 50
    results, _ = probe(target, windows, head_layers=1)
    choice = results[0].vocabulary
    assert choice.size == 64 and results[0].distilled_speedup == pytest.approx(choice.speedup)
    assert choice.speedup > choice.whole_speedup
    said = vocabulary_line(results, 1, 1, VOCAB)
    assert said.startswith("at N=1, M=1 the LM head is 67% of a draft step: with 64 of 1024 draft tokens (100.0% of ")
    assert f"predicted {choice.speedup:.2f}x instead of {choice.whole_speedup:.2f}x" in said
    # Windows that overlap are no evidence for each other: every token of this text occurs once. What is left is where
    # the 16 pieces meet; by turns, window by window, half would be covered.
    once = torch.arange(VOCAB).unfold(0, 64, 32)
    covered = []
    monkeypatch.setattr(probing, "choose_vocabulary", lambda share, *_: covered.append(share) or choice)
    probe(target, windows, head_layers=1, counted=once)
    assert covered[0][VOCAB // 2] < 0.2 < 0.5 == coverage(list(once.numpy()), VOCAB, [])[VOCAB // 2]
    many, _ = probe(target, windows, head_layers=9)
    assert many[0].vocabulary is None and vocabulary_line(many, 1, 9, VOCAB) == ""


def test_what_is_expected_was_measured_on_a_named_target():
    embedded, public = (next(head for head in MEASURED if part in head.target) for part in ("embedded", "SmolLM2"))
    assert embedded.gap_closed == pytest.approx(0.49, abs=0.005)
    assert most_alike(9) is embedded and most_alike(8000).target == public.target
    assert closing(0.5, 0.2) == pytest.approx(0.6)
    result = probing.LayerResult(1, 0.2, 0.2, [0.2], 1.0, 1.0, 0, 1.5, 4, 1.2, 2, (1.3, 1.6))
    verdict = decide([result], "M", None, parameters=135)["verdict"]
    assert "predicted 1.50x (1.30x to 1.60x) if the head closes" in verdict and str(most_alike(135)) in verdict


def test_of_several_heads_of_a_target_the_one_trained_on_as_much(monkeypatch):
    heads = tuple(expected.MeasuredHead("T", 100, 1, 2, tokens, 0.1, 0.5) for tokens in (1, 20, 200))
    monkeypatch.setattr(expected, "MEASURED", heads)
    assert [most_alike(50, tokens).tokens for tokens in (None, 2, 30, 1000)] == [200, 1, 20, 200]
