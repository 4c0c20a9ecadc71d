"""Text of the target's own, sampled through vLLM in a process that is gone before training begins."""

import argparse
import contextlib
import json
import sys

import numpy as np
import pytest
import torch

from vllm_eesd.distill import generate, vllm_sampler
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
