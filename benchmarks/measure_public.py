"""What `make bench` measures by default: a public chat model, in bfloat16 as people run it and in float32 for identity.

    python benchmarks/measure_public.py [--quick] [--model DIR] [--head DIR] [--peers DIR] [--name smollm2]

Conversations that the model ends itself, greedy and sampled as the model's authors advise, one request at a time and
eight. Beside every method: plain a second time on the same engine (how far times of the same thing lie apart), the
exit head at a fixed length, and in bfloat16 plain's own texts at another batch size. Peers that were trained are
measured in sessions of one length each (`models/make/train_drafters.py`). All of it takes some hours; `--quick` takes
25 minutes at most, into build/bench instead of benchmarks/results. What was measured is written at once, and what is
already there from this commit is not measured again with `--resume`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_eesd.bench.engines import (
    AGAIN,
    FIXED,
    FIXED_LENGTH,
    TRAINED_PEERS,
    EngineSettings,
    encode_prompts,
    running_engines,
)
from vllm_eesd.bench.latency import (
    latency_rows,
    latency_table,
    open_console,
    print_positions,
    report_gate,
    reporting,
    write_json,
)
from vllm_eesd.bench.measure import Work
from vllm_eesd.bench.prompts import Prompt, read_prompts, workload_file
from vllm_eesd.flags import positive
from vllm_eesd.provenance import git_sha, provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS, BUILD = ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
NAME, HEAD = "smollm2", "models/smollm2-135m-eesd"
#: Of the draft lengths of trained peers the table takes whichever serves each best.
PEER_LENGTHS = (2, 5)
#: A method does so many prompts, for each request that runs at a time, before the next one has its turn.
WAVES, FEWEST_IN_BLOCK = 4, 8
#: Greedy, and as the authors of the model advise: temperature, top-p.
GREEDY, SAMPLED = (0.0, 1.0), (0.7, 0.95)
#: Further parameters of `vllm.SamplingParams`, as model cards advise them, and prompts by batch size, for --parameters.
KINDS: dict[str, dict[str, Any]] = {
    "T = 0.7": {"temperature": 0.7},
    "T = 0.7, top_p = 0.95": {"temperature": 0.7, "top_p": 0.95},
    "T = 0.6, top_p = 0.95, top_k = 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T = 0.7, repetition_penalty = 1.05": {"temperature": 0.7, "repetition_penalty": 1.05},
}
PARAMETER_PROMPTS, PARAMETER_TOKENS = {1: 6, 8: 24}, 96


@dataclass(frozen=True)
class Size:
    """How much is measured of a workload.

    Attributes:
        prompts: its first so many at each batch size.
        max_tokens: at most, of each answer.
        rounds: over all of them.
        samplings: temperature and top-p of each table.
        peers: whether trained peers are measured.
    """

    prompts: dict[int, int]
    max_tokens: int = 128
    rounds: int = 1
    samplings: tuple[tuple[float, float], ...] = (GREEDY, SAMPLED)
    peers: bool = False

    def longest(self) -> int:
        """Return how many prompts some batch size needs."""
        return max(self.prompts.values())


#: By the target's dtype, in the order in which they are measured.
SIZES = {
    "bfloat16": {
        "chat": Size({1: 80, 8: 80}, peers=True),
        "human_eval": Size({1: 80, 8: 80}, peers=True),
        "long_documents": Size({1: 12, 4: 12}, rounds=2),
    },
    "float32": {
        "chat": Size({1: 24, 8: 48}),
        "human_eval": Size({1: 24, 8: 48}),
        "long_documents": Size({1: 6}, samplings=(GREEDY,)),
    },
}
QUICK_SIZES = {
    "bfloat16": {name: Size({1: 8, 8: 16}, max_tokens=64) for name in ("chat", "human_eval")},
    "float32": {"chat": Size({1: 4, 8: 8}, max_tokens=48, samplings=(GREEDY,))},
}


@dataclass(frozen=True)
class Session:
    """What everything is measured with.

    Attributes:
        name: of the target, which results' files begin with.
        peers: trained ones that are there.
        ngram_methods: what copies and is there: ngram, suffix.
    """

    name: str
    settings: EngineSettings
    peers: tuple[str, ...]
    ngram_methods: tuple[str, ...]
    results: Path
    resume: bool
    console: Any
    progress: Callable[[str], None]

    def file(self, workload: str, dtype: str, sampling: tuple[float, float]) -> Path:
        return self.results / f"{self.name}-{workload}_{'greedy' if sampling == GREEDY else 'sampled'}_{dtype}.json"

    def has(self, path: Path, size: Size) -> bool:
        """Return whether a file need not be measured again: it is of this commit, trained peers included."""
        rows = json.loads(path.read_text(encoding="utf-8")) if self.resume and path.is_file() else []
        peers = {f"{peer}@{length}" for peer in self.peers for length in PEER_LENGTHS} if size.peers else set()
        whole = peers <= {row["method"] for row in rows}
        return bool(rows) and whole and rows[0]["git_sha"] == git_sha()


def public_model() -> str:
    """Return the directory of the public target, made on the first use.

    Raises:
        ValueError: it cannot be had; one line.
    """
    command = [sys.executable, "-m", "vllm_eesd.cli", "model", NAME]
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if made.returncode or not made.stdout.strip():
        said = (made.stderr.strip() or "no directory was printed").splitlines()[-1]
        raise ValueError(f"model: `eesd model {NAME}` did not say where it is ({said}); allowed: --model DIR")
    return made.stdout.strip().splitlines()[-1]


def head_beside(model: str) -> str | None:
    """Return the public target's head, None for a model that holds one of its own."""
    return None if (Path(model) / "eesd" / "config.json").is_file() else HEAD


