"""models/make/train_drafters.py: EAGLE's unrolling is what drafting does, and what is written is what was trained."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eesd.distill.model import load_head
from vllm_eesd.distill.target import Target

SCRIPT = Path(__file__).resolve().parents[2] / "models" / "make" / "train_drafters.py"
#: Sums in another order, in float32.
ROUNDING = 1e-5
#: Weights are written in bfloat16, which keeps 8 bits.
BFLOAT16 = 0.05


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_drafters", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "sdpa"
    return Target(LlamaForCausalLM(config), 2)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_unrolling_is_drafting_on_its_own_features(script, target, ids, monkeypatch):
    """The nth unrolling's output at a position is the head's, run over the target's features but the last n - 1."""
    head = script.EagleHead(target)
    for parameter in (head.layer.self_attn.o_proj.weight, head.layer.mlp.down_proj.weight):
        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    _, features, _ = target(ids)
    unrolled = head(target, ids, features)
    assert len(unrolled) == 3
    monkeypatch.setattr(script, "UNROLLED", 1)
    for last in range(2, 6):
        drafted = features[:, : last + 2].clone()
        for step, predicted in enumerate(unrolled):
            (alone,) = head(target, ids[:, : last + 2], drafted)
            torch.testing.assert_close(alone[:, -1], predicted[:, last], rtol=ROUNDING, atol=ROUNDING)
            # Drafting one step later from here: the position before the last becomes a predicted one, and so on.
            for back in range(step + 1):
                drafted[:, last - back] = unrolled[step - back][:, last - back - 1]


def one_pass(script, target, ids, late=False):
    """Return the target's pass over `ids`, whose drafts begin at positions 0, 2 and 5."""
    with torch.no_grad():
        _, arguments = target.embed(ids)
        *states, last = target.layer_inputs(ids)
        hidden = target.model.model.norm(last)
    return script.Pass(ids, states, hidden, arguments, torch.tensor([0, 0, 2, 2, 2, 5, 5]), late)


@pytest.mark.parametrize("name", ["n0m2", "n1m1:tv", "n2m1:early", "n1m2a2-3:early+tv", "draft_model", "eagle@2"])
def test_everything_but_embedding_and_lm_head_learns(script, target, ids, name):
    drafter = script.new_drafter(target, name)
    drafter.loss(target, one_pass(script, target, ids)).backward()
    # At its start EAGLE's layer adds nothing, so what feeds its outputs has no gradient yet; the outputs have.
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


@torch.no_grad()
def test_recipes_change_what_they_say(script, target, ids):
    """`tv` changes the last steps alone, `early` weighs a position by its place in its draft."""
    early, late = (one_pass(script, target, ids, late) for late in (False, True))
    loss = {name: script.new_drafter(target, name).loss for name in ("n1m1", "n1m1:tv", "n1m1:early")}
    assert loss["n1m1"](target, early) == loss["n1m1:tv"](target, early) == loss["n1m1"](target, late)
    assert 0 < loss["n1m1:tv"](target, late) < 1  # a distance of distributions
    hidden = script.new_drafter(target, "n1m1").head(
        early.states[1], early.target_hidden, early.rotary, early.block_starts
    )
    log_q, log_p = (target.lm_head(state).log_softmax(-1) for state in (hidden, early.target_hidden))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    weights = torch.tensor([math.exp(-place / 4) for place in (0, 1, 0, 1, 2, 0, 1)]).expand_as(divergence)
    expected = (divergence * weights).sum() / weights.sum()
    torch.testing.assert_close(loss["n1m1:early"](target, early), expected, rtol=ROUNDING, atol=ROUNDING)


