"""Dense traces: what is written is read again, and a damaged file is named."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import synthetic_trace

from vllm_eesd.policy.costs import CostModel
from vllm_eesd.simulate.world import default_costs
from vllm_eesd.traces.dense import DenseRecorder, DenseTrace, RequestTrace, write
from vllm_eesd.traces.read import read_dense

TRACE = DenseTrace(
    model="m",
    workload="w",
    num_speculative_tokens=2,
    costs=default_costs(),
    requests=[RequestTrace(np.array([0, 2, 1]), np.array([[0.1, 0.2], [0.999, 1.0], [0.5, 0.0]], dtype=np.float32))],
    prior=(6.5, 3.5),
)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_survives_its_file(tmp_path, name):
    write(tmp_path / name, TRACE)
    read = read_dense(tmp_path / name)
    assert (read.model, read.workload, read.num_speculative_tokens, read.prior) == ("m", "w", 2, (6.5, 3.5))
    np.testing.assert_array_equal(read.requests[0].matches, TRACE.requests[0].matches)
    np.testing.assert_array_equal(read.requests[0].confidences, TRACE.requests[0].confidences)
    CostModel().restore(read.costs)
    write(tmp_path / "again", read)
    write(tmp_path / "first", TRACE)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "first").read_bytes()


def test_the_same_trace_gives_the_same_compressed_bytes(tmp_path):
    for name in ("a.gz", "b.gz"):
        write(tmp_path / name, TRACE)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_trace_is_small(tmp_path):
    """Git keeps them: under two bytes a draft token, noisy as confidences are."""
    write(tmp_path / "t.gz", synthetic_trace((0.3, 0.9), 0.5, num_requests=10, num_tokens=200))
    assert (tmp_path / "t.gz").stat().st_size < 2 * 8 * 2000


def test_texts_survive_their_file_and_requests_may_lack_them(tmp_path):
    (silent,) = TRACE.requests
    told = replace(silent, prompt=np.array([5, 4095], dtype=np.int32), emitted=np.array([7, 8, 9, 7], dtype=np.int32))
    write(tmp_path / "t", replace(TRACE, requests=[silent, told]))
    first, second = read_dense(tmp_path / "t").requests
    assert first.prompt is None and first.emitted is None and not len(first.text()) and first.num_tokens(2) == 0
    assert second.text().tolist() == [5, 4095, 7, 8, 9, 7] and second.text().dtype == np.int32
    assert second.num_tokens(0) == 3


def test_the_recorder_keeps_the_text_it_judges_by():
    recorder = DenseRecorder(2)
    emitted = [3, 4, 3, 4, 5]
    for token in emitted:
        if "a" not in recorder:
            recorder.begin("a", [1, 2])
        recorder.add(["a"], [[token]], [[4, 3]], np.array([[0.5, 0.25]], dtype=np.float32))
    (request,) = recorder.requests()
    assert request.matches.tolist() == [2, 0, 1]  # the last two positions' outcomes are not known
    assert request.prompt.tolist() == [1, 2] and request.emitted.tolist() == emitted


LINES = [
    {"format": "eesd-trace", "version": 2, "model": "m", "workload": "w", "num_speculative_tokens": 2},
    {"matches": [1], "confidences": [500, 400]},
]


@pytest.mark.parametrize(
    ("line", "change", "named"),
    [
        (0, {"format": "other"}, "line 1"),
        (0, {"version": 3}, "version=3: this reads version 2"),
        (0, {"version": 1}, "version=1: this reads version 2"),
        (0, {"version": True}, "version"),
        (0, {"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        (0, {"num_speculative_tokens": "2"}, "num_speculative_tokens='2'"),
        (0, {"prior": [1]}, "prior"),
        (0, {"prior": [1, -2]}, "prior"),
        (0, {"costs": {"verify_ms": {"x": 1}}}, "line 1"),
        (1, {"matches": [3]}, "line 2"),
        (1, {"matches": [-1]}, "0 to 2"),
        (1, {"confidences": [500]}, "line 2"),
        (1, {"confidences": [500, 1001]}, "0 to 1000"),
        (1, {"matches": None}, "line 2"),
        (1, {"prompt": [1]}, "emitted"),
        (1, {"emitted": [1]}, "prompt"),
        (1, {"prompt": [], "emitted": []}, "at least 1 emitted"),
        (1, {"prompt": [1], "emitted": [-1]}, "0 to 2147483647"),
        (1, {"prompt": [1 << 31], "emitted": [1]}, "0 to 2147483647"),
        (1, {"prompt": [1 << 70], "emitted": [1]}, "0 to 2147483647"),
        (1, {"prompt": [1.5], "emitted": [1]}, "valid integer"),
        (1, {"prompt": [[1]], "emitted": [1]}, "valid integer"),
        (1, {"prompt": None, "emitted": [1]}, "must stand together"),
        (1, {"prompt": "1", "emitted": [1]}, "valid array"),
        (1, {"prompt": [True], "emitted": [1]}, "valid integer"),
        (1, {"prompt": [0] * (1 << 20), "emitted": [1]}, "at most 1048576"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, change, named):
    lines = [dict(text) for text in LINES]
    lines[line] |= change
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match="t.jsonl") as error:
        read_dense(path)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"not json", b"\xff\xff", gzip.compress(b"{}", mtime=0)[:-4], b"[1]\n"],
    ids=["empty", "not_json", "not_text", "cut_gzip", "not_a_mapping"],
)
def test_what_is_no_trace_is_refused(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ValueError, match="not a trace"):
        read_dense(tmp_path / "t")
