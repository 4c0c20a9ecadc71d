"""`--speculative-config` from end to end: vLLM's option, then the config object, on a real target's configuration."""

import json

import pytest
from hostile_json import ANY, as_bytes, damaged, mutated
from hypothesis import given, settings
from hypothesis import strategies as st

FUZZ = settings(settings.get_profile("fuzz"))
LONGEST_MESSAGE = 1000
NAMES = [
    "", ".", "/", "~", "\0", "a/b", "a/../b", "../..", "/dev/zero", "/proc/self/mem", "hub/name\nline",
    "x" * 5000, "a/" + "b" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def target(random_target):
    """(model config, parallel config) of a target, as vLLM makes them before it reads the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_eesd.host import plugin

    plugin.register()
    config = EngineArgs(model=random_target, skip_tokenizer_init=True).create_engine_config()
    return config.model_config, config.parallel_config


@pytest.fixture(scope="module")
def spec(random_target, cloned_head):
    return {"method": "eesd", "model": cloned_head(random_target, 2, 2), "num-speculative-tokens": 4, "seed": 1}


def build(spec, target, counts):
    from vllm_eesd.host.engine_seams import is_eesd
    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    if not is_eesd(spec):
        return None
    counts["inputs: --speculative-config"] += 1
    try:
        return EESDSpeculativeConfig.build(spec, *target)
    except ValueError as error:
        message = str(error)
        assert message and message.splitlines() == [message] and len(message) <= LONGEST_MESSAGE, message[:2000]
        counts["refused: --speculative-config"] += 1
        return None


def test_the_good_one_is_taken(spec, target, counts):
    assert build(spec, target, counts).num_speculative_tokens == 4


@FUZZ
@given(st.data())
def test_build(spec, target, counts, data):
    build(
        data.draw(mutated(spec) | st.sampled_from(NAMES).map(lambda name: spec | {"model": name}) | ANY), target, counts
    )


@FUZZ
@given(st.data())
def test_the_command_lines_text(spec, target, counts, data):
    """What argparse hands to the option's reader is JSON, the bare word, or refused by argparse."""
    import argparse

    from vllm.engine.arg_utils import EngineArgs

    text = data.draw((damaged(as_bytes(spec)) | mutated(spec).map(as_bytes)).map(lambda b: b.decode(errors="replace")))
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    (option,) = [action for action in parser._actions if action.dest == "speculative_config"]
    try:
        read = option.type(text)
    except (ValueError, argparse.ArgumentTypeError):
        return
    build(read, target, counts)
    with pytest.raises(ValueError, match="nested too deeply"):
        option.type("[" * 100_000)
    assert option.type("eesd") == "eesd" and option.type(json.dumps(spec)) == spec
