"""Every supported target, end to end on a tiny random one: exact output, self-tests, distilled, served."""

import argparse

import numpy as np
import pytest
import torch
import transformers

K = 4
FIXED = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
VOCAB, LAYERS = 256, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,  # larger than the default, or greedy text repeats itself
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Head sizes are multiples of 32, as vLLM's CPU attention wants them.
TARGETS = {
    "llama": ("Llama", {"head_dim": 32}),
    "llama, biases": ("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"hidden_size": 128}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "granite": (
        "Granite",
        {
            "hidden_size": 128,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.2,
        },
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.feature(f"target: {n}", "the same answers")) for n in TARGETS],
)
def target_dir(request, tmp_path_factory):
    name, changes = TARGETS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    directory = tmp_path_factory.mktemp("targets") / name.lower()
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases that a mistake in loading would show in
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(1, VOCAB, n).tolist() for n in (5, 17, 33, 3)]


@pytest.fixture(scope="module")
def plain_output(target_dir, plain_answers, prompts):
    return plain_answers(target_dir, (prompts, 48))[0]


def clone_of_the_last_layer(target_dir, directory):
    from vllm_eesd.distill.model import head_config, new_head
    from vllm_eesd.distill.target import load_target
    from vllm_eesd.exit_head.checkpoint import Prior, write_head

    target = load_target(target_dir, LAYERS - 1, "cpu")
    head = new_head(target, "last", "transformer")
    write_head(directory, head_config(target, target_dir, "transformer", Prior()), head.state_dict())
    return str(directory)


def draft(engine, greedy, target_dir, prompts, spec):
    with engine(target_dir, FIXED | spec) as llm:
        outputs = greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
    return outputs, stats


def test_a_cloned_last_layer_accepts_everything(target_dir, plain_output, engine, greedy, prompts, tmp_path):
    head = clone_of_the_last_layer(target_dir, tmp_path / "clone")
    outputs, stats = draft(engine, greedy, target_dir, prompts, {"model": head})
    assert outputs == plain_output
    assert stats["drafted"] > 100 and stats["accepted"] == stats["drafted"]


def test_headless_at_the_last_layer_accepts_everything(target_dir, plain_output, engine, greedy, prompts):
    outputs, stats = draft(engine, greedy, target_dir, prompts, {"exit_layer": LAYERS})
    assert outputs == plain_output
    assert stats["drafted"] > 100 and stats["accepted"] == stats["drafted"]


@pytest.mark.parametrize("head_type", ["transformer", "deep_context"])
def test_distilled_and_served(target_dir, plain_output, engine, greedy, prompts, tmp_path, head_type):
    from vllm_eesd.distill.run import run

    np.random.default_rng(0).integers(0, VOCAB, 4_000).astype(np.uint16).tofile(tmp_path / "text.bin")
    args = {"model": target_dir, "exit_layer": 2, "data": [str(tmp_path / "text.bin")], "steps": 20, "batch": 4}
    args |= {"output": str(tmp_path / "head"), "seq_len": 32, "json": None, "work": None, "head_type": head_type}
    assert run(argparse.Namespace(**args)) == 0
    outputs, stats = draft(engine, greedy, target_dir, prompts, {"model": str(tmp_path / "head")})
    assert outputs == plain_output
    assert stats["drafted"] > 100 and 0 < stats["accepted"] < stats["drafted"]


@pytest.mark.feature("target: gpt-oss", "refused")
def test_gpt_oss_is_refused(engine, tmp_path):
    """Every other layer of it attends through a sliding window."""
    changes = {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**(SIZES | changes))
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path / "gpt_oss")
    with (
        pytest.raises(ValueError, match="GptOssForCausalLM.*not supported"),
        engine(str(tmp_path / "gpt_oss"), FIXED | {"exit_layer": 2}),
    ):
        pass


def test_a_sliding_window_is_refused(engine, tmp_path):
    torch.manual_seed(0)
    config = transformers.MistralConfig(**(SIZES | {"head_dim": 32, "sliding_window": 64}))
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    with (
        pytest.raises(ValueError, match="sliding-window"),
        engine(str(tmp_path / "mistral"), FIXED | {"exit_layer": 2}),
    ):
        pass