def measure_public(args: argparse.Namespace) -> int:
    """Measure everything; return 1 if eesd's float32 output is not plain's somewhere.

    Raises:
        ValueError: the model, its head or a workload is not here; one line.
    """
    model = args.model or public_model()
    settings = EngineSettings(model, args.head or head_beside(model), peers=args.peers)
    sizes = chosen_sizes(QUICK_SIZES if args.quick else SIZES, args)
    prompts = read_workloads(sizes)
    provenance()  # before the first file is written: the commit is the one that was measured
    console, failed = open_console(), 0
    peers = tuple(peer for peer in TRAINED_PEERS if settings.missing(peer) is None)
    copying = tuple(method for method in ("ngram", "suffix") if settings.missing(method) is None)
    results = BUILD if args.quick else RESULTS
    with reporting(console) as progress:
        session = Session(args.name, settings, peers, copying, results, args.resume, console, progress)
        if args.parameters:
            measure_parameters(session, (args.dtypes or ["bfloat16"])[0])
            return 0
        write_json(results / f"{args.name}-methods.json", methods_about(settings))
        for dtype, workloads in sizes.items():
            failed |= measure_dtype(session, dtype, workloads, prompts)
    return failed


def chosen_sizes(sizes: dict[str, dict[str, Size]], args: argparse.Namespace) -> dict[str, dict[str, Size]]:
    """Return the sizes of the dtypes and workloads that are asked for, with at most `args.prompts` prompts each."""

    def fewer(size: Size) -> Size:
        return replace(
            size, prompts={batch: min(count, args.prompts or count) for batch, count in size.prompts.items()}
        )

    return {
        dtype: {name: fewer(size) for name, size in workloads.items() if not args.workloads or name in args.workloads}
        for dtype, workloads in sizes.items()
        if not args.dtypes or dtype in args.dtypes
    }


def read_workloads(sizes: dict[str, dict[str, Size]]) -> dict[str, list[Prompt]]:
    """Return the prompts of every workload; where one is not here, nothing is started."""
    names = {name for workloads in sizes.values() for name in workloads}
    return {name: read_prompts(workload_file(name)) for name in sorted(names)}


def methods_about(settings: EngineSettings) -> dict[str, Any]:
    """Return why a peer is left out, or how it was trained."""
    found: dict[str, Any] = {}
    for method in ("suffix", *TRAINED_PEERS):
        reason, record = settings.missing(method), settings.peer(method) / "training.json"
        trained = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        found[method] = {"left_out": reason} if reason else trained
    return found


