"""Text of the target's own to distill on: when it drafts, the head mostly meets what the target itself wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vllm_eesd.distill.data import Tokens, spaced_windows, token_dtype
from vllm_eesd.distill.model import Target

# Windows continued at one time; the KV cache of more does not pay on a CPU.
BATCH = 64


@torch.no_grad()
def continue_windows(target: Target, prompts: Tensor, seq_len: int, temperatures: Tensor, seed: int) -> Tensor:
    """Return the prompts continued by the target to [num_windows, seq_len] int64; an end of text does not end a window.

    Args:
        prompts: [num_windows, prompt_len] int64.
        temperatures: [num_windows] float32; 0 is greedy.
    """
    device = target.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ids, cache = prompts.to(device), None
    greedy, scale = (temperatures <= 0).to(device), temperatures.clamp(min=1e-3).to(device)[:, None]
    new = ids
    while ids.shape[1] < seq_len:
        output = target.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        sampled = (logits / scale).softmax(-1).multinomial(1, generator=generator)
        new = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), sampled)
        ids = torch.cat([ids, new], dim=1)
    return ids.cpu()


def generated_windows(
    target: Target, text: list[Tokens], work: Path, count: int, seq_len: int, temperature: float, seed: int
) -> np.ndarray:
    """Return [count, seq_len] token ids from `work`, first generating what is missing there.

    Every other window is greedy, the rest are sampled. Each batch is a function of (seed, its number) and appended when
    done, so an interrupted run goes on where it stopped.

    Raises:
        ValueError: `work` holds windows made with other settings.
    """
    path, described = work / "generated.bin", work / "generated.json"
    dtype = np.dtype(token_dtype(target.config.vocab_size))
    settings = {"seq_len": seq_len, "temperature": temperature, "seed": seed, "weights": _fingerprint(target)}
    if not described.exists():
        path.unlink(missing_ok=True)
        described.write_text(json.dumps(settings) + "\n")
    if json.loads(described.read_text()) != settings:
        raise ValueError(f"work: {path} was made with another target or other settings; remove it and {described.name}")
    batch_bytes = BATCH * seq_len * dtype.itemsize
    done = path.stat().st_size // batch_bytes if path.exists() else 0
    with path.open("ab") as file:
        file.truncate(done * batch_bytes)
        for number in tqdm(range(done, -(-count // BATCH)), desc="generating", disable=done * BATCH >= count):
            rng = np.random.default_rng((seed, number, 1))
            prompt_len = int(rng.integers(max(1, seq_len // 8), max(2, seq_len // 2)))
            prompts = _random_windows(text, BATCH, prompt_len, rng)
            temperatures = torch.tensor([0.0, temperature]).repeat(BATCH // 2)
            windows = continue_windows(target, prompts, seq_len, temperatures, seed=seed * 1_000_003 + number)
            file.write(windows.numpy().astype(dtype).tobytes())
            file.flush()
    return np.memmap(path, dtype=dtype, mode="r").reshape(-1, seq_len)[:count]


def greedy_held_out(target: Target, text: list[Tokens], count: int, seq_len: int) -> tuple[Tensor, int]:
    """Return (held-out prompts continued greedily, [count, seq_len] int64; first generated position)."""
    prompt_len = max(1, seq_len // 4)
    prompts = spaced_windows(text, count, seq_len)[:, :prompt_len]
    some = [continue_windows(target, rows, seq_len, torch.zeros(len(rows)), seed=0) for rows in prompts.split(BATCH)]
    return torch.cat(some), prompt_len


def _random_windows(text: list[Tokens], count: int, length: int, rng: np.random.Generator) -> Tensor:
    sizes = np.array([len(tokens) for tokens in text])
    rows = []
    for source in rng.choice(len(text), count, p=sizes / sizes.sum()):
        start = rng.integers(len(text[source]) - length + 1)
        rows.append(text[source][start : start + length])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def _fingerprint(target: Target) -> float:
    return round(target.model.model.norm.weight.double().sum().item(), 6)
