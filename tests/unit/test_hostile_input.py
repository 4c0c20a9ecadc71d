"""Hostile input: whatever a file, an option or a request holds, the outcome is success or one line of ValueError.

`make fuzz` runs the same with many more inputs.
"""

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hostile_json import ANY, NESTED, as_bytes, damaged, mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.bench.top import between, parse
from vllm_eesd.config import MAX_SPECULATIVE_TOKENS, EESDConfig, check_state_file, check_trace_file
from vllm_eesd.distill.data import _jsonl_texts
from vllm_eesd.exit_head.checkpoint import MAX_HEADER_BYTES, ExitHeadConfig, Verifier, read_tensors, write_head
from vllm_eesd.exit_head.shapes import expected_shapes
from vllm_eesd.policy import POLICIES, BetaPosterior, Calibration, build_policy
from vllm_eesd.policy.calibration import EDGES
from vllm_eesd.policy.posterior import MAX_PRIOR_KEYS
from vllm_eesd.policy.state import load_state, save_state
from vllm_eesd.request_options import RequestOptions
from vllm_eesd.traces.dense import DenseTrace, RequestTrace, write
from vllm_eesd.traces.read import read as read_rounds
from vllm_eesd.traces.read import read_dense
from vllm_eesd.traces.rounds import FORMAT, VERSION

FUZZ = settings(settings.get_profile("fuzz"))
#: An error is for a terminal: one line of at most so many characters.
LONGEST_MESSAGE = 1000


@pytest.fixture(scope="session")
def refused_or_fine(counts):
    """Run an input; anything but success or one line of ValueError fails the test."""

    @contextlib.contextmanager
    def run(target):
        counts[f"inputs: {target}"] += 1
        try:
            yield
        except ValueError as error:
            message = str(error)
            assert message and message.splitlines() == [message] and len(message) <= LONGEST_MESSAGE, message[:2000]
            counts[f"refused: {target}"] += 1

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


LAYER_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def head(folder):
    """A good head: its directory, config.json as a value, model.safetensors as bytes."""
    verifier = Verifier(architecture="LlamaForCausalLM", hidden_size=16, num_hidden_layers=4, vocab_size=64)
    config = ExitHeadConfig(
        exit_layer=2, head_type="deep_context", verifier=verifier, transformer_layer_config=LAYER_CONFIG
    )
    write_head(folder / "head", config, {n: torch.ones(shape) for n, shape in expected_shapes(config).items()})
    read_tensors(folder / "head")
    directory = folder / "head"
    return (
        directory,
        json.loads((directory / "config.json").read_text()),
        (directory / "model.safetensors").read_bytes(),
    )


# --- what a user or a request sets

SPEC = {
    "method": "eesd",
    "model": "head",
    "exit_layer": 2,
    "num_speculative_tokens": 4,
    "policy": "goodput",
    "policy_args": {"probe_budget": 0.01, "prior_key": "lora"},
    "state_file": "state.json",
    "trace_file": "rounds.jsonl",
    "seed": 0,
}


@FUZZ
@given(st.sampled_from(sorted(POLICIES)).flatmap(lambda name: mutated(SPEC | {"policy": name})) | ANY)
def test_speculative_config(refused_or_fine, spec):
    if not isinstance(spec, (dict, str)):
        return  # not asked for EESD
    with refused_or_fine("speculative config"):
        config = EESDConfig.parse(spec)
        check_state_file(config.state_file)
        check_trace_file(config.trace_file)
        policy = build_policy(config.policy, BetaPosterior(2), config.seed, config.policy_args)
        assert 1 <= (config.num_speculative_tokens or 1) <= MAX_SPECULATIVE_TOKENS
        assert np.isfinite(policy.posterior.parameters(np.arange(2))).all()


OPTIONS = {"eesd_enabled": True, "eesd_max_draft_tokens": 3, "other": 1}


