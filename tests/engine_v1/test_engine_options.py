"""Options of an engine that bear on how long drafts may be, and what asks for EESD: settled before anything starts."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import vllm_serve
from test_refusals import refusal

from vllm_eesd.config import LONGEST_NGRAM_DRAFT

SPEC = {"method": "eesd", "exit_layer": 4}


def config_of(target, spec=None, usage=None, **options):
    """Return vLLM's config of an engine with these options."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_eesd.host import plugin

    plugin.register()
    args = EngineArgs(model=target, speculative_config=spec, skip_tokenizer_init=True, **options)
    return args.create_engine_config(usage)


def longest_draft(target, spec=None, usage=None, **options):
    return config_of(target, spec or SPEC, usage, **options).speculative_config.num_speculative_tokens


@pytest.mark.feature("long_prefill_token_threshold", "the same answers; drafts shorter than the threshold")
@pytest.mark.parametrize(
    "threshold, longest", [(16, 15), (17, 16), (100, LONGEST_NGRAM_DRAFT), (2, 1), (0, LONGEST_NGRAM_DRAFT)]
)
def test_the_longest_draft_is_shorter_than_the_threshold_of_long_prompts(random_target, threshold, longest):
    assert longest_draft(random_target, long_prefill_token_threshold=threshold) == longest


@pytest.mark.parametrize(
    "spec, options, named",
    [
        (SPEC | {"num_speculative_tokens": 16}, {"long_prefill_token_threshold": 16}, "at most 15"),
        (SPEC, {"long_prefill_token_threshold": 1}, "a larger value"),
        (SPEC | {"num_speculative_tokens": 8}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}, "at most 7"),
        (
            SPEC | {"num_speculative_tokens": 8},
            {"enable_lora": True, "max_num_batched_tokens": 256, "max_num_seqs": 64},
            "at most 3",
        ),
    ],
    ids=["threshold", "no draft fits", "budget", "adapters"],
)
def test_a_length_asked_for_that_does_not_fit(random_target, spec, options, named):
    message = refusal(random_target, spec, **options)
    assert message.startswith("eesd: num_speculative_tokens=") and named in message
    assert f"{next(name for name in options if name != 'enable_lora')}=" in message


def test_a_small_budget_of_tokens(random_target):
    """A request of one token, padded beyond the budget, would wait for ever."""
    assert longest_draft(random_target, max_num_batched_tokens=8, max_num_seqs=4) == 7


@pytest.mark.feature("LoRA with vLLM's default budgets", "starts; the longest draft is what fits")
def test_adapters_at_default_budgets(random_target, log_lines):
    """vLLM would refuse: "Consider increasing max_num_batched_tokens or decreasing num_speculative_tokens"."""
    from vllm.usage.usage_lib import UsageContext

    for usage in (None, UsageContext.LLM_CLASS, UsageContext.OPENAI_API_SERVER):
        config = config_of(random_target, SPEC, usage, enable_lora=True)
        budget, num_reqs = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
        longest = config.speculative_config.num_speculative_tokens
        assert 1 <= longest < LONGEST_NGRAM_DRAFT and num_reqs * (longest + 1) <= budget
    log_lines.clear()
    assert longest_draft(random_target, enable_lora=True, max_num_batched_tokens=320, max_num_seqs=64) == 4
    assert "num_speculative_tokens is 4 instead of 16, which is what fits enable_lora" in log_lines[0]
    enough = {"max_num_batched_tokens": 4352, "max_num_seqs": 256}
    assert longest_draft(random_target, enable_lora=True, **enough) == LONGEST_NGRAM_DRAFT


