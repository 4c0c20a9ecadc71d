"""`eesd trace`: one generation, round by round, as a page to look at."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.hardware import hardware
from vllm_eesd.bench.latency import open_console, reporting
from vllm_eesd.bench.prompts import Prompt
from vllm_eesd.round_trace import read_rounds
from vllm_eesd.view.page import Generation, render, spell

#: Before the generation shown: so that kernels are compiled and the policy knows what steps cost here.
WARM_UP_TOKENS = 64
#: The last rounds reach the file within half a second of their end.
WRITTEN_WITHIN_S = 30.0


def run(args: argparse.Namespace) -> int:
    """Generate with EESD, write the page.

    Raises:
        ValueError: a flag, the prompt or the model are not usable; one line.
    """
    if not args.prompt:
        raise ValueError("prompt='' is not usable; allowed: a text to complete")
    settings = EngineSettings(args.model, args.head, args.dtype, args.num_speculative_tokens, args.policy)
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    console = open_console()
    with reporting(console) as progress:
        snippet = [Prompt(args.prompt)]
        tokenizer, (prompt,), max_model_len = encode_prompts(settings.model, snippet, args.max_tokens, progress)
        generated, rounds = _generate(settings, prompt, args.max_tokens, max_model_len, progress)
    first, rounds = spell(tokenizer.decode, prompt, generated, rounds)
    title = f"{Path(args.model).name}: {len(generated)} tokens with EESD"
    output.write_text(render(Generation(title, _details(settings), args.prompt, first, rounds)), encoding="utf-8")
    console.print(f"{output}: {len(generated)} tokens in {len(rounds)} rounds")
    return 0


def _details(settings: EngineSettings) -> list[tuple[str, str]]:
    return [
        ("model", settings.model),
        ("head", settings.head or "the target's own"),
        ("policy", settings.policy),
        ("longest draft", str(settings.num_speculative_tokens or "the default")),
        ("sampling", f"greedy, {settings.dtype}"),
        ("hardware", hardware()),
    ]


def _generate(
    settings: EngineSettings, prompt: list[int], max_tokens: int, max_model_len: int, progress: Callable[[str], None]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the greedy completion's tokens and its rounds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rounds.jsonl"
        settings = replace(settings, policy_args={"trace_file": str(path)})
        with running_engines(["eesd"], settings, max_model_len, progress) as engines:
            progress("warming up")
            engines["eesd"].generate([prompt], min(WARM_UP_TOKENS, max_tokens), ignore_eos=False)
            engines["eesd"].forget_prefixes()
            progress(f"generating {max_tokens} tokens")
            (generated,) = engines["eesd"].generate([prompt], max_tokens, ignore_eos=False)
            return generated, _rounds_of(path, generated)


def _rounds_of(path: Path, generated: list[int]) -> list[dict[str, Any]]:
    """Return the rounds of the last request in a file, once all that emitted these tokens are there."""
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        rounds = read_rounds(path)
        last = [record for record in rounds if record["request"] == rounds[-1]["request"]]
        # All but the first token come from rounds; the warm-up's may be all that is written yet.
        requests = len({record["request"] for record in rounds})
        if len(generated) == 1 or requests == 2 and sum(len(r["emitted"]) for r in last) >= len(generated) - 1:
            return last if len(generated) > 1 else []
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: {len(rounds)} rounds after {WRITTEN_WITHIN_S:.0f} s, some are missing")
        time.sleep(0.05)