@FUZZ
@given(mutated(OPTIONS) | st.dictionaries(st.sampled_from(sorted(OPTIONS)) | st.integers(), ANY))
def test_request_options(refused_or_fine, extra_args):
    if not isinstance(extra_args, dict):
        return  # refused by vLLM
    with refused_or_fine("request options"):
        options = RequestOptions.parse(extra_args)
        assert isinstance(options.enabled, bool)
        assert isinstance(options.max_draft_tokens, int) and 0 <= options.max_draft_tokens <= MAX_SPECULATIVE_TOKENS


# --- head directories


@FUZZ
@given(st.data())
def test_head_config(refused_or_fine, head, folder, data):
    directory, config, weights = head
    content = data.draw(mutated(config).map(as_bytes) | damaged(as_bytes(config)) | NESTED.map(as_bytes))
    broken = folder / "broken_config"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_bytes(content)
    (broken / "model.safetensors").write_bytes(weights)
    with refused_or_fine("head config"):
        read_tensors(broken)


HEADER = struct.Struct("<Q")


@FUZZ
@given(st.data())
def test_head_weights(refused_or_fine, head, folder, data):
    """Damaged bytes, and a header that lies about dtypes, shapes and offsets."""
    directory, config, weights = head
    (length,) = HEADER.unpack(weights[:8])
    header, body = json.loads(weights[8 : 8 + length]), weights[8 + length :]

    def with_header(value):
        text = as_bytes(value)
        return HEADER.pack(len(text)) + text + body

    content = data.draw(damaged(weights) | mutated(header).map(with_header))
    broken = folder / "broken_weights"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes(content)
    with refused_or_fine("head weights"):
        tensors = read_tensors(broken)
        assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "calibration.json"])