@torch.no_grad()
def test_a_round_begins_behind_each_mistake(script, target, ids):
    right, wrong = True, False
    matches = torch.tensor([[right, wrong, right, right, wrong, wrong, right], [right] * 7])
    assert script.round_starts(matches).tolist() == [[0, 0, 2, 2, 2, 5, 6], [0] * 7]
    assert script.round_starts(torch.ones(1, 10, dtype=torch.bool)).tolist() == [[0] * 8 + [8] * 2]
    drafter, step = script.new_drafter(target, "n1m1:rounds"), one_pass(script, target, ids)
    own = drafter.own_rounds(step)
    alone = [
        script.Pass(
            ids[i : i + 1],
            [s[i : i + 1] for s in step.states],
            step.target_hidden[i : i + 1],
            step.arguments,
            own.block_starts[i],
            False,
        )
        for i in range(2)
    ]
    first, second = (drafter.loss(target, one) for one in alone)
    torch.testing.assert_close(drafter.loss(target, own), (first + second) / 2, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", ["n1", "n1m1:none", "draft_model:tv", "eagle@", "n1m1@x"])
def test_what_is_no_drafter_is_refused(script, target, name):
    with pytest.raises(ValueError, match="is no drafter"):
        script.new_drafter(target, name)


def test_the_exported_head_is_the_trained_one(script, target, ids, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MODEL", str(tmp_path / "target"))
    target.model.save_pretrained(script.MODEL)
    drafter = script.new_drafter(target, "n1m2a3")
    drafter.export(target, tmp_path / "head")
    step = one_pass(script, target, ids)
    inputs = torch.cat([step.states[1], step.states[3]], -1), step.target_hidden, step.rotary, step.block_starts
    loaded = load_head(Target(target.model, 1, [3]), tmp_path / "head")
    torch.testing.assert_close(loaded(*inputs), drafter.head(*inputs), rtol=BFLOAT16, atol=BFLOAT16)


def test_the_exported_draft_model_is_the_trained_one(script, target, ids, tmp_path):
    draft = script.DraftModel(target)
    assert len(draft.layers) == 3  # the two a draft step runs and one instead of the exit head
    draft.export(target, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        hidden, arguments = target.embed(ids)
        for layer in draft.layers:
            hidden = layer(hidden, **arguments)
        expected = target.lm_head(draft.norm(hidden))
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=BFLOAT16, atol=BFLOAT16 * expected.abs().max())


def test_the_exported_eagle_head_has_the_names_that_vllm_loads(script, target, tmp_path):
    """EagleLlamaForCausalLM puts `model.` before each; embedding and LM head it takes from the target."""
    script.EagleHead(target).export(target, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names
    assert not any("input_layernorm" in name or "embed" in name or "lm_head" in name for name in names)


@pytest.fixture
def small_run(script, target, tmp_path, monkeypatch):
    """What `train` and `export` are given: a saved target of 64 tokens, conversations, windows of 8 tokens."""
    monkeypatch.setattr(script, "SEQ_LEN", 8)
    target.model.save_pretrained(tmp_path / "target")
    data = tmp_path / "talk.jsonl"
    lines = ({"messages": [], "ids": [n % 64 for n in range(start, start + 20)], "answers": []} for start in range(9))
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"drafters": ["n1m1", "draft_model", "eagle@2"], "target": str(tmp_path / "target"), "data": data}
    given |= {"work": tmp_path / "work", "output": None, "tokens": 64, "minutes": None, "batch": 2, "seed": 0}
    given |= {"compile": False, "own": None, "self_generate": 0, "generator": "transformers"}
    return argparse.Namespace(**given)


def test_any_llama_is_a_target_and_conversations_are_data(script, small_run, monkeypatch, in_bfloat16):
    """Trained, gone on with, and exported to what vLLM loads, wherever bfloat16 is multiplied in hardware or not."""
    monkeypatch.setattr(script, "_device", lambda: "cpu")
    small_run.tokens = 32
    script.train(small_run)
    small_run.tokens = 64
    script.train(small_run)  # resumes
    script.export(small_run)
    peers = Path(small_run.target) / "peers"
    kept = [json.loads((peers / name / "training.json").read_text()) for name in ("n1m1", "draft_model", "eagle")]
    assert {record["tokens"] for record in kept} == {64}
    start = load_file(Path(small_run.target) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    trained = load_file(peers / "draft_model" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].float()
    assert not torch.equal(trained, start.to(torch.bfloat16).float())
    assert json.loads((peers / "eagle" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.usefixtures("in_bfloat16")
def test_minutes_end_a_run_whose_tokens_would_take_longer(script, small_run, monkeypatch):
    now = iter(range(0, 10_000, 15))  # every look at the clock finds it 15 s later
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    monkeypatch.setattr(script, "_device", lambda: "cpu")
    small_run.tokens, small_run.minutes = 16_000, 2.0
    script.train(small_run)
    run = torch.load(small_run.work / "drafters.pt", weights_only=True)["run"]
    assert 120 <= run["seconds"] <= 150 and 0 < run["step"] < 10
    script.train(small_run)
    again = torch.load(small_run.work / "drafters.pt", weights_only=True)["run"]
    assert again["step"] == run["step"]  # its minutes are over


def test_a_run_stands_where_its_tokens_or_its_minutes_say(script):
    run = {"step": 30, "seconds": 60.0}
    assert script.place_of(run, 100, None) == script.place_of(run, 100, 4.0) == 30
    assert script.place_of(run, 100, 2.0) == 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', r'talk.jsonl:2: not a conversation; allowed: {"ids"'),
        ("[1]", "talk.jsonl:2: not a conversation"),
        ("no JSON", "talk.jsonl:2: not a conversation"),
        ('{"ids": [1, 64]}', "talk.jsonl:2: ids must be a list of whole numbers from 0 to 63"),
        ('{"ids": [[1]]}', "talk.jsonl:2: ids must"),
        ('{"ids": [1]}', "talk.jsonl: 2 tokens, more than 512 are needed"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(script, tmp_path, line, message):
    path = tmp_path / "talk.jsonl"
    path.write_text('{"ids": [1]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        script.conversation_ids(path, 64)
    assert "\n" not in str(error.value)


def test_a_target_of_another_kind_is_refused(script, small_run, monkeypatch):
    config = Path(small_run.target) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"qwen3"'))
    with pytest.raises(ValueError, match="is of the kind 'qwen3'; allowed: llama"):
        script.drafters_of(small_run)
