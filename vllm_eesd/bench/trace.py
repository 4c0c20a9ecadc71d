"""`eesd trace`: one generation, round by round, as a page to look at; made now, or recorded earlier."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, load_target, running_engines
from vllm_eesd.bench.latency import open_console, reporting
from vllm_eesd.bench.prompts import Prompt
from vllm_eesd.embedded import find_shipped
from vllm_eesd.files import write_whole
from vllm_eesd.provenance import hardware
from vllm_eesd.traces.dense import DenseTrace, as_served
from vllm_eesd.traces.page import Generation, render
from vllm_eesd.traces.read import read
from vllm_eesd.traces.rounds import RoundRecord
from vllm_eesd.traces.spell import spell

#: Before the generation shown: so that kernels are compiled and the policy knows what steps cost here.
WARM_UP_TOKENS = 64
#: The last rounds reach the file within half a second of their end.
WRITTEN_WITHIN_S = 30.0

T = TypeVar("T")


def run(args: argparse.Namespace) -> int:
    """Generate with EESD or read a trace, and write the page.

    Raises:
        ValueError: a flag, the prompt, the model or the trace are not usable; one line.
    """
    console = open_console()
    with reporting(console) as progress:
        generation = _generated(args, progress) if args.trace is None else _recorded(args, progress)
    write_whole(args.output, render(generation))
    console.print(f"{args.output}: {generation.title}, {len(generation.rounds)} rounds")
    return 0


def _generated(args: argparse.Namespace, progress: Callable[[str], None]) -> Generation:
    """Return what the model completes a prompt with now."""
    if not args.model or not args.prompt:
        raise ValueError("--model and --prompt are needed to generate; allowed: both, or the file of a trace")
    settings = EngineSettings(args.model, args.head, args.dtype, args.num_speculative_tokens, args.policy)
    snippet = [Prompt(args.prompt, is_turn=not args.raw)]
    encoded = encode_prompts(settings.model, snippet, args.max_tokens, progress, args.chat_template)
    tokenizer, (prompt,), max_model_len = encoded
    generated, rounds = _generate(settings, prompt, args.max_tokens, max_model_len, progress)
    first, spelled = spell(tokenizer.decode, prompt, generated, rounds)
    title = f"{Path(args.model).name}: {len(generated)} tokens with EESD"
    return Generation(title, _details(settings), args.prompt, first, spelled)


def _recorded(args: argparse.Namespace, progress: Callable[[str], None]) -> Generation:
    """Return one request of a trace: of a dense one as if every round drafted its longest draft."""
    found = read(args.trace)
    model = args.model or (_here(found.model) if isinstance(found, DenseTrace) else None)
    if model is None:
        raise ValueError(f"--model is missing: {args.trace} does not say whose tokenizer spells its tokens")
    details = [("trace", str(args.trace)), ("request", str(args.request)), ("tokenizer of", model)]
    if isinstance(found, DenseTrace):
        request = _nth(found.requests, args)
        if request.prompt is None or request.emitted is None:
            raise ValueError(f"{args.trace}: recorded without texts; record it anew with `eesd trace-record`")
        rounds, prompt = as_served(found, request), request.prompt.tolist()
        output = request.emitted[:1].tolist()
        details.append(("shown", f"every round drafts {found.num_speculative_tokens} tokens, at the recorded costs"))
        title = found.workload
    else:
        by_request: dict[str, list[RoundRecord]] = {}
        for record in found:
            by_request.setdefault(record["request"], []).append(record)
        rounds, prompt, output = _nth(list(by_request.values()), args), [], []
        title = "a served request (its prompt and first token are not in the trace)"
    output += [token for record in rounds for token in record["emitted"]]
    decode = load_target(model, progress)[1].decode
    first, spelled = spell(decode, prompt, output, rounds)
    return Generation(f"{title}: {len(output)} tokens", details, decode(prompt), first, spelled)


def _here(model: str) -> str:
    """Return where a target's tokenizer is: a trace tells the target's name, which may be the embedded one's."""
    return str(find_shipped(model) or model)


def _nth(requests: list[T], args: argparse.Namespace) -> T:
    if args.request > len(requests):
        raise ValueError(f"--request {args.request} is not in {args.trace}; allowed: 1 to {len(requests)}")
    return requests[args.request - 1]


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
) -> tuple[list[int], list[RoundRecord]]:
    """Return the greedy completion's tokens and its rounds."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rounds.jsonl"
        settings = replace(settings, trace_file=str(path))
        with running_engines(["eesd"], settings, max_model_len, progress) as engines:
            progress("warming up")
            engines["eesd"].generate([prompt], min(WARM_UP_TOKENS, max_tokens), ignore_eos=False)
            engines["eesd"].forget_prefixes()
            progress(f"generating {max_tokens} tokens")
            (generated,) = engines["eesd"].generate([prompt], max_tokens, ignore_eos=False)
            return generated, _rounds_of(path, generated)


def _rounds_of(path: Path, generated: list[int]) -> list[RoundRecord]:
    """Return the rounds of the last request in a file, once all that emitted these tokens are there."""
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        rounds = read(path)
        last = [record for record in rounds if record["request"] == rounds[-1]["request"]]
        # All but the first token come from rounds; the warm-up's may be all that is written yet.
        requests = len({record["request"] for record in rounds})
        if len(generated) == 1 or requests == 2 and sum(len(r["emitted"]) for r in last) >= len(generated) - 1:
            return last if len(generated) > 1 else []
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: {len(rounds)} rounds after {WRITTEN_WITHIN_S:.0f} s, some are missing")
        time.sleep(0.05)
