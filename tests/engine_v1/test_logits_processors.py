"""Logits processors that vLLM leaves out under speculation: a model's own min_p, and those a user brings."""

import json
import shutil

import pytest

SPEC = {"method": "eesd", "exit_layer": 4, "num_speculative_tokens": 4, "policy": "fixed"}
PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(40, 90)), [9]]


@pytest.fixture(scope="module")
def processor():
    """A processor that forbids a request one in `modulus` tokens: which, hangs on what it has said so far."""
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forbids(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            modulus = (params.extra_args or {}).get("modulus")
            if modulus is None:
                return None

            def forbid(output_token_ids, logits):
                rest = (sum(output_token_ids) + len(output_token_ids)) % modulus
                return logits.masked_fill(torch.arange(len(logits)) % modulus == rest, -float("inf"))

            return forbid

    return Forbids


def ask(llm, params):
    """Return the tokens of an answer for each of `params`, to the prompts in turn."""
    from vllm import SamplingParams

    asked = [SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **p) for p in params]
    prompts = [{"prompt_token_ids": PROMPTS[number % len(PROMPTS)]} for number in range(len(asked))]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, asked, use_tqdm=False)]


@pytest.mark.feature("custom logits processors", "the same answers, without drafts")
def test_custom_logits_processors(engine, random_target, processor):
    kinds = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6, "min_p": 0.1}
    own = {}, {"modulus": 2}, {"modulus": 3}
    params = [kinds[number % 3] | {"extra_args": own[number // 3 % 3]} for number in range(18)]
    options = {"logits_processors": [processor], "max_num_seqs": 5}
    with engine(random_target, **options) as llm:
        expected = ask(llm, params)
        without = ask(llm, [asked | {"extra_args": {}} for asked in params])
    assert [answer != other for answer, other in zip(expected, without, strict=True)] == [
        bool(asked["extra_args"]) for asked in params
    ]
    with engine(random_target, SPEC, **options) as llm:
        assert ask(llm, params) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] == 0


@pytest.mark.feature("min_p of a model's generation_config.json", "the same answers")
def test_a_models_own_min_p(engine, random_target, tmp_path):
    """A server takes it for every request that names none."""
    target = tmp_path / "target"
    shutil.copytree(random_target, target)
    (target / "generation_config.json").write_text(json.dumps({"min_p": 0.1, "temperature": 1.2, "do_sample": True}))

    def answers(llm):
        default = llm.get_default_sampling_params()
        own = {"temperature": default.temperature, "min_p": default.min_p}
        assert own == {"temperature": 1.2, "min_p": 0.1}
        return ask(llm, [own | {"seed": number} for number in range(12)])

    with engine(str(target), max_num_seqs=5) as llm:
        expected = answers(llm)
        assert ask(llm, [{"temperature": 1.2, "seed": number} for number in range(12)]) != expected
    with engine(str(target), SPEC, max_num_seqs=5) as llm:
        assert answers(llm) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["drafted"] > 100
