"""`eesd import`: tiny checkpoints in other projects' formats become heads that compute what theirs compute."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_eesd.distill.import_head import run
from vllm_eesd.distill.model import load_head
from vllm_eesd.distill.target import load_target
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, read_tensors

VOCAB, LAYERS, HIDDEN, INNER = 64, 4, 32, 48
# Two float32 implementations of the same attention.
FLOAT32_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def attention_tensors(prefix: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"self_attn.{n}_proj.weight" for n in "qkvo"]
    tensors = {f"{prefix}{name}": 0.2 * torch.randn(HIDDEN, HIDDEN, generator=generator) for name in names}
    return tensors | {f"{prefix}input_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator)}


def layer_tensors(prefix: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    mlp = {f"{prefix}mlp.{n}.weight": 0.2 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    after = {f"{prefix}post_attention_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator)}
    return attention_tensors(prefix, seed) | mlp | after


@pytest.fixture
def balcony(tmp_path):
    """Exits at 1 and 3 of a checkpoint that also holds (some of) the base model, in two files."""
    directory = tmp_path / "balcony"
    directory.mkdir()
    config = {"model_type": "nested_llama", "exit_layer_indices": [1, 3], "output_exit_layers": [1, 3]}
    config |= {"exit_decoder_layer": True, "tie_exit_lm_head": True}
    (directory / "config.json").write_text(json.dumps(config))
    for index in range(2):
        prefix = f"model.exit_modules.{index}."
        tensors = layer_tensors(f"{prefix}0.", index) | {f"{prefix}1.weight": torch.full((HIDDEN,), 1.0 + index)}
        base = {f"model.layers.{index}.{n}": t.clone() for n, t in layer_tensors("", 7).items()}
        save_file(tensors | base, directory / f"model-0000{index}-of-00002.safetensors")
    return directory


@pytest.fixture
def kangaroo(tmp_path):
    directory = tmp_path / "kangaroo"
    directory.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = attention_tensors("layers.0.", 5) | {"norm.weight": torch.linspace(0.5, 1.5, HIDDEN)}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_args(model_dir, checkpoint, output, **changes) -> Namespace:
    given = {"model": str(model_dir), "checkpoint": str(checkpoint), "output": str(output), "exit_layer": None}
    return Namespace(**(given | {"format": "auto", "json": None} | changes))


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def edit(directory, **changes) -> None:
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("exit_layer", "index"), [(1, 0), (3, 1)])
def test_balcony(model_dir, balcony, tmp_path, exit_layer, index, capsys):
    args = make_args(model_dir, balcony, tmp_path / "head", exit_layer=exit_layer, json=str(tmp_path / "out.json"))
    assert run(args) == 0
    config, tensors = ExitHeadConfig.load(tmp_path / "head"), read_tensors(tmp_path / "head")
    assert (config.exit_layer, config.head_type) == (exit_layer, "transformer")
    expected = layer_tensors("layer.", index) | {"norm.weight": torch.full((HIDDEN,), 1.0 + index)}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert outcome["format"] == "balcony" and outcome["next"] in capsys.readouterr().out


@torch.no_grad()
def test_kangaroo_computes_attention_alone(model_dir, kangaroo, tmp_path):
    assert run(make_args(model_dir, kangaroo, tmp_path / "head")) == 0
    target = load_target(str(model_dir), 2, "cpu")
    head = load_head(target, tmp_path / "head")
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
    exit_hidden, target_hidden, rotary = target(ids)
    layer = head.layer
    attended, _ = layer.self_attn(layer.input_layernorm(exit_hidden), position_embeddings=rotary, attention_mask=None)
    theirs = head.norm(exit_hidden + attended)
    ours = head(exit_hidden, target_hidden, rotary, torch.arange(12))
    torch.testing.assert_close(ours, theirs, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    assert torch.equal(head.norm.weight, torch.linspace(0.5, 1.5, HIDDEN))
    assert torch.equal(layer.self_attn.q_proj.weight, attention_tensors("", 5)["self_attn.q_proj.weight"])


def test_kangaroo_takes_the_exit_layer_given(model_dir, kangaroo, tmp_path):
    run(make_args(model_dir, kangaroo, tmp_path / "head", exit_layer=3))
    assert ExitHeadConfig.load(tmp_path / "head").exit_layer == 3
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "other", exit_layer=LAYERS)), "exit_layer", "1 to 3")


@pytest.mark.parametrize(
    ("config", "exit_layer", "words"),
    [
        ({}, None, ("exit_layer", "[1, 3]", "--exit-layer")),
        ({}, 2, ("exit_layer", "is 2", "[1, 3]")),
        ({"exit_decoder_layer": False}, 1, ("exit_decoder_layer", "True", "False")),
        ({"tie_exit_lm_head": False}, 1, ("tie_exit_lm_head", "True", "False")),
        ({"exit_layer_indices": "1"}, 1, ("exit_layer_indices",)),
        ({"exit_layer_indices": [0, 1, 3]}, 3, ("missing", "exit_modules.2.1.weight")),
    ],
)
def test_balcony_refusals(model_dir, balcony, tmp_path, config, exit_layer, words):
    edit(balcony, **config)
    refused(lambda: run(make_args(model_dir, balcony, tmp_path / "head", exit_layer=exit_layer)), *words)
    assert not (tmp_path / "head").exists()


def test_another_targets_checkpoint(model_dir, kangaroo, tmp_path):
    tensors = attention_tensors("layers.0.", 5) | {"norm.weight": torch.ones(HIDDEN)}
    tensors["layers.0.self_attn.q_proj.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
    save_file(tensors, kangaroo / "model.safetensors")
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "head")), "q_proj", "[32, 64]", "[32, 32]")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(HIDDEN, dtype=torch.int8), ("norm.weight is int8", "float32, float16, bfloat16")),
        (torch.full((HIDDEN,), torch.nan), ("norm.weight", "NaN")),
    ],
    ids=["dtype", "not finite"],
)
def test_weights_no_head_could_be_served_with(model_dir, kangaroo, tmp_path, value, words):
    save_file(attention_tensors("layers.0.", 5) | {"norm.weight": value}, kangaroo / "model.safetensors")
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "head")), *words)
    assert not (tmp_path / "head").exists()


def test_json_that_cannot_be_written_is_noticed_first(model_dir, kangaroo, tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "head", json=str(tmp_path / "file" / "o"))), "json")
    assert not (tmp_path / "head").exists()


def test_pickles_are_never_loaded(model_dir, kangaroo, tmp_path):
    (kangaroo / "model.safetensors").unlink()
    (kangaroo / "pytorch_model.bin").write_bytes(pickle.dumps({"norm.weight": [1.0]}))
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "head")), "pickled", "pytorch_model.bin")


def test_not_an_exit_head(model_dir, tmp_path):
    refused(lambda: run(make_args(model_dir, model_dir, tmp_path / "head")), "'llama'", "balcony, kangaroo")
    refused(lambda: run(make_args(model_dir, tmp_path, tmp_path / "head")), "no config.json")
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(lambda: run(make_args(model_dir, tmp_path, tmp_path / "head")), "'eagle3'")


def test_damaged(model_dir, kangaroo, tmp_path):
    path = kangaroo / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    refused(lambda: run(make_args(model_dir, kangaroo, tmp_path / "head")), "damaged")
