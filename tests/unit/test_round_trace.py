"""What is written of every round, and what becomes of a file that is full, torn or not ours."""

import json
import os
import stat
import time

import numpy as np
import pytest
from outcomes import outcome

from vllm_eesd.config import EESDConfig, check_trace_file
from vllm_eesd.policy import POLICIES, BetaPosterior, CostModel, build_policy
from vllm_eesd.request_options import RequestOptions
from vllm_eesd.traces import rounds as round_trace
from vllm_eesd.traces.read import read as read_rounds
from vllm_eesd.traces.rounds import Drafts, Judged, RoundTrace, Verdict

SLOTS = np.array([2, 0])
#: Of those two slots, and of the first alone.
CONFIDENCES = np.array([[0.91, 0.5, 0.25], [0.8, np.nan, np.nan]], dtype=np.float32)
DRAFTS = Drafts(SLOTS, CONFIDENCES, np.zeros(2, dtype=bool))
FIRST = Drafts(SLOTS[:1], CONFIDENCES[:1], np.zeros(1, dtype=bool))


@pytest.fixture
def policy():
    """Of four requests at most."""
    made = build_policy("fixed", BetaPosterior(4, 3.0, 1.0), 0, {}, CostModel())
    made.reset(SLOTS)
    return made


def write(path, policy, rounds=1, **options):
    trace = RoundTrace(str(path), {"num_speculative_tokens": 8}, **options)
    judged = [Judged("a", [7, 8, 9], [7, 8, 1]), Judged("b", [5], [5, 6])]
    for _ in range(rounds):
        trace.add(judged, DRAFTS, policy, time.perf_counter() - 0.002, [0.5, 0.4, 0.3], 0.1)
    trace.close()


