"""What a request may say about its own speculation, and how it is refused."""

import pytest

from vllm_eesd.request_options import RequestOptions


@pytest.mark.parametrize("extra_args", [None, {}, {"somebody_elses": 1}])
def test_defaults(extra_args):
    assert RequestOptions.parse(extra_args) == RequestOptions()


@pytest.mark.parametrize("value, enabled", [(True, True), (False, False), ("false", False), ("true", True), (0, False)])
def test_enabled(value, enabled):
    assert RequestOptions.parse({"eesd_enabled": value}).enabled is enabled


@pytest.mark.parametrize("value", [0, 3, 3.0, 32])
def test_max_draft_tokens(value):
    assert RequestOptions.parse({"eesd_max_draft_tokens": value, "other": []}).max_draft_tokens == value


@pytest.mark.parametrize(
    "extra_args, words",
    [
        ({"eesd_enabled": "yes"}, ("eesd_enabled", "'yes'", "true or false")),
        ({"eesd_enabled": 2}, ("eesd_enabled", "2", "true or false")),
        ({"eesd_enabled": [True]}, ("eesd_enabled", "true or false")),
        ({"eesd_max_draft_tokens": -1}, ("eesd_max_draft_tokens", "-1", "0 to 32")),
        ({"eesd_max_draft_tokens": 33}, ("33", "0 to 32")),
        ({"eesd_max_draft_tokens": 2.5}, ("2.5", "whole number")),
        ({"eesd_max_draft_tokens": float("inf")}, ("inf", "whole number")),
        ({"eesd_max_draft_tokens": float("nan")}, ("nan", "whole number")),
        ({"eesd_max_draft_tokens": True}, ("True", "whole number")),
        ({"eesd_max_draft_tokens": "4"}, ("'4'", "whole number")),
        ({"eesd_policy": "fixed"}, ("eesd_policy", "allowed")),
        ({"eesd_max_draft": 4}, ("'eesd_max_draft' ", "allowed", "eesd_max_draft_tokens")),
    ],
)
def test_refusals(extra_args, words):
    with pytest.raises(ValueError) as caught:
        RequestOptions.parse(extra_args)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
