"""A tiny target and text for it, for the tests of distillation: fixtures that a conftest imports."""

import numpy as np
import pytest

VOCAB, LAYERS = 64, 4


@pytest.fixture(scope="module")
def one_thread():
    """These tensors are tiny: a second thread only waits, for long where the machine is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def eos_token_id():
    """The tiny target's end of a text; a module may say otherwise."""
    return 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, eos_token_id):
    """Directory of a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,  # the default leaves a random model's logits nearly flat: everything would agree
        eos_token_id=eos_token_id,
    )
    directory = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def text(tmp_path):
    """A file of 4000 random tokens."""
    np.random.default_rng(0).integers(0, VOCAB, 4_000).astype(np.uint16).tofile(tmp_path / "text.bin")
    return tmp_path / "text.bin"


CPU_MULTIPLIES_BFLOAT16 = "vllm_eesd.distill.precision.cpu_multiplies_bfloat16"


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def in_bfloat16(request, monkeypatch):
    """Whether training multiplies bfloat16, both ways on every CPU; where it is not multiplied, torch emulates it."""
    monkeypatch.setattr(CPU_MULTIPLIES_BFLOAT16, lambda: request.param)
    return request.param


@pytest.fixture(autouse=True)
def same_on_every_cpu(request, monkeypatch):
    """Fail a test that would hold or not by what this CPU multiplies in hardware: it must use `in_bfloat16`."""
    if "in_bfloat16" not in request.fixturenames:

        def asked():
            pytest.fail("this test asks what the CPU multiplies in hardware; use the fixture `in_bfloat16`")

        monkeypatch.setattr(CPU_MULTIPLIES_BFLOAT16, asked)