def test_a_round_is_a_line_per_request(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    policy.observe(outcome(SLOTS[1:], [1], [0]))  # slot 0's request is believed to be harder
    write(tmp_path / "rounds.jsonl", policy)
    first, second = read_rounds(tmp_path / "rounds.jsonl")
    assert (first["request"], first["draft"], first["accepted"], first["emitted"]) == ("a", [7, 8, 9], 2, [7, 8, 1])
    assert first["confidences"] == [0.91, 0.5, 0.25]
    assert (second["draft"], second["accepted"], second["confidences"]) == ([5], 1, [0.8])
    assert first["draft_steps_ms"] == [0.5, 0.4, 0.3] and first["draft_rest_ms"] == 0.1
    assert first["verify_ms"] == pytest.approx(2) and first["batch"] == 2
    assert first["draft_step_ms"] == pytest.approx(0.125 * first["plain_ms"])
    assert first["posterior_mean"] == 0.75 and second["posterior_mean"] == 0.6
    low, high = first["posterior_interval"]
    assert 0.3 < low < 0.45 and 0.97 < high < 1  # Beta(3, 1): 0.368 and 0.983


def test_unknown_confidences_are_null_and_rounds_without_drafts_are_rounds(tmp_path, policy):
    trace = RoundTrace(str(tmp_path / "rounds.jsonl"), {})
    judged = [Judged("a", [], [4]), Judged("b", [5, 6], [9])]
    trace.add(judged, DRAFTS, policy, time.perf_counter(), [], 0.0)
    trace.close()
    first, second = read_rounds(tmp_path / "rounds.jsonl")
    assert (first["draft"], first["accepted"], first["draft_steps_ms"]) == ([], 0, [])
    assert second["confidences"] == [0.8, None]


def test_rounds_whose_outcome_is_under_way_are_written_later_and_in_order(tmp_path, policy):
    trace = RoundTrace(str(tmp_path / "rounds.jsonl"), {})
    first = []  # two rows decoded of three
    verdict = Verdict(np.array([0, 2]), [Judged("a", [7, 8], [7, 1]), Judged("c", [5], [5, 6])], [0.5], 0.1, 2.0)
    confidences = np.stack([CONFIDENCES[0], np.full(3, np.nan, dtype=np.float32), CONFIDENCES[1]])
    three = Drafts(np.array([2, 1, 0]), confidences, np.zeros(3, dtype=bool))
    trace.add_pending(three, policy, time.perf_counter(), 2, lambda: first[0] if first else None)
    trace.add([Judged("b", [], [4])], FIRST, policy, time.perf_counter(), [], 0.0)
    trace._flush()
    assert read_rounds(tmp_path / "rounds.jsonl") == []
    first.append(verdict)
    trace.close()
    rounds = read_rounds(tmp_path / "rounds.jsonl")
    assert [(record["request"], record["emitted"]) for record in rounds] == [("a", [7, 1]), ("c", [5, 6]), ("b", [4])]
    assert [record["confidences"] for record in rounds] == [[0.91, 0.5], [0.8], []]
    assert rounds[0]["draft_steps_ms"] == [0.5] and rounds[0]["verify_ms"] == 2.0 and rounds[0]["batch"] == 2


def test_writing_waits_for_nobody(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(round_trace, "FLUSH_EVERY_S", 0.01)
    trace = RoundTrace(str(tmp_path / "rounds.jsonl"), {})
    trace.add([Judged("a", [], [4])], FIRST, policy, time.perf_counter(), [], 0.0)
    deadline = time.monotonic() + 60
    while not read_rounds(tmp_path / "rounds.jsonl"):
        assert time.monotonic() < deadline, "the writer never wrote"
        time.sleep(0.01)
    trace.close()


def test_a_full_file_is_said_once_and_left_alone(tmp_path, policy, log_lines):
    path = tmp_path / "rounds.jsonl"
    write(path, policy, rounds=20, max_bytes=2000)
    full = path.stat().st_size
    assert full >= 2000 and len(log_lines) == 1 and "is full" in log_lines[0]
    write(path, policy, rounds=20, max_bytes=2000)
    assert path.stat().st_size - full < 200, "a header, and no rounds behind it"
    assert len(read_rounds(path)) == 40


def test_a_second_start_appends(tmp_path, policy):
    write(tmp_path / "rounds.jsonl", policy)
    write(tmp_path / "rounds.jsonl", policy)
    assert len(read_rounds(tmp_path / "rounds.jsonl")) == 4


def test_half_a_last_line_is_left_out_and_half_a_line_elsewhere_is_named(tmp_path, policy):
    path = tmp_path / "rounds.jsonl"
    write(path, policy, rounds=2)
    whole = path.read_text()
    path.write_text(whole[:-30])
    assert len(read_rounds(path)) == 3
    path.write_text(whole.replace('"emitted"', '"emit', 1))
    with pytest.raises(ValueError, match="rounds.jsonl: not a trace: line 2"):
        read_rounds(path)


def test_what_a_killed_process_left_is_no_obstacle_to_the_next(tmp_path, policy):
    """Without a line end of its own the next header would be glued to half a line, and the whole file unreadable."""
    path = tmp_path / "rounds.jsonl"
    write(path, policy)
    path.write_bytes(path.read_bytes()[:-30])
    write(path, policy)
    assert [record["request"] for record in read_rounds(path)] == ["a", "a", "b"]
    path.write_text("")
    write(path, policy)
    assert len(read_rounds(path)) == 2


@pytest.mark.parametrize("content", ["{}\n", "[1]\n", "x\n", '{"format":"eesd-rounds","version":2}\n'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "other").write_text(content)
    with pytest.raises(ValueError, match="other: not a trace: line 1"):
        read_rounds(tmp_path / "other")


def test_a_disk_that_fails_ends_the_writing_only(tmp_path, policy, log_lines):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    trace = RoundTrace("/dev/full", {})
    trace.add([Judged("a", [], [4])], FIRST, policy, time.perf_counter(), [], 0.0)
    trace.close()
    (line,) = log_lines
    assert "writing ends" in line


@pytest.mark.parametrize("value", ["", 3, "/nowhere/at/all.jsonl", "/", "a\0b", {}])
def test_a_path_that_cannot_be_written_is_one_line(value):
    with pytest.raises(ValueError, match=r"eesd: trace_file=.* is not valid \(.*\): must name") as error:
        check_trace_file(value)
    assert "\n" not in str(error.value)


def test_a_new_file_is_its_owners_alone(tmp_path):
    check_trace_file(None)
    check_trace_file(str(tmp_path / "rounds.jsonl"))
    assert not list(tmp_path.iterdir())  # looking leaves nothing behind
    RoundTrace(str(tmp_path / "rounds.jsonl"), {}).close()
    check_trace_file(str(tmp_path / "rounds.jsonl"))
    assert stat.S_IMODE((tmp_path / "rounds.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("field", ["state_file", "trace_file"])
def test_files_are_fields_and_no_settings_of_a_policy(tmp_path, field):
    path = str(tmp_path / "file.jsonl")
    assert getattr(EESDConfig.parse({"method": "eesd", field: path}), field) == path
    for name in POLICIES:
        with pytest.raises(ValueError, match=f"policy_args.{field} is not valid: {field} is a field beside") as error:
            build_policy(name, BetaPosterior(1), 0, {field: path})
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError):
        RequestOptions.parse({f"eesd_{field}": json.dumps(path)})