@pytest.mark.parametrize("leads_to", ["secret", "device", "pipe", "itself", "nowhere"])
def test_links_out_of_a_head_disclose_nothing(head, tmp_path, name, leads_to):
    """Links are followed, for the Hub's cache consists of them; only to regular files, and no content is shown."""
    directory, *_ = head
    broken = tmp_path / "head"
    broken.mkdir()
    for file in directory.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("password=hunter2\n")
    os.mkfifo(tmp_path / "pipe")
    places = {"secret": "../secret", "device": "/dev/zero", "pipe": "../pipe", "itself": name, "nowhere": "../nowhere"}
    (broken / name).symlink_to(places[leads_to])
    try:
        read_tensors(broken)
        Calibration.load(broken)
        refused = ""
    except ValueError as error:
        refused = str(error)
    assert "hunter2" not in refused and "\n" not in refused
    assert refused or (name == "calibration.json" and leads_to != "secret")  # no such file: nothing to calibrate by


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "calibration.json"])
def test_a_file_that_may_not_be_read(head, folder, name, monkeypatch):
    """Tests may run as root, who may read everything: the refusal is planted."""
    directory, *_ = head
    (directory / "calibration.json").write_text(json.dumps(CALIBRATION))
    open_path = pathlib.Path.open

    def refusing(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied")
        return open_path(self, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", refusing)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \(Permission denied\)"):
        read_tensors(directory)
        Calibration.load(directory)


@contextlib.contextmanager
def at_most(num_bytes):
    """Fail if Python's own allocations rise by more."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_absurd_sizes_are_refused_before_they_are_read(head, tmp_path):
    """Sparse files and compressed nothing: gigabytes that cost their sender a few bytes."""
    directory, config, weights = head
    for name, size in (("config.json", 1 << 40), ("model.safetensors", 1 << 40), ("calibration.json", 1 << 33)):
        broken = tmp_path / name.replace(".", "_")
        broken.mkdir()
        (broken / "config.json").write_text(json.dumps(config))
        (broken / "model.safetensors").write_bytes(weights)
        with (broken / name).open("ab") as file:
            file.truncate(size)
        with at_most(16 << 20), pytest.raises(ValueError, match="at most"):
            read_tensors(broken)
            Calibration.load(broken)
    bomb = tmp_path / "trace.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    assert bomb.stat().st_size < 1 << 21
    with at_most(600 << 20), pytest.raises(ValueError, match="more than"):
        read_dense(bomb)


def test_a_header_just_below_the_limit_is_bounded(head, tmp_path):
    directory, config, _ = head
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(HEADER.pack(MAX_HEADER_BYTES) + b"[" * MAX_HEADER_BYTES)
    with at_most(64 << 20), pytest.raises(ValueError, match="damaged"):
        read_tensors(tmp_path)


# --- other files


def usable(posterior, calibration):
    """Whatever was taken over leaves a posterior to draw from and rates between 0 and 1."""
    parameters = posterior.parameters(np.arange(posterior.max_num_reqs))
    assert np.isfinite(parameters).all() and (parameters > 0).all()
    assert np.isfinite(calibration.exponents).all()
    confidence = np.linspace(0, 1, 20, dtype=np.float32)
    for position in range(MAX_SPECULATIVE_TOKENS):
        rates = calibration.acceptance(confidence, position)
        assert ((rates > 0) & (rates < 1)).all()


@pytest.fixture(scope="module")
def state(folder):
    posterior, calibration = BetaPosterior(2), Calibration()
    posterior.learn_priors(100.0, 5.0)
    posterior.reset(np.arange(2), ["", "adapter"])
    posterior.observe(np.arange(2), np.array([4, 4]), np.array([2, 4]))
    save_state(folder / "state.json", posterior, calibration)
    return json.loads((folder / "state.json").read_text())


@FUZZ
@given(st.data())
def test_state_file(counts, folder, state, data):
    """A state is never worth an error: what cannot be used is ignored."""
    path = folder / "broken_state.json"
    path.write_bytes(data.draw(mutated(state).map(as_bytes) | damaged(as_bytes(state)) | NESTED.map(as_bytes)))
    posterior, calibration = BetaPosterior(2), Calibration()
    posterior.learn_priors(100.0, 5.0)
    counts["inputs: state file"] += 1
    counts["refused: state file"] += not load_state(path, posterior, calibration)
    usable(posterior, calibration)


@FUZZ
@given(st.dictionaries(st.text(max_size=5), st.tuples(st.floats(), st.floats()).map(list), max_size=MAX_PRIOR_KEYS + 9))
def test_learned_priors(refused_or_fine, priors):
    posterior = BetaPosterior(2)
    posterior.learn_priors(100.0, 5.0)
    with refused_or_fine("learned priors"):
        posterior.restore(priors)
    usable(posterior, Calibration())


CALIBRATION = {"edges": list(EDGES), "observed": [[9.0] * (len(EDGES) + 1)] * 2, "accepted": [[4.5] * 14] * 2}


@FUZZ
@given(st.data())
def test_calibration(refused_or_fine, folder, data):
    directory = folder / "calibration"
    directory.mkdir(exist_ok=True)
    content = data.draw(mutated(CALIBRATION).map(as_bytes) | damaged(as_bytes(CALIBRATION)) | NESTED.map(as_bytes))
    (directory / "calibration.json").write_bytes(content)
    with refused_or_fine("calibration"):
        usable(BetaPosterior(1), Calibration.load(directory))


@pytest.fixture(scope="module")
def trace(folder):
    """A good trace's lines."""
    silent = RequestTrace(np.array([1, 0, 2]), np.full((3, 2), 0.5, dtype=np.float32))
    told = dataclasses.replace(silent, prompt=np.array([4, 5]), emitted=np.array([6, 4, 5, 6, 4]))
    costs = {"verify_ms": {"1": [[0, 4.0], [2, 5.0]]}, "draft_step_ms": [[1, 0.5]], "draft_round_ms": [[1, 0.1]]}
    write(folder / "trace.jsonl", DenseTrace("model", "workload", 2, costs, [silent, told]))
    return (folder / "trace.jsonl").read_bytes()


@FUZZ
@given(st.data())
def test_trace(refused_or_fine, folder, trace, data):
    def with_line(number, value):
        changed = trace.splitlines()
        changed[number] = as_bytes(value)
        return b"\n".join(changed)

    lines = [json.loads(line) for line in trace.splitlines()]
    number = data.draw(st.integers(0, 2))
    content = data.draw(
        mutated(lines[number]).map(lambda value: with_line(number, value))
        | damaged(trace)
        | damaged(gzip.compress(trace, mtime=0))
        | NESTED.map(as_bytes)
    )
    path = folder / "broken.jsonl"
    path.write_bytes(content)
    with refused_or_fine("trace"):
        read = read_dense(path)
        assert all(request.confidences.shape[1] == read.num_speculative_tokens for request in read.requests)
        for request in read.requests:
            assert request.emitted is None or len(request.emitted) >= len(request.matches)
            assert request.text().dtype == np.int32 and (request.text() >= 0).all()


ROUND = {
    "request": "a", "at_s": 0.5, "draft": [7, 8], "confidences": [0.9, None], "accepted": 1, "emitted": [7, 1],
    "copied": False, "batch": 1, "draft_steps_ms": [0.5, 0.5], "draft_rest_ms": 0.1, "verify_ms": 3.0,
    "plain_ms": 2.5, "draft_step_ms": 0.4, "posterior_mean": 0.8, "posterior_interval": [0.6, 0.95],
}  # fmt: skip
ROUNDS = as_bytes({"format": FORMAT, "version": VERSION}) + b"\n" + as_bytes(ROUND) + b"\n"


@FUZZ
@given(damaged(ROUNDS) | mutated(ROUND).map(lambda value: ROUNDS + as_bytes(value) + b"\n") | NESTED.map(as_bytes))
def test_round_trace(refused_or_fine, folder, content):
    path = folder / "rounds.jsonl"
    path.write_bytes(content)
    with refused_or_fine("round trace"):
        read_rounds(path)


METRICS = (pathlib.Path(__file__).parent / "metrics.txt").read_bytes()


@FUZZ
@given(damaged(METRICS) | damaged(METRICS[:2000]))
def test_metrics_of_a_server(refused_or_fine, content):
    with refused_or_fine("metrics of a server"):
        snapshot = parse(content.decode("utf-8", errors="replace"), 1.0)
        between(parse(METRICS.decode(), 0.0), snapshot)


PROMPTS = as_bytes({"prompt": "def f():", "source": "x.py"}) + b"\n" + as_bytes({"prompt": "a\u2028b"}) + b"\n"


@FUZZ
@given(damaged(PROMPTS) | mutated({"prompt": "a", "text": "b"}).map(as_bytes) | NESTED.map(as_bytes))
def test_prompts_and_texts(refused_or_fine, folder, content):
    path = folder / "prompts.jsonl"
    path.write_bytes(content)
    with refused_or_fine("prompts"):
        assert all(prompt.text for prompt in read_prompts(path))
    with refused_or_fine("texts"):
        assert all(isinstance(text, str) for text, _ in _jsonl_texts(path))


TALKS = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]},
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "c"},
        ]
    },
]


@FUZZ
@given(mutated(TALKS[0]).map(as_bytes) | mutated(TALKS[1]).map(as_bytes))
def test_conversations(refused_or_fine, folder, content):
    path = folder / "talks.jsonl"
    path.write_bytes(content)
    for name, reader in (("prompts", read_prompts), ("texts", _jsonl_texts)):
        with refused_or_fine(f"conversations, {name}"):
            list(reader(path))


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_state_that_is_no_file(kind, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    path = "/dev/zero" if kind == "device" else tmp_path / kind
    assert not load_state(path, BetaPosterior(1), Calibration())


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_no_file_can_have(name, tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        ExitHeadConfig.load(tmp_path / name)
    assert not load_state(tmp_path / name, BetaPosterior(1), Calibration())
