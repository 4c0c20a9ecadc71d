"""vLLM sampling from the target in a process of its own, which takes its memory along when it ends.

Parent and child exchange lines of JSON: the child's first says whether its engine started, then each of the parent's
is a batch to continue, to a length or to the end of an answer, and each of the child's the continued batch, or how many
of it are finished. A child whose parent is gone reads the end of its input, or fails to write, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_eesd.distill.loading import read_config
from vllm_eesd.distill.precision import uses_bfloat16
from vllm_eesd.provenance import num_cores

# torch's launcher describes its processes by these; an engine that saw them would join those.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
# On a CPU vLLM leaves a core to its front end, which here waits: the engine gets all, unless the environment says
# otherwise.
THREADS = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
# Sequences that a CPU continues at one time: more do not pay there.
CPU_SEQS = 128
# Of the machine's memory for the KV cache on a CPU, at most.
KV_CACHE_SHARE = 0.25
# The engine is in the child itself, so that it ends with it.
FORCED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# For an engine to load the largest targets and start.
START_LIMIT_S = 1800.0


class VllmSampler:
    """A running vLLM engine, until it is closed.

    Args:
        model: the target, a directory or a Hub id.
        seq_len: the longest window.
    Raises:
        ValueError: vLLM is not installed, or cannot serve the target; one line.
    """

    def __init__(self, model: str, seq_len: int) -> None:
        if find_spec("vllm") is None:
            raise ValueError("vLLM is not installed")
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        self._log = tempfile.TemporaryFile(prefix="eesd-vllm-")
        self._process = subprocess.Popen(
            command(model, seq_len),
            env=DEFAULTS | cpu_settings(model, seq_len) | environment | FORCED,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        # One that hangs, on a GPU that others hold, say, shall be given up.
        too_long = threading.Timer(START_LIMIT_S, self._process.kill)
        too_long.start()
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        finally:
            too_long.cancel()

    def continue_windows(self, prompts: Tensor, seq_len: int, temperatures: Tensor, seed: int) -> Tensor:
        """Return the prompts continued to [num_windows, seq_len] int64; see `generate.continue_windows`.

        Raises:
            ValueError: the engine failed.
        """
        rows = prompts.tolist()
        limits = [seq_len - len(row) for row in rows]
        continued = self.answer(rows, temperatures.tolist(), limits, [], seed)
        return torch.tensor([row + new for row, new in zip(rows, continued, strict=True)], dtype=torch.int64)

    def answer(
        self,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        limits: Sequence[int],
        ends: Sequence[int],
        seed: int,
        top_p: float = 1.0,
        top_k: int = 0,
        tell: Callable[[int], None] = lambda finished: None,
    ) -> list[list[int]]:
        """Return what the target says after each prompt; see `answers.answer`.

        Raises:
            ValueError: the engine failed.
        """
        job = {"prompts": list(prompts), "temperatures": list(temperatures), "limits": list(limits)}
        job |= {"ends": list(ends), "seed": seed, "top_p": top_p, "top_k": top_k}
        with contextlib.suppress(BrokenPipeError):  # then what it said last is the reason
            print(json.dumps(job), file=self._process.stdin, flush=True)
        while "continued" not in (answer := self._read()):
            tell(answer["finished"])
        return answer["continued"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                stream.close()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        answer = json.loads(line) if line.endswith("\n") else {"error": f"its process ended: {self._last_words()}"}
        if "error" in answer:
            raise ValueError(f"vLLM: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f"{line.strip():.200}" for line in reversed(lines) if line.strip()), "it said nothing")


def cpu_settings(model: str, seq_len: int) -> dict[str, str]:
    """Return the environment of an engine on a CPU: all cores, and a KV cache that holds `CPU_SEQS` sequences."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib(model, seq_len))}
    if not any(name in os.environ for name in THREADS):
        settings |= dict(zip(THREADS, ("nobind", str(num_cores())), strict=True))
    return settings


def kv_cache_gib(model: str, seq_len: int) -> int:
    """Return the size of a CPU's KV cache, in GiB, within `KV_CACHE_SHARE` of the machine's memory."""
    try:
        config = read_config(model)
    except ValueError:
        return 1  # the engine says what is wrong with it
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * (2 if uses_bfloat16("cpu") else 4)
    wanted = -(-CPU_SEQS * seq_len * token_bytes // (1 << 30))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(wanted, int(KV_CACHE_SHARE * memory) >> 30))


def command(model: str, seq_len: int) -> list[str]:
    """Return what starts the child."""
    return [sys.executable, "-P", "-m", __name__, model, str(seq_len)]


def main(model: str, seq_len: int) -> int:
    """Run in the child: start an engine, then continue batches until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints is no answer

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        llm = _engine(model, seq_len)
        answer(ready=True)
        for line in sys.stdin:
            answer(continued=_continued(llm, json.loads(line), lambda finished: answer(finished=finished)))
    except Exception as error:  # whatever an engine raises, the parent must hear of it
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split()):.300}")
        return 1
    return 0


def _engine(model: str, seq_len: int) -> Any:
    from vllm import LLM

    on_cpu = not torch.cuda.is_available()
    options = {"distributed_executor_backend": "uni", "disable_log_stats": True}
    # Compiling takes minutes and a CPU wins little by it.
    options["enforce_eager"] = on_cpu
    if on_cpu:
        options["max_num_seqs"] = CPU_SEQS
    if on_cpu and not uses_bfloat16("cpu"):
        options["dtype"] = "float32"  # a CPU that emulates bfloat16 takes three times as long in it
    # A prompt in pieces has samples to discard, for which vLLM 0.32 sets a CPU generator back: it cannot be.
    options["enable_chunked_prefill"] = False
    return LLM(model, max_model_len=seq_len, skip_tokenizer_init=True, **options)


def _continued(llm: Any, job: dict[str, Any], tell: Callable[[int], None]) -> list[list[int]]:
    """Return what follows each prompt of a job, its end token included."""
    from vllm import SamplingParams

    # What ends an answer is told by `ends`, not by what the engine takes for an end.
    shared = {"ignore_eos": True, "stop_token_ids": job["ends"], "detokenize": False}
    sampled = {"top_p": job["top_p"], "top_k": job["top_k"]}
    params = [
        SamplingParams(temperature=temperature, max_tokens=limit, **shared, **(sampled if temperature > 0 else {}))
        for temperature, limit in zip(job["temperatures"], job["limits"], strict=True)
    ]
    if torch.cuda.is_available():
        for row, one in enumerate(params):
            one.seed = (job["seed"] * len(params) + row) % (1 << 63)
    else:
        # A generator a row would take longer there than the model's layers do.
        torch.manual_seed(job["seed"])

    class Finished(tqdm):
        """Tells how many are finished instead of showing it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": silent, "mininterval": 0})

        def update(self, n: float = 1) -> None:
            super().update(n)
            if self.iterable is None:  # else it counts what is handed to the engine
                tell(int(self.n))

    with open(os.devnull, "w") as silent:
        inputs = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = llm.generate(inputs, params, use_tqdm=Finished)
    return [list(map(int, output.outputs[0].token_ids)) for output in outputs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
