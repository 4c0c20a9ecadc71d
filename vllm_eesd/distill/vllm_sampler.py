"""vLLM sampling from the target in a process of its own, which takes its memory along when it ends.

Parent and child exchange lines of JSON: the child's first says whether its engine started, then each of the parent's
is a batch to continue and each of the child's the continued batch. A child whose parent is gone reads the end of its
input, or fails to write, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from vllm_eesd.distill.muon import uses_bfloat16

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
# On a CPU: a KV cache that holds a batch of short windows, in GiB, unless the environment sets another size.
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
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
            env=DEFAULTS | environment | FORCED,
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
        job = {"prompts": prompts.tolist(), "temperatures": temperatures.tolist(), "seed": seed, "seq_len": seq_len}
        with contextlib.suppress(BrokenPipeError):  # then what it said last is the reason
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return torch.tensor(self._read()["windows"], dtype=torch.int64)

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
        from vllm import LLM, SamplingParams

        on_cpu = not torch.cuda.is_available()
        options = {"distributed_executor_backend": "uni", "disable_log_stats": True}
        # Compiling takes minutes and a CPU wins little by it.
        options["enforce_eager"] = on_cpu
        if on_cpu and not uses_bfloat16("cpu"):
            options["dtype"] = "float32"  # a CPU that emulates bfloat16 takes three times as long in it
        # A prompt in pieces has samples to discard, for which vLLM 0.32 sets a CPU generator back: it cannot be.
        options["enable_chunked_prefill"] = False
        llm = LLM(model, max_model_len=seq_len, skip_tokenizer_init=True, **options)
        answer(ready=True)
        for line in sys.stdin:
            job = json.loads(line)
            inputs = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
            sampled = {"max_tokens": job["seq_len"] - len(job["prompts"][0]), "ignore_eos": True, "detokenize": False}
            params = [
                SamplingParams(temperature=temperature, seed=(job["seed"] * len(inputs) + row) % (1 << 63), **sampled)
                for row, temperature in enumerate(job["temperatures"])
            ]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            answer(windows=[[*o.prompt_token_ids, *map(int, o.outputs[0].token_ids)] for o in outputs])
    except Exception as error:  # whatever an engine raises, the parent must hear of it
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split()):.300}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
