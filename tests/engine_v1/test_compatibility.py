"""What a request may ask for while EESD is on: answered as plain vLLM answers it, or refused in one line.

One plain engine and one that drafts the same length in every round answer every case, each a batch of its own, then
all of them in one batch.
"""

import contextlib
import json
from pathlib import Path

import pytest
from request_cases import CASES, answers_of, assert_same, assert_same_position, sampling_params

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
SPEC = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}
OPTIONS = {"max_model_len": 384, "skip_tokenizer_init": False, "max_num_seqs": 64, "block_size": 32, "max_logprobs": 60}
#: Fields of SamplingParams that no case sets, and why.
ELSEWHERE = {
    "seed": "test_exact_distribution.py, by distribution",
    "structured_outputs": "a case says `structured`",
    "thinking_token_budget": "asks for a reasoning parser: test_clients.py",
    "watermarking": "asks for an engine with a watermark",
    "prompt_logprob_token_ids prompt_logprob_start trace_decode_token_ids": "Model Runner V2 only",
    "routed_experts_prompt_start": "asks for an engine that returns experts",
    "output_kind skip_clone output_text_buffer_length": "set by vLLM's entry points",
}
SAME = "the same answers"


@pytest.fixture(scope="module")
def texts():
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:2]]


def chat(llm):
    """Return the answers of three turns, each turn seeing the ones before."""
    messages, answers = [], []
    for question in ("def add(a, b):", "class Stack:", "for i in range(10):"):
        messages.append({"role": "user", "content": question})
        answers += answers_of(llm.chat(messages, sampling_params({}), use_tqdm=False))
        messages.append({"role": "assistant", "content": answers[-1]["text"]})
    return answers


def beams(llm, texts):
    from vllm.sampling_params import BeamSearchParams

    outputs = llm.beam_search([{"prompt": text} for text in texts], BeamSearchParams(beam_width=2, max_tokens=6))
    return [(tuple(beam.tokens), beam.text) for output in outputs for beam in output.sequences]


def with_aborts(llm, texts):
    """Return the answers of requests that begin one by one, two of them aborted: one running, one just begun."""
    engine, answers = llm.llm_engine, {}
    for step in range(10_000):
        if step % 3 == 0 and step // 3 < 8:
            number = step // 3
            engine.add_request(str(number), texts[number % len(texts)], sampling_params({"max_tokens": 60}))
        for output in engine.step():
            if output.finished:
                (answers[output.request_id],) = answers_of([output])
        if step == 7:
            engine.abort_request(["0"])
        if step == 13:
            engine.abort_request(["4"])
        if step > 24 and not engine.has_unfinished_requests():
            break
    return answers


