"""Learned state over restarts: whole or not at all."""

import json

import numpy as np
import pytest
from outcomes import outcome

from vllm_eesd.config import EESDConfig, check_state_file
from vllm_eesd.policy import BetaPosterior, build_policy

ONE = np.array([0])


def learned(path, name="goodput", key=""):
    policy = build_policy(name, BetaPosterior(1, 2, 2), 0, {"prior_key": "lora"}, state_file=str(path))
    policy.reset(ONE, [key])
    for _ in range(200):
        policy.observe(outcome(ONE, [1], [0], confidences=[[0.9]]))
    return policy


def prior_mean(policy, key=""):
    policy.reset(ONE, [key])
    return policy.posterior.mean(ONE)[0]


def test_a_new_start_takes_over_what_was_learned(tmp_path):
    path = tmp_path / "state.json"
    before = learned(path, key="adapter")
    before.save_state()
    after = build_policy("goodput", BetaPosterior(3, 2, 2), 0, {"prior_key": "lora"}, state_file=str(path))
    assert prior_mean(before, "adapter") < 0.1
    assert prior_mean(after, "adapter") == pytest.approx(prior_mean(before, "adapter"))
    assert prior_mean(after, "another") == 0.5
    assert after.calibration.acceptance(np.array([0.9], dtype=np.float32), 0)[0] < 0.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"], "no temporary file is left"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": "eesd-policy-state", "version": 2}', b"\xff\xfe"])
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, damage, log_lines):
    path = tmp_path / "state.json"
    path.write_bytes(damage)
    policy = build_policy("goodput", BetaPosterior(1, 2, 2), 0, {}, state_file=str(path))
    (line,) = log_lines
    assert "is ignored" in line and str(path) in line
    assert prior_mean(policy) == 0.5
    policy.save_state()
    assert json.loads(path.read_text())["version"] == 1


def test_half_a_damaged_file_changes_nothing(tmp_path):
    path = tmp_path / "state.json"
    learned(path).save_state()
    state = json.loads(path.read_text())
    state["priors"] = {"": [float("nan"), 1.0]}
    path.write_text(json.dumps(state))
    policy = build_policy("goodput", BetaPosterior(1, 2, 2), 0, {}, state_file=str(path))
    assert policy.calibration.acceptance(np.array([0.9], dtype=np.float32), 0)[0] > 0.9


def test_no_file_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_policy("goodput", BetaPosterior(1), 0, {}).save_state()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["", 3, "no/such/directory/state.json"])
def test_a_path_that_cannot_be_is_refused_at_once(value):
    with pytest.raises(ValueError, match="eesd: state_file="):
        check_state_file(EESDConfig.parse({"method": "eesd", "state_file": value}).state_file)


def test_a_wrong_prior_key_is_refused():
    with pytest.raises(ValueError, match="prior_key='user' is not valid: input should be 'none' or 'lora'"):
        build_policy("fixed", BetaPosterior(1), 0, {"prior_key": "user"})
