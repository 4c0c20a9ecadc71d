"""A target quantised to int8 weights and activations (compressed-tensors), from distillation to serving."""

import argparse
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, LAYERS, K = 256, 4, 4
#: No multiple of 16: with AMX, vLLM 0.32 multiplies int8 tiles of whole multiples in a kernel that takes no float32.
HIDDEN = 72
FIXED = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
    )
    directory = tmp_path_factory.mktemp("targets") / "int8"
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    group = {
        "targets": ["Linear"],
        "weights": INT8 | {"strategy": "channel", "dynamic": False},
        "input_activations": INT8 | {"strategy": "token", "dynamic": True},
    }
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return str(directory)


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(1, VOCAB, n).tolist() for n in (5, 17, 33, 3)]


@torch.no_grad()
def test_the_target_is_loaded_as_it_is_served(target_dir):
    """Weights are the int8 ones times their scales, and activations are quantised: 1/254 of a token's largest."""
    from vllm_eesd.distill.model import new_head
    from vllm_eesd.distill.target import load_target

    target = load_target(target_dir, 2, "cpu")
    linear = target.model.model.layers[1].self_attn.q_proj
    stored = load_file(f"{target_dir}/model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(linear.weight, stored[name] * stored[f"{name}_scale"])
    inputs = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    difference = (linear(inputs) - inputs @ linear.weight.T).abs().max()
    assert 0 < difference < 0.1
    head = new_head(target, "last")
    assert not [n for n in head.state_dict() if "scale" in n]
    plain = head.layer.self_attn.q_proj
    assert torch.equal(plain(inputs), inputs @ plain.weight.T)


@pytest.mark.feature("quantised target (compressed-tensors)", "the same answers")
def test_distilled_and_served(target_dir, engine, greedy, plain_answers, prompts, tmp_path):
    from vllm_eesd.distill.run import run

    np.random.default_rng(0).integers(0, VOCAB, 4_000).astype(np.uint16).tofile(tmp_path / "text.bin")
    args = {"model": target_dir, "exit_layer": 2, "data": [str(tmp_path / "text.bin")], "steps": 20, "batch": 4}
    args |= {"output": str(tmp_path / "head"), "seq_len": 32, "json": None, "work": None}
    assert run(argparse.Namespace(**args)) == 0
    (plain,) = plain_answers(target_dir, (prompts, 48))
    for spec, everything in (({"model": str(tmp_path / "head")}, False), ({"exit_layer": LAYERS}, True)):
        with engine(target_dir, FIXED | spec) as llm:
            outputs = greedy(llm, prompts)
            (stats,) = llm.collective_rpc("eesd_stats")
        assert outputs == plain
        assert stats["drafted"] > 100 and stats["accepted"] > 0
        assert (stats["accepted"] == stats["drafted"]) == everything


def test_another_method_is_refused(target_dir, tmp_path):
    from vllm_eesd.distill.target import load_target

    raw = json.loads(open(f"{target_dir}/config.json").read())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="gptq.*compressed-tensors"):
        load_target(str(tmp_path), 2, "cpu")