def one_kind_and_the_other(llm, texts):
    """Return the answers of the greedy requests in a batch of 64 of which every other one samples."""
    kinds = [sampling_params({}), sampling_params({"temperature": 1.0, "top_p": 0.9, "n": 2})]
    outputs = llm.generate([texts[number % 4 // 2] for number in range(64)], kinds * 32, use_tqdm=False)
    return answers_of(outputs[::2])


def ask_everything(llm, texts):
    """Return (what was answered, case by case; how many tokens were drafted for it)."""
    speculative = llm.llm_engine.vllm_config.speculative_config is not None
    answers, drafted = {}, {}
    for name, case in CASES.items():
        if speculative:
            llm.collective_rpc("eesd_reset_stats")
        answers[name] = answers_of(llm.generate(texts, sampling_params(case.params), use_tqdm=False))
        drafted[name] = llm.collective_rpc("eesd_stats")[0]["drafted"] if speculative else 0
    params = [sampling_params(case.params) for case in CASES.values() if case.in_company]
    answers["all together"] = answers_of(llm.generate(texts[:1] * len(params), params, use_tqdm=False))
    answers["beam search"] = beams(llm, texts)
    answers["multi-turn chat"] = chat(llm)
    answers["abort"] = with_aborts(llm, texts)
    again = llm.generate(texts, sampling_params({}), use_tqdm=False)
    answers["prefix caching"] = answers_of(again)
    answers["tokens from the prefix cache"] = [output.num_cached_tokens for output in again]
    answers["greedy and sampled requests in one batch"] = one_kind_and_the_other(llm, texts)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    answers["KV cache in use at the end"] = scheduler.kv_cache_manager.usage
    return answers, drafted


@pytest.fixture(scope="module")
def plain(engine, embedded_model, texts):
    with engine(str(embedded_model), **OPTIONS) as llm:
        return ask_everything(llm, texts)[0]


@pytest.fixture(scope="module")
def eesd_llm(engine, embedded_model, plain):
    with engine(str(embedded_model), SPEC, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def eesd(eesd_llm, texts):
    return ask_everything(eesd_llm, texts)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.feature(name, SAME)) for name in CASES])
def test_a_request_is_answered_as_by_plain_vllm(plain, eesd, name):
    answers, drafted = eesd
    assert_same(answers[name], plain[name])
    assert (plain[name] != plain["temperature 0"]) == CASES[name].alters
    assert CASES[name].drafts in (None, drafted[name] > 0)


def test_every_field_of_a_request_is_tried():
    """On each way to sample with drafts: EESD's own, for a temperature alone, and vLLM's rejection sampler."""
    from vllm import SamplingParams

    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    tried = {field for case in CASES.values() for field in case.params}
    elsewhere = {field for names in ELSEWHERE for field in names.split()}
    assert fields - tried - elsewhere == set() and elsewhere <= fields


@pytest.mark.parametrize(
    "position, same",
    [
        ({1: (-0.5, 1), 2: (-2.0, 2), 3: (-2.00005, 3), 9: (-8.0, 70)}, True),
        ({1: (-0.5, 1), 2: (-2.00001, 3), 3: (-2.0, 2), 9: (-8.0, 70)}, True),  # a swap of two that are as good as tied
        ({1: (-0.5, 1), 2: (-2.0, 3), 3: (-2.0, 3), 9: (-8.0, 70)}, True),  # tied: both have the last one's rank
        ({1: (-0.5, 1), 2: (-2.0, 2), 4: (-2.0, 3), 9: (-8.0, 70)}, True),  # a swap with one that was not listed
        ({1: (-0.5, 2), 2: (-2.0, 1), 3: (-2.00005, 3), 9: (-8.0, 70)}, False),  # a rank that is simply wrong
        ({1: (-0.5, 1), 2: (-2.0, 4), 3: (-2.00005, 3), 9: (-8.0, 70)}, False),
        ({1: (-0.5, 1), 2: (-2.0, 2), 3: (-2.00005, 3), 9: (-8.0, 71)}, False),  # of its neighbours nothing is known
        ({1: (-0.5, 1), 2: (-2.0, 2), 3: (-2.001, 3), 9: (-8.0, 70)}, False),
        ({1: (-0.5, 1), 2: (-2.0, 2), 4: (-2.4, 3), 9: (-8.0, 70)}, False),
        ({1: (-0.5, 1), 2: (-2.0, 2), 9: (-8.0, 70)}, False),
    ],
)
def test_what_counts_as_the_same_log_probabilities(position, same):
    known = {1: (-0.5, 1), 2: (-2.0, 2), 3: (-2.00005, 3), 9: (-8.0, 70)}
    with contextlib.nullcontext() if same else pytest.raises(AssertionError):
        assert_same_position(position, known)


def test_all_of_them_in_one_batch(plain, eesd):
    """Every kind at once: what one row asks for must not reach another, drafts and placeholders included."""
    assert_same(eesd[0]["all together"], plain["all together"])


@pytest.mark.feature("greedy and sampled requests in one batch", "the same answers to the greedy ones")
def test_greedy_requests_beside_sampled_ones(plain, eesd):
    answers = eesd[0]["greedy and sampled requests in one batch"]
    assert_same(answers, plain["greedy and sampled requests in one batch"])
    assert_same(answers, plain["temperature 0"] * 16)


@pytest.mark.feature("prefix caching", "the same answers, from as many cached tokens")
def test_the_prefix_cache_is_used_as_by_plain_vllm(plain, eesd):
    assert min(plain["tokens from the prefix cache"]) > 0
    assert eesd[0]["tokens from the prefix cache"] == plain["tokens from the prefix cache"]
    assert_same(eesd[0]["prefix caching"], plain["temperature 0"])


@pytest.mark.feature("beam search", SAME)
def test_beam_search(plain, eesd):
    assert len(plain["beam search"]) == 4
    assert eesd[0]["beam search"] == plain["beam search"]


@pytest.mark.feature("multi-turn chat", SAME)
def test_every_turn_of_a_chat(plain, eesd):
    assert len(plain["multi-turn chat"]) == 3
    assert_same(eesd[0]["multi-turn chat"], plain["multi-turn chat"])


@pytest.mark.feature("abort", "the same answers for the others")
def test_aborted_requests_change_nothing_for_the_others(plain, eesd):
    answers, expected = eesd[0]["abort"], plain["abort"]
    assert sorted(expected) == sorted(answers) == ["1", "2", "3", "5", "6", "7"]
    assert_same([answers[number] for number in expected], list(expected.values()))
    assert eesd[0]["KV cache in use at the end"] == 0


@pytest.mark.feature("seed, the same request twice", "the same answer")
def test_a_seed_repeats_its_answer(eesd_llm, texts):
    def ask(seed):
        outputs = eesd_llm.generate(texts, sampling_params({"temperature": 1.0, "seed": seed}), use_tqdm=False)
        return [answer["tokens"] for answer in answers_of(outputs)]

    first = ask(7)
    assert ask(8) != first
    assert ask(7) == first


@pytest.mark.parametrize(
    "name, params",
    [
        pytest.param(name, params, marks=pytest.mark.feature(name, "refused"))
        for name, params in {
            "an eesd_ option that does not exist": {"extra_args": {"eesd_policy": "fixed"}},
        }.items()
    ],
)
def test_what_is_refused(eesd_llm, texts, name, params):
    """By the kind of error that a server answers with status 400 and its message."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=name.split()[0]) as error:
        eesd_llm.generate(texts, sampling_params(params), use_tqdm=False)
    assert "\n" not in str(error.value)
    assert not eesd_llm.llm_engine.has_unfinished_requests()


def refusal(options):
    """Return the line with which an engine of the embedded model is refused."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_eesd.host import plugin

    plugin.register()
    with pytest.raises(ValueError) as error:
        EngineArgs(**options).create_engine_config()
    lines = [line for line in str(error.value).splitlines() if "For further information" not in line]
    return " ".join(lines)


@pytest.mark.feature("sleep and wake", "refused, as by plain vLLM: a CPU has none")
def test_sleep_mode_is_refused_on_a_cpu_as_plain_vllm_refuses_it(embedded_model):
    options = {"model": str(embedded_model), "enable_sleep_mode": True}
    assert "Sleep mode is not supported on current platform" in refusal(options)
    assert "Sleep mode is not supported on current platform" in refusal(options | {"speculative_config": "eesd"})


@pytest.mark.feature("best_of", "not in this vLLM")
def test_best_of_does_not_exist():
    from vllm import SamplingParams
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
    assert "best_of" not in CompletionRequest.model_fields
