"""A compiled target with its KV fill, and the compiled draft step, say what transformers says of the same weights."""

from importlib.util import find_spec
from pathlib import Path

import exact_distribution as exact
import numpy as np
import pytest
import torch

NUM_TOKENS = 12
#: Compiling is most of the test, and starts with the longest batch there may be.
OPTIONS = {
    "enforce_eager": False,
    "max_num_seqs": 4,
    "max_model_len": 48,
    "max_num_batched_tokens": 64,
    "block_size": 32,
}

#: vLLM 0.33's CPU worker warms a compiled engine up with requests of its own making, top-p among them.
WARMS_UP = "warmup_kernels" in (Path(find_spec("vllm").origin).parent / "v1/worker/cpu_worker.py").read_text()
#: vLLM's top-p kernel asks a loop's index for its type, which Triton's interpreter does not know.
where_it_compiles = pytest.mark.gpu if WARMS_UP else lambda test: test


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(3).integers(0, exact.VOCAB_SIZE, (4, 9)).tolist()


@pytest.fixture(scope="module")
def expected(eight_token_target, prompts):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(eight_token_target, dtype=torch.float32).eval()
    answers = model.generate(
        torch.tensor(prompts), do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, eos_token_id=None
    )
    return [tuple(answer[len(prompts[0]) :]) for answer in answers.tolist()]


@where_it_compiles
@pytest.mark.parametrize("ends_in", ["torch", "kernels"])
def test_greedy_identity_with_everything_compiled(
    engine, greedy, eight_token_target, cloned_head, prompts, expected, runner_of, ends_in, force_kernels, monkeypatch
):
    """Kernels: batches of up to two rows run the draft step that ends in one, larger ones the other, both compiled."""
    calls = force_kernels(monkeypatch, exit_head_rows=2) if ends_in == "kernels" else None
    head = cloned_head(eight_token_target, 1, 1)
    spec = {"method": "eesd", "model": head, "num_speculative_tokens": 3, "policy": "beta_ts"}
    with engine(eight_token_target, spec, async_scheduling=True, **OPTIONS) as llm:
        runner = runner_of(llm)
        assert runner.vllm_config.compilation_config.mode and not runner.speculator.model.do_not_compile
        assert greedy(llm, prompts, max_tokens=NUM_TOKENS) == expected
        assert greedy(llm, prompts[:1], max_tokens=NUM_TOKENS) == expected[:1]
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] > stats["accepted"] > 0
    assert calls is None or calls["exit_head"] and calls["kv_fill"]