@pytest.mark.feature("requests that join with one token under long_prefill_token_threshold", "the same answers")
def test_one_token_that_joins_under_a_threshold(engine, plain_answers, random_target, cloned_head):
    """vLLM pads it by the longest draft, cuts that to the threshold, and asserts that nothing was cut."""
    from vllm import SamplingParams

    prompts = [[token] for token in np.random.default_rng(1).integers(0, 512, 6).tolist()]
    lengths = (6, 14, 9, 12, 7, 10)  # so that they end, and others join the running one, at different times
    options = {"max_num_seqs": 2, "long_prefill_token_threshold": 4}
    (expected,) = plain_answers(random_target, (prompts, max(lengths)), **options)
    spec = {"method": "eesd", "model": cloned_head(random_target, 7, 7), "policy": "fixed"}
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    with engine(random_target, spec, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        (stats,) = llm.collective_rpc("eesd_stats")
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert answers == [answer[:n] for answer, n in zip(expected, lengths, strict=True)]
    assert len(stats["drafted_per_position"]) == 3 and stats["accepted"] == stats["drafted"] > 20


@pytest.mark.feature("pooling: embeddings, classification, scoring", "refused")
@pytest.mark.parametrize("options", [{"runner": "pooling"}, {"convert": "embed"}, {"convert": "classify"}], ids=str)
def test_models_that_generate_nothing(random_target, options):
    assert refusal(random_target, SPEC, **options).startswith("eesd: runner='pooling' is not supported ")


@pytest.mark.feature("watermarks", "refused")
def test_watermarks(random_target):
    message = refusal(random_target, SPEC, watermark_config={"algorithm": "gumbel", "key": 987654321})
    assert message.startswith("eesd: watermark_config is not supported") and "987654321" not in message


@pytest.mark.feature("replayed traces, V2", "refused")
def test_a_replayed_trace():
    from vllm_eesd.host.speculative import check_sampling

    args = SimpleNamespace(watermark_config=None, enable_trace_replay=True)
    check_sampling(SimpleNamespace(runner="V1"), args)  # vLLM's to refuse
    with pytest.raises(ValueError, match="^eesd: enable_trace_replay is not supported"):
        check_sampling(SimpleNamespace(runner="V2"), args)


@pytest.mark.parametrize("asked", [{"min_p": 0.3}, {"logit_bias": {5: 1.0}}, {"trace_decode_token_ids": [5]}], ids=str)
def test_a_request_is_checked_as_by_plain_vllm(random_target, asked):
    """vLLM refuses these beside drafts of any method, the last one by a message that is not plain vLLM's."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    ours = config_of(random_target, SPEC)
    other = config_of(random_target, {"method": "ngram", "num_speculative_tokens": 3})
    params, of_engine = SamplingParams(**asked), (ours.structured_outputs_config, None)
    params.verify(ours.model_config, None, *of_engine)
    params.verify(ours.model_config, ours.speculative_config, *of_engine)
    with pytest.raises((ValueError, VLLMValidationError), match="supported with speculative decoding"):
        params.verify(ours.model_config, other.speculative_config, *of_engine)


def parsed(*arguments):
    """Return vLLM's arguments of an engine, as a command line gives them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_eesd.host import plugin

    plugin.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--skip-tokenizer-init", *arguments]))


@pytest.mark.feature("--spec-method, --spec-model and --spec-tokens", "the same as --speculative-config")
def test_vllms_flags_for_the_fields_of_a_speculative_config(random_target, cloned_head):
    head = cloned_head(random_target, 2, 2)
    for arguments, directory, longest in (
        (["--spec-method", "eesd", "--spec-model", head, "--spec-tokens", "8"], head, 8),
        (["--spec-method", "eesd", "--spec-model", head], head, LONGEST_NGRAM_DRAFT),
        (["--speculative-config", '{"method": "eesd", "exit-layer": 3}', "--spec-tokens", "2"], None, 2),
        (["--speculative-config", '{"exit_layer": 3}', "--spec-method", "eesd"], None, LONGEST_NGRAM_DRAFT),
        (["--speculative-config", "eesd", "--spec-tokens", "2", "--spec-model", head], head, 2),
    ):
        args = parsed("--model", random_target, *arguments)
        for _ in range(2):  # a server makes it twice of the same arguments
            config = args.create_engine_config().speculative_config
            assert (config.head_directory, config.num_speculative_tokens) == (directory, longest)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", "eesd", "--spec-method", "eesd"],
        ["--speculative-config", "eesd", "--spec-method", "ngram"],
        ["--speculative-config", '{"method": "eesd", "num-speculative-tokens": 4}', "--spec-tokens", "2"],
    ],
    ids=" ".join,
)
def test_a_field_that_is_set_twice(random_target, arguments):
    with pytest.raises(ValueError, match="--spec-.* and --speculative-config.* are mutually exclusive"):
        parsed("--model", random_target, *arguments).create_engine_config()


