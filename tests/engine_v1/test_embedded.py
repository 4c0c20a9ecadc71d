"""The embedded target and its shipped head, on real prompts: identical to plain vLLM, and really accepted."""

import json
from pathlib import Path

import pytest

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
#: name -> engine options; the smallest block count that still holds one request at max_model_len.
SETTINGS = {
    "compiled": {"enforce_eager": False},
    "chunked prefill": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "preemption": {"num_gpu_blocks_override": 17, "block_size": 32, "max_num_seqs": 8},
}


@pytest.fixture(autouse=True)
def ordinary_times(step_times):
    step_times(draft_step_ms=0.25)


@pytest.fixture(scope="module")
def texts():
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:6]]


def complete(llm, texts, **sampling):
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": 128} | sampling)
    return [
        (completion.text, tuple(completion.token_ids), completion.finish_reason)
        for output in llm.generate(texts, params, use_tqdm=False)
        for completion in output.outputs
    ]


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=pytest.mark.feature(name, "the same answers")) for name in SETTINGS]
)
def test_greedy_identity_on_real_prompts(engine, embedded_model, texts, setting):
    """Batch 6 of unequal prompts, again with prefix-cache hits, one alone, up to max_model_len, stop strings, n = 2."""
    answers = []
    for spec in (None, "eesd"):
        options = {"max_model_len": 384, "skip_tokenizer_init": False} | SETTINGS[setting]
        with engine(str(embedded_model), spec, **options) as llm:
            answers.append(
                {
                    "batch": complete(llm, texts),
                    "again": complete(llm, texts),
                    "alone": complete(llm, texts[:1]),
                    "to the end": complete(llm, texts[1:3], max_tokens=1000, ignore_eos=True),
                    "stop strings": complete(llm, texts, stop=["\n\n", "return"]),
                    "n = 2": complete(llm, texts[:2], n=2, temperature=1, top_k=1),
                }
            )
            if spec:
                (stats,) = llm.collective_rpc("eesd_stats")
    assert answers[1] == answers[0]
    assert any(reason == "stop" for _, _, reason in answers[0]["stop strings"])
    # Any head that learned something: the measured figure is in the README.
    assert stats["accepted"] / stats["rounds"] > 0.5


@pytest.mark.feature("a head that is always wrong", "the same answers")
def test_a_randomly_initialised_head_changes_nothing_but_speed(engine, embedded_model, texts, tmp_path):
    import torch

    from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, read_tensors, write_head

    torch.manual_seed(0)
    shipped = embedded_model / "eesd"
    tensors = {name: torch.randn_like(tensor) * 0.05 for name, tensor in read_tensors(shipped).items()}
    write_head(tmp_path / "head", ExitHeadConfig.load(shipped), tensors)
    answers = []
    for spec in (None, {"method": "eesd", "model": str(tmp_path / "head")}):
        with engine(str(embedded_model), spec, max_model_len=384, skip_tokenizer_init=False) as llm:
            answers.append(complete(llm, texts))
            if spec:
                (stats,) = llm.collective_rpc("eesd_stats")
    assert answers[1] == answers[0]
    # What was copied from the text is not the head's doing.
    assert stats["accepted"] - stats["copied_accepted"] < 0.1 * (stats["drafted"] - stats["copied"])
    # The posterior learns that drafting does not pay: few tokens a round, not eight.
    assert (stats["drafted"] - stats["copied"]) / stats["rounds"] < 2
