"""KV that came from outside on Model Runner V2, drafts a step late: the exit head's came along."""

import numpy as np
import pytest
from kv_from_outside import BLOCK_SIZE, ask, example_connector, offload_on_cpu, offloading, stored

MAX_TOKENS = 20
FIXED = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}
OPTIONS = {"block_size": BLOCK_SIZE, "async_scheduling": True}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(4)
    return [generator.integers(0, 512, n).tolist() for n in (40, 64, 100)]


@pytest.fixture(scope="module")
def expected(plain_answers, random_target, prompts):
    """Plain vLLM's answers."""
    (answers,) = plain_answers(random_target, [prompts, MAX_TOKENS], block_size=BLOCK_SIZE)
    return answers


@pytest.fixture(scope="module")
def last_layer(random_target, cloned_head):
    """Drafts by a copy of the target's last layer."""
    return FIXED | {"model": cloned_head(random_target, 7, 7)}


@pytest.mark.feature("KV connectors: ExampleConnector, a prefill engine and a decode engine, V2", "works")
def test_a_prefill_and_a_decode_engine(engine, greedy, random_target, last_layer, prompts, expected, tmp_path):
    with engine(random_target, last_layer, **example_connector(tmp_path, "kv_producer"), **OPTIONS) as llm:
        greedy(llm, prompts, max_tokens=1)
    with engine(random_target, last_layer, **example_connector(tmp_path, "kv_consumer"), **OPTIONS) as llm:
        answers, cached = ask(llm, prompts, MAX_TOKENS)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert cached == stored(prompts)
    assert answers == expected
    assert stats["accepted"] == stats["drafted"] >= 30


@pytest.mark.feature(
    "KV offloading by OffloadingConnector, V2 (a GPU's copy of blocks replaced by one on the CPU)", "works"
)
def test_offloaded_blocks_come_back(engine, random_target, last_layer, prompts, expected, monkeypatch):
    loads = offload_on_cpu(monkeypatch)
    with engine(random_target, last_layer, enable_prefix_caching=False, **offloading(), **OPTIONS) as llm:
        assert ask(llm, prompts, MAX_TOKENS) == (expected, [0] * len(prompts))
        assert not loads
        answers, cached = ask(llm, prompts, MAX_TOKENS)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert answers == expected
    assert sum(loads) * BLOCK_SIZE >= sum(cached) >= sum(stored(prompts))
    assert stats["accepted"] == stats["drafted"] >= 60