def test_flags_that_ask_for_another_method_are_vllms(random_target):
    from vllm_eesd.host.engine_seams import is_eesd, with_flags

    flags = SimpleNamespace(spec_method="ngram", spec_model=None, spec_tokens=3)
    assert with_flags(None, flags) is None
    given = {"prompt_lookup_max": 4}
    assert with_flags(given, flags) is given and not is_eesd(given)
    config = parsed("--model", random_target, "--spec-method", "ngram", "--spec-tokens", "3").create_engine_config()
    assert config.speculative_config.method == "ngram"


def test_serving_a_head_names_the_command(random_target, cloned_head, embedded_model, tmp_path):
    head = shutil.copytree(cloned_head(random_target, 2, 2), tmp_path / "head")
    assert config_of(str(head)).speculative_config.head_directory == str(head)  # its target is where it was
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/model"
    (head / "config.json").write_text(json.dumps(config))
    message = refusal(str(head), None)
    assert message.startswith(f"eesd: {head} is an exit head and no model, and 'someone/model', ")
    assert message.endswith(f"""vllm serve TARGET --speculative-config '{{"method": "eesd", "model": "{head}"}}'""")
    shipped = embedded_model / "eesd"
    assert refusal(str(shipped), None).endswith(f"vllm serve {embedded_model} --speculative-config eesd")


@pytest.mark.parametrize("spec", [None, "eesd", {"method": "eesd", "exit_layer": 2}], ids=str)
def test_a_model_that_is_not_here_is_vllms_to_refuse(spec):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises((OSError, ValueError)) as error:
        EngineArgs(model="/nowhere/model", speculative_config=spec).create_engine_config()
    assert "exit head" not in str(error.value)


@pytest.mark.feature("data parallel: state_file and trace_file", "one of each engine")
def test_every_engine_has_files_of_its_own():
    from vllm_eesd.host.round_setup import own_file

    assert [own_file(name, 0) for name in ("/tmp/a.b/state.json", "rounds")] == ["/tmp/a.b/state.json", "rounds"]
    assert [own_file(name, 2) for name in ("/tmp/a.b/state.json", "rounds")] == ["/tmp/a.b/state.2.json", "rounds.2"]
    assert own_file(None, 2) is None


@pytest.mark.feature("data parallel: metrics", "a series of each engine")
def test_the_second_of_two_engines(engine, greedy, random_target, drafter_of, tmp_path, monkeypatch):
    """It is told which one it is as vLLM's engine process is, after the config was made and sent to it."""
    from prometheus_client import REGISTRY
    from vllm.v1.engine.core import EngineCore

    from vllm_eesd.host import metrics

    start = EngineCore.__init__

    def start_as_the_second(self, vllm_config, *args, **kwargs):
        vllm_config.parallel_config.data_parallel_index = 1
        start(self, vllm_config, *args, **kwargs)

    monkeypatch.setattr(EngineCore, "__init__", start_as_the_second)
    monkeypatch.setattr(metrics, "PUBLISH_EVERY_S", 0.02)
    files = {"state_file": str(tmp_path / "state.json"), "trace_file": str(tmp_path / "rounds.jsonl")}
    with engine(random_target, SPEC | files) as llm:
        greedy(llm, [[5, 17, 300]], max_tokens=8)
        drafter_of(llm).policy.save_state()
        deadline, rounds = time.monotonic() + 60, drafter_of(llm).stats.rounds
        while REGISTRY.get_sample_value("eesd:rounds_total", {"engine": "1"}) != rounds > 0:
            assert time.monotonic() < deadline, "nothing is published"
            time.sleep(0.02)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"state.1.json", "rounds.1.jsonl"}


#: How EESD is asked for, and what a vLLM says to it that has not loaded the plugin.
UNLOADED = {
    "--speculative-config eesd": "Value eesd cannot be converted",
    "--spec-method eesd": "invalid choice: 'eesd'",
}


@pytest.mark.parametrize("asked", UNLOADED)
def test_where_the_plugin_is_kept_out(random_target, asked):
    """Nothing of it runs then, so these are vLLM's words; docs/guide.md explains them, `eesd doctor` the cause."""
    message = vllm_serve.refused(random_target, *asked.split(), VLLM_PLUGINS="other")
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    (row,) = (line for line in guide.splitlines() if "`VLLM_PLUGINS` is set and does not name `eesd`" in line)
    assert UNLOADED[asked] in message and UNLOADED[asked] in row
