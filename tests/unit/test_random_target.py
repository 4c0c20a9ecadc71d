"""models/make/make_random_target.py: what it writes is a target, with a head that fits it."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, read_tensors

SCRIPT = Path(__file__).resolve().parents[2] / "models" / "make" / "make_random_target.py"
SMALL = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 3, "head_dim": 8, "vocab_size": 4096}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_random_target", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_random_target_and_its_head(script, tmp_path):
    script.write_target(tmp_path / "random", script.SIZES | SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "random")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "random")
    assert max(tokenizer("def f(x):")["input_ids"]) < model.config.vocab_size
    head = ExitHeadConfig.load(tmp_path / "random" / "eesd")
    assert head.exit_layer < head.verifier.num_hidden_layers == model.config.num_hidden_layers
    assert len(read_tensors(tmp_path / "random" / "eesd")) == 10


def test_it_is_as_large_as_its_name_says(script):
    sizes = script.SIZES
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    total = sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * hidden + hidden
    assert 134e6 < total < 135e6
