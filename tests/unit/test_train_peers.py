"""models/make/train_peers.py: EAGLE's unrolling is what drafting does, and what is written is what was trained."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eesd.distill.target import Target

SCRIPT = Path(__file__).resolve().parents[2] / "models" / "make" / "train_peers.py"
#: Sums in another order, in float32.
ROUNDING = 1e-5
#: Weights are written in bfloat16, which keeps 8 bits.
BFLOAT16 = 0.05


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("train_peers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
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
def test_unrolling_is_drafting_on_its_own_features(peers, target, ids, monkeypatch):
    """The nth unrolling's output at a position is the head's, run over the target's features but the last n - 1."""
    head = peers.EagleHead(target)
    for parameter in (head.layer.self_attn.o_proj.weight, head.layer.mlp.down_proj.weight):
        parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    _, features, _ = target(ids)
    unrolled = head(target, ids, features)
    assert len(unrolled) == 3
    monkeypatch.setattr(peers, "UNROLLED", 1)
    for last in range(2, 6):
        drafted = features[:, : last + 2].clone()
        for step, predicted in enumerate(unrolled):
            (alone,) = head(target, ids[:, : last + 2], drafted)
            torch.testing.assert_close(alone[:, -1], predicted[:, last], rtol=ROUNDING, atol=ROUNDING)
            # Drafting one step later from here: the position before the last becomes a predicted one, and so on.
            for back in range(step + 1):
                drafted[:, last - back] = unrolled[step - back][:, last - back - 1]


def test_everything_but_embedding_and_lm_head_learns(peers, target, ids):
    with torch.no_grad():
        _, features, _ = target(ids)
    for peer in (kind(target) for kind in peers.PEERS.values()):
        peer.loss(target, ids, features).backward()
        # At its start EAGLE's layer adds nothing, so what feeds its outputs has no gradient yet; the outputs have.
        assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in peer.parameters())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_the_exported_draft_model_is_the_trained_one(peers, target, ids, tmp_path):
    draft = peers.DraftModel(target)
    assert len(draft.layers) == 3  # the two a draft step runs and one instead of the exit head
    draft.export(target, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        hidden, arguments = target.embed(ids)
        for layer in draft.layers:
            hidden = layer(hidden, **arguments)
        expected = target.lm_head(draft.norm(hidden))
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=BFLOAT16, atol=BFLOAT16 * expected.abs().max())


def test_the_exported_eagle_head_has_the_names_that_vllm_loads(peers, target, tmp_path):
    """EagleLlamaForCausalLM puts `model.` before each; embedding and LM head it takes from the target."""
    peers.EagleHead(target).export(target, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names
    assert not any("input_layernorm" in name or "embed" in name or "lm_head" in name for name in names)
