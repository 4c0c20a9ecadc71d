"""Two ranks: the same answers; and a fault on one of them ends the engine instead of hanging or answering wrongly."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensor_parallel
import torch
from test_training_parity import count_mismatches, write_new_head

HERE = Path(__file__).parent
LIMIT_S, GRACE_S = 900, 20
WORDS = ("SERVED ", "ROUNDS ", "RELOADED ", "BROKEN ")


def processes_of(session):
    """Processes of this session that are not zombies."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                state, _, _, owner = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(owner) == session and state != "Z":
                found.append(int(directory.name))
    return found


@pytest.fixture(scope="module")
def plain(plain_answers, random_target):
    """What plain vLLM on one rank answers."""
    return plain_answers(random_target, (tensor_parallel.PROMPTS, 40))[0]


def run_two_ranks(target, head, *new_target):
    """Run the program; returns (what it printed, by first word; processes it left behind; everything it said)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ENABLE_V1", "VLLM_LOGGING", "VLLM_CPU_OMP"))}
    env |= {"PYTHONPATH": str(HERE), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(HERE / "tensor_parallel.py"), target, head, *new_target]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
        deadline = time.monotonic() + GRACE_S
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.2)
    finally:
        left = processes_of(process.pid)
        for pid in left:
            os.kill(pid, 9)
    words = dict(line.split(" ", 1) for line in said.splitlines() if line.startswith(WORDS))
    return words, left, said


@pytest.fixture(scope="module")
def ran(plain, random_target, cloned_head):
    """`run_two_ranks`.

    The head drafts from a third of the vocabulary and from whatever the target says: so it drafts all of that only if
    each rank found its rows of the LM head.
    """
    drafted_from = sorted({token for output in plain for token in output} | set(range(0, 512, 3)))
    return run_two_ranks(random_target, cloned_head(random_target, 7, 7, drafted_from))


@pytest.mark.feature("tensor_parallel_size=2", "the same answers")
def test_two_ranks_answer_as_one_does(ran, plain):
    words, _, said = ran
    assert "SERVED" in words, said[-4000:]
    outputs, stats = json.loads(words["SERVED"])
    assert [tuple(tokens) for tokens in outputs] == plain
    for rank in stats:
        assert rank["accepted"] == rank["drafted"] > 40
    assert stats[0]["draft_length_histogram"] == stats[1]["draft_length_histogram"]


def test_a_fault_on_one_rank_ends_the_engine_cleanly(ran):
    words, left, said = ran
    assert words.get("BROKEN") == "EngineDeadError", said[-4000:]
    assert left == []
    # The other rank may see its peer gone before it is ended itself, and then says so, once, of another cause.
    told = [line for line in said.splitlines() if "drafting failed on one of several ranks" in line]
    assert sum("RuntimeError: injected" in line for line in told) == 1 and len(told) <= 2, told


def test_more_ranks_than_kv_heads(tmp_path):
    """Each of two ranks holds the only KV head, also of the projections that a deep-context head's layers have."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        initializer_range=0.12,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    parts = {"head_layers": 2, "aux_layers": [3]}
    made = write_new_head(str(tmp_path / "target"), tmp_path / "head", "deep_context", **parts)
    directory, target, head = made
    words, _, said = run_two_ranks(str(tmp_path / "target"), directory)
    assert "ROUNDS" in words, said[-4000:]
    outputs, _ = json.loads(words["SERVED"])
    for rounds in json.loads(words["ROUNDS"]):
        compared, mismatches = count_mismatches(target, head, tensor_parallel.PROMPTS, map(tuple, outputs), rounds)
        assert compared > 300
        assert mismatches == 0
