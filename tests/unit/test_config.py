"""Every wrong value is one line that names the field, the value and what is allowed."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from vllm_eesd.config import EESDConfig


def test_the_bare_word_means_the_defaults():
    config = EESDConfig.parse("eesd")
    assert config == EESDConfig.parse({"method": "eesd"}) == EESDConfig()
    assert (config.num_speculative_tokens, config.policy, config.draft_sample_method) == (None, "goodput", "auto")


def test_vllms_own_word_for_drawn_drafts_is_understood():
    assert EESDConfig.parse({"method": "eesd", "draft_sample_method": "probabilistic"}) == EESDConfig()


def test_draft_lengths_by_batch_size():
    from vllm_eesd.host.speculative import check_batch_sizes

    name, v2 = "num_speculative_tokens_per_batch_size", SimpleNamespace(runner="V2")
    given = EESDConfig.parse({"method": "eesd", name: [[1, 4, 8], [5, 64, 2]]})
    assert getattr(given, name) == [(1, 4, 8), (5, 64, 2)]
    check_batch_sizes(given, v2)
    check_batch_sizes(EESDConfig(), SimpleNamespace(runner="V1"))
    with pytest.raises(ValueError, match=f"eesd: {name}: Model Runner V1"):
        check_batch_sizes(given, SimpleNamespace(runner="V1"))
    with pytest.raises(ValueError, match=rf"eesd: {name}=\[\(2, 4, 8\)\] is not valid: .*start at 1"):
        check_batch_sizes(EESDConfig.parse({"method": "eesd", name: [[2, 4, 8]]}), v2)


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        EESDConfig().num_speculative_tokens = 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens", "0", "greater than or equal to 1"]),
        ({"num_speculative_tokens": -1}, ["num_speculative_tokens", "-1", "greater than or equal to 1"]),
        ({"num_speculative_tokens": 1000}, ["num_speculative_tokens", "1000", "less than or equal to 32"]),
        ({"num_speculative_tokens": "x"}, ["num_speculative_tokens", "'x'", "integer"]),
        ({"num_speculative_tokens": True}, ["num_speculative_tokens", "True", "integer"]),
        ({"exit_layer": 0}, ["exit_layer", "0", "greater than or equal to 1"]),
        ({"exit_layer": "two"}, ["exit_layer", "'two'", "integer"]),
        ({"policy": "greedy_best"}, ["policy", "'greedy_best'", "beta_ts", "fixed"]),
        ({"unseeded_verification": "gumbel"}, ["unseeded_verification", "'gumbel'", "ratio", "shared_noise"]),
        ({"draft_sample_method": "typical"}, ["draft_sample_method", "'typical'", "auto", "greedy"]),
        ({"num_speculative_tokens_per_batch_size": [[1, 2]]}, ["num_speculative_tokens_per_batch_size", "required"]),
        ({"model": 7}, ["model", "7", "string"]),
        ({"seed": -3}, ["seed", "-3"]),
        ({"policy_args": []}, ["policy_args", "[]", "dictionary"]),
        # vLLM's lossy verification: EESD emits what the target would have said.
        ({"rejection_sample_method": "fly"}, ["unknown field 'rejection_sample_method'", "num_speculative_tokens"]),
        ({"draft_tokens": 3}, ["unknown field 'draft_tokens'", "num_speculative_tokens"]),
    ],
)
def test_bad_values(fields, named):
    with pytest.raises(ValueError) as error:
        EESDConfig.parse({"method": "eesd", **fields})
    message = str(error.value)
    assert "\n" not in message
    for part in named:
        assert part in message
