"""Requests that arrive at random at real servers: `vllm bench serve` against plain vLLM and against EESD.

    python benchmarks/serve_rates.py --model DIR [--head DIR] [--rates 0.5,1,2] [--rounds 2] [--name smollm2]

One server at a time, alone on the machine, the methods in turn: plain, eesd, eesd, plain. Each is asked at every rate
for the same prompts with the same arrivals. Answers to questions end where the model ends them; completions have
`--max-tokens` tokens. Writes serve_rates-NAME.json: what vLLM's own client says of each run, and medians over the
rounds. A run that takes longer than `--limit` minutes, or loses a request, ends the measurement; servers are stopped
whatever happens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table
from servers import serving

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, sigterm_exits
from vllm_eesd.bench.latency import digest, named, open_console, reporting, write_json
from vllm_eesd.bench.prompts import Prompt, read_prompts, workload_file
from vllm_eesd.flags import positive, positive_real, words
from vllm_eesd.provenance import provenance

METHODS = ("plain", "eesd")
#: How vLLM's client asks for answers to questions, and for completions.
QUESTIONS = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
COMPLETIONS = ["--backend", "openai", "--endpoint", "/v1/completions", "--ignore-eos"]
#: What a row keeps of vLLM's figures, by its own name for each.
KEPT = {
    "tokens_per_s": "output_throughput",
    "requests_per_s": "request_throughput",
    "first_token_ms": "median_ttft_ms",
    "first_token_p99_ms": "p99_ttft_ms",
    "ms_per_token": "median_tpot_ms",
    "ms_per_token_p99": "p99_tpot_ms",
    "latency_ms": "median_e2el_ms",
    "latency_p99_ms": "p99_e2el_ms",
}


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the rows.

    Raises:
        ValueError: the model, its head or the prompts are not usable; one line.
        RuntimeError: a server did not start, or a run failed; one line.
    """
    settings = EngineSettings(args.model, args.head, args.dtype)
    source = args.prompts or workload_file(args.workload)
    texts = read_prompts(source)[: args.num_prompts]
    kind = kind_of(texts, source)
    console = open_console()
    with ExitStack() as stack:
        stack.enter_context(sigterm_exits())
        progress = stack.enter_context(reporting(console))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eesd-serve-")))
        _, _, length = encode_prompts(settings.model, texts, args.max_tokens, progress)
        dataset = folder / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": text.text}) + "\n" for text in texts), encoding="utf-8")
        runs = measure(args, settings, dataset, kind, length, progress)
    rows = rows_of(runs, args, settings, str(source), len(texts))
    path = args.results / f"serve_rates-{args.name}.json"
    write_json(path, rows)
    console.print(shown(rows))
    console.print(f"wrote {path}")
    return 0


def kind_of(texts: list[Prompt], source: str) -> list[str]:
    """Return QUESTIONS or COMPLETIONS, by what the first prompt is.

    Raises:
        ValueError: another prompt is not of that kind, or a conversation of several turns; one line.
    """
    asks = bool(texts[0].messages)
    for number, text in enumerate(texts, 1):
        if [message["role"] for message in text.messages or ()] != (["user"] if asks else []):
            allowed = "messages of one user turn in every line, or a prompt in every line"
            raise ValueError(f"{source}: prompt {number} is not usable; allowed: {allowed}")
    return QUESTIONS if asks else COMPLETIONS


def measure(
    args: argparse.Namespace,
    settings: EngineSettings,
    dataset: Path,
    kind: list[str],
    length: int,
    progress: Callable[[str], None],
) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Return what vLLM's client said of each method and rate, in each round."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {(m, rate): [] for m in METHODS for rate in args.rates}
    for number in range(args.rounds):
        for method in METHODS if number % 2 == 0 else METHODS[::-1]:
            progress(f"round {number + 1} of {args.rounds}: starting a server, {method}")
            log = Path(tempfile.gettempdir()) / f"eesd-serve-{method}.log"
            with serving(settings.model, server_options(settings, method, length), log) as address:
                for rate in args.rates:
                    progress(f"round {number + 1} of {args.rounds}: {method}, {rate:g} requests a second")
                    command = client_command(args, dataset, kind, address, rate, args.seed + number)
                    runs[method, rate].append(ask(command, dataset.parent, args.limit))
    return runs


def server_options(settings: EngineSettings, method: str, length: int) -> list[str]:
    """Return the options of `vllm serve` for a method."""
    options = ["--served-model-name", "target", "--dtype", settings.dtype, "--max-model-len", str(length)]
    if method == "eesd":
        options += ["--speculative-config", json.dumps(settings.eesd_config())]
    return options


