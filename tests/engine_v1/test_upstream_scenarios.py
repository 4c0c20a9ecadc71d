"""The scenarios of vLLM's own end-to-end tests of speculative decoding, with method eesd.

Each test here names the file of vLLM's it follows. Elsewhere: correctness of one prompt and of many, compiled and in
prompt chunks (v1/e2e/spec_decode/eagle/test_eagle_correctness.py, ngram_suffix/test_ngram_suffix.py) in
test_lossless.py and test_embedded.py; a draft model that is the target accepts everything (draft_model/
test_draft_model.py) in test_self_tests.py; LoRA (draft_model/test_lora.py) in test_features.py; two ranks in
test_tensor_parallel.py; more than one pipeline stage (eagle/test_eagle3_pp.py) is refused in test_refusals.py;
speculation off for one request (ngram_suffix/test_disable_spec_decode.py), structured output and prefix caching in
test_compatibility.py; hidden states that are not finite (general/test_nan_fault_tolerance.py) in test_faults.py;
asynchronous scheduling (general/test_async_scheduling.py) on Model Runner V2 in tests/engine_v2.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from request_cases import CASES, answers_of, assert_same, sampling_params

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
SPEC = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}
SAME = "the same answers"


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(6)
    return [generator.integers(0, 512, n).tolist() for n in (25, 3, 60)]


@pytest.mark.feature("drafts that reach past max_model_len", SAME)
def test_max_model_len(engine, random_target, cloned_head, prompts):
    """vLLM: v1/spec_decode/test_max_len.py: long drafts up to the longest sequence, every row at another time."""
    from vllm import SamplingParams

    longest = 70
    params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = []
    for spec in (None, SPEC | {"num_speculative_tokens": 10, "model": cloned_head(random_target, 7, 7)}):
        with engine(random_target, spec, max_model_len=longest) as llm:
            outputs = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
            results.append([(tuple(output.token_ids), output.finish_reason) for output in outputs])
            if spec:
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["accepted"] == stats["drafted"] > 80
    assert results[1] == results[0]
    for prompt, (tokens, ends) in zip(prompts, results[0], strict=True):
        assert (len(prompt) + len(tokens), ends) == (longest, "length")


@pytest.mark.feature("every parameter at once, preempted and in prompt chunks", SAME)
def test_parameters_under_preemption_and_chunked_prefill(engine, embedded_model, preemptions):
    """vLLM: v1/e2e/general/test_async_scheduling.py: parameter sets x preemption x prompt chunks x speculation."""
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[: len(CASES)]]
    params = [sampling_params({"max_tokens": 40} | case.params) for case in CASES.values() if case.in_company]
    texts = [texts[number % len(texts)] for number in range(len(params))]
    options = {"max_model_len": 384, "skip_tokenizer_init": False, "block_size": 32, "max_logprobs": 60}
    with engine(str(embedded_model), **options) as llm:
        expected = answers_of(llm.generate(texts, params, use_tqdm=False))
    assert not preemptions
    tight = {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with engine(str(embedded_model), SPEC | {"policy": "beta_ts"}, **options, **tight) as llm:  # ragged lengths
        answers = answers_of(llm.generate(texts, params, use_tqdm=False))
        (stats,) = llm.collective_rpc("eesd_stats")
    assert_same(answers, expected)
    assert preemptions and stats["accepted"] > 100


@pytest.mark.feature("logprobs_mode=processed_logprobs", SAME)
def test_processed_logprobs(engine, random_target, cloned_head, prompts):
    """vLLM: v1/sample/test_logprobs.py, its speculative cases: values after the penalties, of accepted drafts too."""
    params = sampling_params({"logprobs": 4, "presence_penalty": 1.2, "ignore_eos": True, "detokenize": False})
    inputs, results = [{"prompt_token_ids": prompt} for prompt in prompts], []
    for spec in (None, SPEC | {"model": cloned_head(random_target, 7, 7)}):
        with engine(random_target, spec, logprobs_mode="processed_logprobs") as llm:
            results.append(answers_of(llm.generate(inputs, params, use_tqdm=False)))
            if spec:
                (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["accepted"] > 10
    assert_same(results[1], results[0])


@pytest.mark.feature("--async-scheduling on a CPU", "refused; vLLM itself has none there")
def test_asking_for_asynchronous_scheduling(random_target, cloned_head):
    """vLLM: v1/e2e/general/test_async_scheduling.py: what cannot be scheduled so is refused, not served otherwise."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from vllm_eesd.host import plugin

    if not current_platform.is_cpu():
        pytest.skip("on other devices it is the default")
    plugin.register()
    spec = SPEC | {"model": cloned_head(random_target, 7, 7)}
    arguments = EngineArgs(
        model=random_target, speculative_config=spec, skip_tokenizer_init=True, async_scheduling=True
    )
    with pytest.raises(
        ValueError, match="^eesd: async_scheduling=True is not supported on Model Runner V1; leave it out$"
    ):
        arguments.create_engine_config()
