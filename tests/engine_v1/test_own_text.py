"""Text of the target's own, sampled through vLLM in a process that is gone before training begins."""

import argparse
import contextlib
import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

from vllm_eesd.distill import generate, vllm_sampler
from vllm_eesd.distill.answers import answered
from vllm_eesd.distill.generate import OwnText
from vllm_eesd.distill.run import run
from vllm_eesd.distill.target import load_target

VOCAB, SEQ_LEN, BATCH = 512, 24, 4
# vLLM serves this float32 checkpoint in bfloat16, as it would to users: 8 bits of logits of about 10, through 8 layers.
NEAR_TIE = 0.4


def make_args(target, text, directory, **changes):
    given = {"model": target, "exit_layer": 2, "data": [str(text)], "output": str(directory / "head"), "steps": 1}
    given |= {"minutes": None, "batch": 4, "seq_len": SEQ_LEN, "json": None, "work": str(directory / "work")}
    return argparse.Namespace(**(given | {"self_generate": 7, "generator": "auto"} | changes))


@torch.no_grad()
def test_a_head_is_distilled_on_what_vllm_sampled(random_target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "BATCH", BATCH)
    monkeypatch.setenv("WORLD_SIZE", "1")  # the engine must not join what a launcher described
    generator = np.random.default_rng(0)
    generator.integers(0, VOCAB, 4_000).astype(np.uint16).tofile(tmp_path / "text.bin")
    with torch.enable_grad():
        assert run(make_args(random_target, tmp_path / "text.bin", tmp_path)) == 0
    assert "because vLLM cannot" not in capsys.readouterr().out
    described = json.loads((tmp_path / "work" / "generated.json").read_text())
    assert described["generator"] == "vllm"
    target = load_target(random_target, 2, "cpu")
    windows = np.array(OwnText(tmp_path / "work", target, 8, SEQ_LEN, [1.0], seed=0).windows())
    assert windows.shape == (8, SEQ_LEN) and windows.max() < VOCAB
    logits = target.model(torch.from_numpy(windows.astype(np.int64))).logits[:, :-1]
    lost = (
        logits.max(-1).values - logits.gather(-1, torch.from_numpy(windows[:, 1:].astype(np.int64))[..., None])[..., 0]
    )
    # Prompts are at most half a window; behind them every other window is the target's choice, and the rest is not.
    assert (lost[::2, SEQ_LEN // 2 :] < NEAR_TIE).all()
    assert ((lost[1::2, SEQ_LEN // 2 :] > NEAR_TIE).float().mean(1) > 0.2).all()
    # Made once, and not by anybody else.
    monkeypatch.setattr(generate, "VllmSampler", None)
    with torch.enable_grad():
        assert run(make_args(random_target, tmp_path / "text.bin", tmp_path)) == 0
        with pytest.raises(ValueError, match="made with another target or other settings"):
            run(make_args(random_target, tmp_path / "text.bin", tmp_path, generator="transformers"))


def test_a_batch_longer_than_a_step(random_target):
    """Seeded prompts that do not fit into one step: vLLM cannot cut those on a CPU."""
    prompts = torch.randint(0, VOCAB, (64, 100), generator=torch.Generator().manual_seed(0))
    with contextlib.closing(vllm_sampler.VllmSampler(random_target, 102)) as sampler:
        windows = sampler.continue_windows(prompts, 102, torch.ones(64), seed=0)
    assert windows.shape == (64, 102) and (windows[:, :100] == prompts).all()


@torch.no_grad()
def test_answers_end_where_the_target_ends_them(random_target):
    """Prompts of all lengths, greedy and sampled ones; the end belongs to the answer; a seed says it all again."""
    rng, told = np.random.default_rng(0), []
    prompts = [rng.integers(0, VOCAB, 1 + row).tolist() for row in range(12)]
    ends, temperatures, limits = list(range(0, VOCAB, 16)), [0.0, 1.0] * 6, [30] * 10 + [3, 2]
    with contextlib.closing(vllm_sampler.VllmSampler(random_target, 64)) as sampler:
        ask = partial(sampler.answer, prompts, temperatures, limits, ends, top_p=0.9, top_k=50)
        said, again, other = ask(seed=1, tell=told.append), ask(seed=1), ask(seed=2)
        (one,) = answered(sampler, prompts[:1], 30, 0.0, ends, seed=0)
    assert said == again and said[::2] == other[::2] and said[1::2] != other[1::2]
    assert told == sorted(told) and told[-1] == 12
    assert all(not set(ids[:-1]) & set(ends) for ids in said)
    assert all(ids[-1] in ends or len(ids) == limit for ids, limit in zip(said, limits, strict=True))
    assert any(ids[-1] in ends for ids in said) and any(ids[-1] not in ends for ids in said)
    assert one.ids.tolist() == prompts[0] + said[0] and one.answers.tolist() == [False] + [True] * len(said[0])
    target = load_target(random_target, 2, "cpu")
    for prompt, ids in list(zip(prompts, said, strict=True))[::2]:
        logits = target.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert (logits.max(-1).values - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0] < NEAR_TIE).all()


def test_a_cpus_engine_has_all_cores_unless_told(monkeypatch, random_target):
    for name in vllm_sampler.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vllm_sampler, "num_cores", lambda: 6)
    settings = vllm_sampler.cpu_settings(random_target, 64)
    assert settings == {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "6",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert vllm_sampler.cpu_settings("no model", 64) == {"VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.mark.parametrize(
    ("child", "said"),
    [
        ('import sys; print(\'{"error": "OSError: no such model"}\')', "vLLM: OSError: no such model"),
        ("import sys; print('Killed', file=sys.stderr)", "vLLM: its process ended: Killed"),
        ("pass", "vLLM: its process ended: it said nothing"),
    ],
)
def test_a_child_that_fails_says_why(monkeypatch, child, said):
    monkeypatch.setattr(vllm_sampler, "command", lambda *_: [sys.executable, "-c", child])
    with pytest.raises(ValueError, match=said):
        vllm_sampler.VllmSampler("M", 8)


def test_a_child_ends_with_its_parent(monkeypatch):
    """It reads the end of its input; a parent that was killed closes it, too."""
    child = "import sys; print('{}', flush=True); sys.stdin.read()"
    monkeypatch.setattr(vllm_sampler, "command", lambda *_: [sys.executable, "-c", child])
    sampler = vllm_sampler.VllmSampler("M", 8)
    sampler._process.stdin.close()
    assert sampler._process.wait(timeout=60) == 0
    sampler.close()