def client_command(
    args: argparse.Namespace, dataset: Path, kind: list[str], address: str, rate: float, seed: int
) -> list[str]:
    """Return the `vllm bench serve` of one run; the server renders the chat template, so the client must not."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *kind]
    command += ["--base-url", address, "--model", args.model]
    command += ["--served-model-name", "target", "--dataset-name", "custom", "--dataset-path", str(dataset)]
    command += [
        "--skip-chat-template",
        "--num-prompts",
        str(args.requests),
        "--custom-output-len",
        str(args.max_tokens),
    ]
    command += ["--request-rate", f"{rate:g}", "--seed", str(seed), "--num-warmups", str(args.warmups)]
    command += ["--temperature", f"{args.temperature:g}", "--top-p", f"{args.top_p:g}", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "99"]
    return [*command, "--save-result", "--result-dir", str(dataset.parent), "--result-filename", "run.json"]


def ask(command: list[str], folder: Path, limit_min: float) -> dict[str, Any]:
    """Run vLLM's client and return what it wrote.

    Raises:
        RuntimeError: it failed, took too long, or lost requests; one line.
    """
    written = folder / "run.json"
    written.unlink(missing_ok=True)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60 * limit_min)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"vllm bench serve took longer than {limit_min:g} minutes") from None
    if ended.returncode or not written.is_file():
        said = [line for line in (ended.stderr + ended.stdout).splitlines() if line.strip()] or ["nothing"]
        raise RuntimeError(f"vllm bench serve ended with status {ended.returncode}: {said[-1].strip()}")
    found = json.loads(written.read_text(encoding="utf-8"))
    if found["completed"] != found["num_prompts"]:
        raise RuntimeError(f"{found['num_prompts'] - found['completed']} of {found['num_prompts']} requests failed")
    return found


def rows_of(
    runs: dict[tuple[str, float], list[dict[str, Any]]],
    args: argparse.Namespace,
    settings: EngineSettings,
    source: str,
    num_prompts: int,
) -> list[dict[str, Any]]:
    """Return a row per rate and method: medians over the rounds, and latency's ratio to plain's, paired by round."""
    shared = {"model": Path(settings.model).name, "head": settings.head, "dtype": settings.dtype}
    shared["policy"] = settings.policy
    shared |= {"prompts": named(source), "prompts_digest": digest(source), "num_prompts": num_prompts}
    shared |= {"requests": args.requests, "max_tokens": args.max_tokens, "rounds": args.rounds, "seed": args.seed}
    shared |= {"temperature": args.temperature, "top_p": args.top_p}
    rows = []
    for rate in args.rates:
        for method in METHODS:
            ours, plain = runs[method, rate], runs["plain", rate]
            ratios = [p["mean_e2el_ms"] / o["mean_e2el_ms"] for o, p in zip(ours, plain, strict=True)]
            row: dict[str, Any] = {"rate": rate, "method": method}
            row |= {name: round(statistics.median(run[field] for run in ours), 3) for name, field in KEPT.items()}
            row["latency_ratio"] = round(statistics.median(ratios), 3)
            row["latency_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            rows.append(row | shared | provenance())
    return rows


def shown(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table("requests/s", "method", "tokens/s", "first token ms", "ms/token", "latency ms", "99%", "faster")
    for row in rows:
        figures = (row[name] for name in ("tokens_per_s", "first_token_ms", "ms_per_token", "latency_ms"))
        cells = (f"{row['rate']:g}", row["method"], *(f"{figure:.1f}" for figure in figures))
        table.add_row(*cells, f"{row['latency_p99_ms']:.0f}", f"{row['latency_ratio']:.2f}x")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="the target")
    parser.add_argument("--head", metavar="DIR", help="default: the target's own")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--workload", default="chat", metavar="NAME", help="one of models/prompts, or human_eval")
    chosen.add_argument("--prompts", metavar="FILE", help="JSONL: `messages` of one user turn, or a `prompt`, a line")
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="only the file's first so many")
    parser.add_argument(
        "--rates",
        type=lambda text: [positive_real(word) for word in words(text)],
        default=[0.25, 0.5, 1.0],
        metavar="R,...",
        help="a second",
    )
    parser.add_argument("--requests", type=positive, default=80, metavar="Q", help="of each run")
    parser.add_argument("--rounds", type=positive, default=2, help="each starts both servers anew")
    parser.add_argument("--warmups", type=int, default=4, metavar="W", help="requests before each run")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="at most, of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="S")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of the prompts' order")
    parser.add_argument("--limit", type=positive_real, default=30.0, metavar="MIN", help="minutes for one run")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--name", default="smollm2", help="what the results' file is called after")
    try:
        return run(parser.parse_args())
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
