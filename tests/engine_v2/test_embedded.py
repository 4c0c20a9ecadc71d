"""The embedded model with its deep-context head: V2 drafts what V1 drafts, and grammars come out as plain V2's do."""

import numpy as np
import pytest
import torch

PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef read_lines(path):\n    with open(path) as",
]
K = 4
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
OPTIONS = {"skip_tokenizer_init": False, "max_num_seqs": 4}


def complete(llm):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    numbers = StructuredOutputsParams(regex=r"\[[0-9]{1,3}(, [0-9]{1,3}){2,6}\]")
    bound = SamplingParams(temperature=0, max_tokens=20, structured_outputs=numbers)
    outputs = llm.generate([*PROMPTS, "numbers = "], [free, free, bound], use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(engine, embedded_model):
    with engine(str(embedded_model), **OPTIONS) as llm:
        return complete(llm)


@pytest.fixture(scope="module")
def v1(engine, embedded_model):
    """What V1 completes, and its counters; on a GPU EESD drafts on V2 only."""
    if torch.cuda.is_available():
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with engine(str(embedded_model), SPEC, **OPTIONS) as llm:
            return complete(llm), llm.collective_rpc("eesd_stats")[0]


@pytest.mark.parametrize("ends_in", ["torch", "kernels"])
def test_v2_drafts_as_v1_does(engine, embedded_model, plain, v1, ends_in, force_kernels, monkeypatch):
    calls = force_kernels(monkeypatch) if ends_in == "kernels" else None
    with engine(str(embedded_model), SPEC, **OPTIONS, block_size=32, async_scheduling=True) as llm:
        assert complete(llm) == plain
        assert calls is None or calls["exit_head"] > 10 and calls["kv_fill"] > 10
        (stats,) = llm.collective_rpc("eesd_stats")
    if v1 is None:
        return
    outputs, expected = v1
    assert outputs == plain
    # V1 cuts a request's last draft where its tokens end; V2 learns that too late.
    difference = np.array(stats["accepted_per_position"]) - np.array(expected["accepted_per_position"])
    assert np.abs(difference).max() <= 2 * len(plain)
    assert stats["accepted"] / stats["rounds"] > 0.8 * expected["accepted"] / expected["rounds"]
