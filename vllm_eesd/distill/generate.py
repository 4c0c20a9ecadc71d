"""Text of the target's own to distill on: when it drafts, the head mostly meets what the target itself wrote."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vllm_eesd.distill.data import Tokens, random_windows, spaced_windows, stacked, token_dtype
from vllm_eesd.distill.journal import made_otherwise
from vllm_eesd.distill.report import write_json
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vllm_sampler import VllmSampler

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


class OwnText:
    """Windows of the target's own, on disk; every other one is greedy, the rest are sampled.

    Each batch is a function of (seed, its number) and appended when done, so an interrupted run goes on where it
    stopped.

    Args:
        work: directory of `generated.bin` (token ids) and `generated.json` (how they were made).
        target: that writes them, or has written them.
        count: windows wanted.
        seq_len: tokens a window.
        temperature: of the sampled ones, which take turns.
        seed: of prompts and samples.
    """

    def __init__(
        self, work: Path, target: Target, count: int, seq_len: int, temperature: list[float], seed: int
    ) -> None:
        self.path, self.described = work / "generated.bin", work / "generated.json"
        self.count, self.seq_len = count, seq_len
        self._settings = {"seq_len": seq_len, "temperature": temperature, "seed": seed, "weights": target.fingerprint}
        self._dtype = token_dtype(target.config.vocab_size)
        self._batch_bytes = BATCH * seq_len * self._dtype.itemsize

    @property
    def generator(self) -> str | None:
        """What made the windows that are there, "vllm" or "transformers"; None if there are none."""
        return json.loads(self.described.read_text())["generator"] if self.described.exists() else None

    @property
    def is_complete(self) -> bool:
        return self._num_batches_done() * BATCH >= self.count

    def make(self, text: list[Tokens], generator: str, continue_batch: Callable[..., Tensor]) -> None:
        """Make the windows that are missing.

        Args:
            text: what prompts are cut from.
            generator: name of what `continue_batch` runs on.
            continue_batch: as `continue_windows`, without its first argument.
        Raises:
            ValueError: `work` holds windows made with other settings.
        """
        self.check(generator)
        if not self.described.exists():
            self.path.unlink(missing_ok=True)
            write_json(self.described, self._settings | {"generator": generator})
        self.path.touch()
        done = self._num_batches_done()
        missing = range(done, -(-self.count // BATCH))
        with self.path.open("r+b") as file:
            file.truncate(file.seek(done * self._batch_bytes))
            for number in tqdm(missing, desc="generating", disable=not missing):
                file.write(self._batch(text, number, continue_batch).numpy().astype(self._dtype).tobytes())
                file.flush()

    def windows(self) -> np.ndarray:
        """Return the windows, [count, seq_len], mapped from the file."""
        return np.memmap(self.path, dtype=self._dtype, mode="r").reshape(-1, self.seq_len)[: self.count]

    def check(self, generator: str) -> None:
        """Refuse to go on with windows that were made otherwise.

        Raises:
            ValueError: `work` holds such.
        """
        settings = self._settings | {"generator": generator}
        if self.described.exists() and json.loads(self.described.read_text()) != settings:
            raise made_otherwise(self.path, self.described)

    def _num_batches_done(self) -> int:
        return self.path.stat().st_size // self._batch_bytes if self.path.exists() else 0

    def _batch(self, text: list[Tokens], number: int, continue_batch: Callable[..., Tensor]) -> Tensor:
        seed = self._settings["seed"]
        rng = np.random.default_rng((seed, number, 1))
        prompt_len = int(rng.integers(max(1, self.seq_len // 8), max(2, self.seq_len // 2)))
        prompts = stacked(random_windows(text, BATCH, prompt_len, rng))
        temperatures = itertools.cycle(t for sampled in self._settings["temperature"] for t in (0.0, sampled))
        rows = torch.tensor(list(itertools.islice(temperatures, BATCH)))
        return continue_batch(prompts, self.seq_len, rows, seed=seed * 1_000_003 + number)


def sampled_through_vllm(wanted: str, model: str, text: list[Tokens], own: OwnText) -> bool:
    """Make the windows through vLLM, in a process of its own, and return whether they were; see `through_vllm`."""
    made = Made(own.generator, own.check, lambda: own.is_complete, own.seq_len)
    return through_vllm(wanted, model, made, lambda sampler: own.make(text, "vllm", sampler.continue_windows))


class Made(NamedTuple):
    """What is made of the target's own.

    Attributes:
        generator: what made that which is there, None if nothing is.
        check: refuses what was made with other settings or by another generator than it is given.
        is_complete: whether all is there.
        seq_len: the longest sequence.
    """

    generator: str | None
    check: Callable[[str], None]
    is_complete: Callable[[], bool]
    seq_len: int


def through_vllm(wanted: str, model: str, own: Made, make: Callable[[VllmSampler], None]) -> bool:
    """Make something through vLLM, in a process of its own, and return whether it was.

    Args:
        wanted: "vllm", "transformers", or "auto": vLLM where it can serve the target. What was begun by one is not
            finished by the other.
        make: makes what is missing.
    Raises:
        ValueError: vLLM is wanted, or has begun, and cannot; or something was made with other settings.
    """
    if wanted == "transformers" or wanted == "auto" and own.generator == "transformers":
        return False
    own.check("vllm")
    if own.generator == "vllm" and own.is_complete():
        return True
    try:
        sampler = VllmSampler(model, own.seq_len)
    except ValueError as error:
        if wanted == "vllm" or own.generator == "vllm":
            raise ValueError(f"generator is 'vllm', which cannot sample from {model!r}: {error}") from None
        print(f"transformers samples, because vLLM cannot: {error}", flush=True)
        return False
    with contextlib.closing(sampler):
        make(sampler)
    return True


def own_held_out(
    target: Target, text: list[Tokens], count: int, seq_len: int, temperature: float = 0.0
) -> tuple[Tensor, int]:
    """Return (held-out prompts continued by the target, [count, seq_len] int64; first generated position).

    Args:
        temperature: 0 continues greedily.
    """
    prompt_len = max(1, seq_len // 4)
    prompts = spaced_windows(text, count, seq_len)[:, :prompt_len]
    some = [
        continue_windows(target, rows, seq_len, torch.full((len(rows),), temperature), seed)
        for seed, rows in enumerate(prompts.split(BATCH))
    ]
    return torch.cat(some), prompt_len