def measure_dtype(session: Session, dtype: str, workloads: dict[str, Size], prompts: dict[str, list[Prompt]]) -> int:
    """Measure, show and write a dtype's workloads; return 1 if eesd's float32 output is not plain's in one."""
    wanted = [(name, size, way) for name, size in workloads.items() for way in size.samplings]
    wanted = [(name, size, way) for name, size, way in wanted if not session.has(session.file(name, dtype, way), size)]
    if not wanted:
        return 0
    settings = replace(session.settings, dtype=dtype)
    encoded, longest = {}, 0
    for name, size, _ in wanted:
        some = prompts[name][: size.longest()]
        _, encoded[name], length = encode_prompts(settings.model, some, size.max_tokens, session.progress)
        longest = max(longest, length)
    methods = ["plain", AGAIN, "eesd", f"{FIXED}@{FIXED_LENGTH}", *session.ngram_methods]
    found: dict[Path, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        ours = stack.enter_context(running_engines(methods[:4], settings, longest, session.progress))
        with running_engines(methods[4:], settings, longest, session.progress) as copying:
            for name, size, way in wanted:
                path = session.file(name, dtype, way)
                counted = len(prompts[name])
                found[path] = table(session, ours | copying, settings, (name, size, way), encoded[name], counted)
                write_json(path, found[path])
        # Started when those that copy are gone, of one length at a time: so many would not fit into memory at once.
        for length in PEER_LENGTHS if session.peers and any(size.peers for _, size, _ in wanted) else ():
            named = [f"{peer}@{length}" for peer in session.peers]
            with running_engines(named, settings, longest, session.progress) as theirs:
                for name, size, way in wanted:
                    if size.peers:
                        some = {method: ours[method] for method in ("plain", "eesd")} | theirs
                        rows = table(session, some, settings, (name, size, way), encoded[name], len(prompts[name]))
                        path = session.file(name, dtype, way)
                        found[path] += [row for row in rows if row["method"] in named]
                        write_json(path, found[path])
    return max(report_gate(rows, session.console) for rows in found.values())


def table(
    session: Session,
    engines: dict[str, Any],
    settings: EngineSettings,
    which: tuple[str, Size, tuple[float, float]],
    prompts: list[list[int]],
    out_of: int,
) -> list[dict[str, Any]]:
    """Return, and show, the rows of one workload and way to choose tokens, at all of its batch sizes."""
    name, size, (temperature, top_p) = which
    settings = replace(settings, temperature=temperature, top_p=top_p)
    chosen = {method: engine.at(temperature, top_p) for method, engine in engines.items()}
    rows: list[dict[str, Any]] = []
    for batch, count in size.prompts.items():
        block = max(FEWEST_IN_BLOCK, WAVES * batch)
        some = prompts[:count]
        work = Work(some, workload_file(name), size.max_tokens, size.rounds, None, False, block, out_of)
        session.progress(f"{name}, {settings.dtype}, T = {temperature:g}, batch {batch}")
        measured = latency_rows(chosen, settings, work, batch, session.progress)
        # Where this machine keeps the model means nothing elsewhere.
        rows += [row | {"workload": name, "model": Path(settings.model).name} for row in measured]
    session.console.print(f"\n{name}, {settings.dtype}, T = {temperature:g}")
    session.console.print(latency_table(rows))
    print_positions(rows, session.console)
    return rows


def measure_parameters(session: Session, dtype: str) -> None:
    """Measure and write plain vLLM and EESD on chat with each of KINDS."""
    settings, source = replace(session.settings, dtype=dtype), workload_file("chat")
    texts, found = read_prompts(source), []
    some = texts[: max(PARAMETER_PROMPTS.values())]
    _, prompts, longest = encode_prompts(settings.model, some, PARAMETER_TOKENS, session.progress)
    with running_engines(["plain", "eesd"], settings, longest, session.progress) as engines:
        for kind, params in KINDS.items():
            asked = {method: engine.at(**params) for method, engine in engines.items()}
            said = replace(settings, temperature=params["temperature"], top_p=params.get("top_p", 1.0))
            for batch, count in PARAMETER_PROMPTS.items():
                block = max(FEWEST_IN_BLOCK, WAVES * batch)
                work = Work(prompts[:count], source, PARAMETER_TOKENS, 1, None, False, block, len(texts))
                rows = latency_rows(asked, said, work, batch, session.progress)
                found += [row | {"kind": kind, "model": Path(settings.model).name} for row in rows]
            write_json(session.results / f"{session.name}-sampling_parameters.json", found)
            session.console.print(kind, latency_table([row for row in found if row["kind"] == kind]))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement, which `measure_all.py` has too."""
    parser.add_argument("--quick", action="store_true", help="25 minutes at most, into build/bench")
    parser.add_argument("--prompts", type=positive, metavar="P", help="at most so many of each workload")
    workloads = sorted({name for of_dtype in SIZES.values() for name in of_dtype})
    parser.add_argument("--workloads", nargs="+", choices=workloads, metavar="W", help="these; default: all")
    parser.add_argument("--dtypes", nargs="+", choices=list(SIZES), metavar="D", help="these; default: both")
    parser.add_argument("--model", metavar="DIR", help=f"default: what `eesd model {NAME}` says")
    parser.add_argument("--head", metavar="DIR", help=f"default: eesd/ in the model's, else {HEAD}")
    parser.add_argument("--peers", metavar="DIR", help="draft_model/ and eagle/; default: peers/ in the model's")
    parser.add_argument("--name", default=NAME, help="what the results' files begin with")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has already measured")
    parser.add_argument("--rates", action="store_true", help="also requests that arrive, at real servers")
    parser.add_argument("--parameters", action="store_true", help="only what top-p, top-k and penalties cost")


def run(args: argparse.Namespace) -> int:
    """Measure, then if asked to at real servers, which a script of its own starts."""
    began = time.monotonic()
    args.model = args.model or public_model()
    failed = measure_public(args)
    if args.rates and not args.quick:
        command = [sys.executable, str(ROOT / "benchmarks" / "serve_rates.py"), "--name", args.name]
        command += ["--model", args.model, "--results", str(RESULTS)]
        command += ["--head", args.head] if args.head else []
        subprocess.run(command, cwd=ROOT, check=True)
    open_console().print(f"measured in {(time.monotonic() - began) / 60:.1f} minutes")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    return run_or_refuse(parser, parser.parse_args())


def run_or_refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Measure; what the user got wrong is one line."""
    os.chdir(ROOT)
    try:
        return run(args)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
