"""KV that came from outside: the exit head's came along, so drafts are what they would have been, and so is the text.

A clone of the last layer as head shows it: all it drafts is accepted only if every key and value of its own is right.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_from_outside import BLOCK_SIZE, ask, example_connector, offload_on_cpu, offloading, stored
from safetensors.torch import load_file, save_file

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
MAX_TOKENS = 48
FIXED = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}
OPTIONS = {"block_size": BLOCK_SIZE}
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


@pytest.fixture(scope="module")
def prompts():
    """Of lengths inside of blocks and at their ends."""
    generator = np.random.default_rng(4)
    return [generator.integers(0, 512, n).tolist() for n in (40, 64, 100, 130, 34)]


@pytest.fixture(scope="module")
def expected(plain_answers, random_target, prompts):
    """Plain vLLM's answers."""
    (answers,) = plain_answers(random_target, [prompts, MAX_TOKENS], **OPTIONS)
    return answers


@pytest.fixture(scope="module")
def last_layer(random_target, cloned_head):
    """Drafts by a copy of the target's last layer."""
    return FIXED | {"model": cloned_head(random_target, 7, 7)}


@pytest.fixture
def write(engine, greedy, tmp_path):
    """Return write(target, spec, prompts): a prefill engine stores the prompts' KV."""

    def write_them(target, spec, prompts, **options):
        with engine(target, spec, **example_connector(tmp_path, PRODUCER), **OPTIONS, **options) as llm:
            greedy(llm, prompts, max_tokens=1)

    return write_them


@pytest.fixture
def read(engine, tmp_path):
    """Return read(target, spec, prompts): a decode engine's answers, the tokens it found stored, its counters."""

    def read_them(target, spec, prompts, **options):
        with engine(target, spec, **example_connector(tmp_path, CONSUMER), **OPTIONS, **options) as llm:
            answers, cached = ask(llm, prompts, MAX_TOKENS)
            (stats,) = llm.collective_rpc("eesd_stats")
        return answers, cached, stats

    return read_them


@pytest.mark.feature("KV connectors: ExampleConnector, a prefill engine and a decode engine", "works")
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "compiled"])
def test_a_prefill_and_a_decode_engine(random_target, last_layer, prompts, expected, write, read, enforce_eager):
    write(random_target, last_layer, prompts, enforce_eager=enforce_eager)
    answers, cached, stats = read(random_target, last_layer, prompts, enforce_eager=enforce_eager)
    assert cached == stored(prompts)
    assert answers == expected
    assert stats["accepted"] == stats["drafted"] > 150


def test_drafts_notice_a_head_whose_kv_was_left_behind(
    random_target, last_layer, prompts, expected, write, read, tmp_path
):
    """The test above can fail: with zeros as the head's KV drafts are rejected, while the answers stay right."""
    write(random_target, last_layer, prompts)
    files = list(tmp_path.rglob("eesd_exit.*.safetensors"))
    assert len(files) == len(prompts)
    for file in files:
        save_file({"kv_cache": torch.zeros_like(load_file(file)["kv_cache"])}, file)
    answers, cached, stats = read(random_target, last_layer, prompts)
    assert cached == stored(prompts)
    assert answers == expected
    assert stats["accepted"] < 0.9 * stats["drafted"]


@pytest.mark.feature("KV connectors: ExampleConnector, deep-context heads", "works")
def test_a_trained_head_drafts_as_over_a_prefix_of_its_own(engine, embedded_model, write, read):
    """Its KV is made of the target's last hidden states, which the decode engine never has of the prefix."""
    from tokenizers import Tokenizer

    tokenizer, target = Tokenizer.from_file(str(embedded_model / "tokenizer.json")), str(embedded_model)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:24]
    text = tokenizer.encode("\n".join(json.loads(line)["prompt"] for line in lines)).ids
    texts = [text[start : start + length] for start, length in ((0, 70), (200, 100), (400, 130), (600, 170))]
    with engine(target, FIXED, **OPTIONS) as llm:
        expected, cached = ask(llm, texts, MAX_TOKENS)
        (here,) = llm.collective_rpc("eesd_stats")
    assert not any(cached)
    write(target, FIXED, texts)
    answers, cached, there = read(target, FIXED, texts)
    assert cached == stored(texts)
    assert answers == expected
    assert there["accepted"] > 50
    assert there["accepted_per_position"] == here["accepted_per_position"]


@pytest.mark.feature("KV connectors: ExampleConnector, prefixes stored without this exit head", "computed anew")
def test_what_another_head_or_none_has_stored_is_not_read(
    random_target, cloned_head, last_layer, prompts, expected, write, read
):
    """It lacks the head's KV, without which the connector ends the engine, or has another's."""
    for spec in (None, FIXED | {"model": cloned_head(random_target, 3, 3)}):
        write(random_target, spec, prompts)
    answers, cached, stats = read(random_target, last_layer, prompts)
    assert not any(cached)
    assert answers == expected
    assert stats["accepted"] == stats["drafted"] > 150


@pytest.mark.feature("KV connectors: ExampleConnector, a prefill engine without EESD, headless drafts", "works")
def test_headless_drafts_over_what_a_plain_engine_has_stored(random_target, prompts, expected, write, read):
    """There is no KV but the target's."""
    write(random_target, None, prompts)
    answers, cached, stats = read(random_target, FIXED | {"exit_layer": 8}, prompts)
    assert cached == stored(prompts)
    assert answers == expected
    assert stats["accepted"] == stats["drafted"] > 150


@pytest.mark.feature(
    "KV offloading by OffloadingConnector (a GPU's copy of blocks replaced by one on the CPU)", "works"
)
def test_offloaded_blocks_come_back(engine, random_target, last_layer, prompts, expected, monkeypatch):
    loads = offload_on_cpu(monkeypatch)
    with engine(random_target, last_layer, kv_offloading_size=0.1, **OPTIONS) as llm:
        assert ask(llm, prompts, MAX_TOKENS) == (expected, [0] * len(prompts))
        assert not loads
        assert llm.reset_prefix_cache()
        answers, cached = ask(llm, prompts, MAX_TOKENS)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert answers == expected
    assert sum(loads) * BLOCK_SIZE >= sum(cached) >= sum(stored(prompts))
    assert stats["accepted"] == stats["drafted"] > 300


@pytest.mark.feature("KV offloading, preempted requests", "works")
def test_preempted_requests_come_back_from_outside(
    engine, random_target, last_layer, prompts, expected, preemptions, monkeypatch
):
    """With the tokens they had been answered, whose KV verified drafts had written."""
    loads = offload_on_cpu(monkeypatch)
    tight = {"num_gpu_blocks_override": 11, "max_num_seqs": 5, "enable_prefix_caching": False}
    with engine(random_target, last_layer, **offloading(), **tight, **OPTIONS) as llm:
        answers, _ = ask(llm, prompts, MAX_TOKENS)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert answers == expected
    assert preemptions and loads
    assert stats["accepted"] == stats["drafted"] > 150
