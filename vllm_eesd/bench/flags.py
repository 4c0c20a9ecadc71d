"""The flags of `eesd demo`, `bench`, `trace`, `trace-record` and `top`."""

from __future__ import annotations

import argparse

from vllm_eesd.flags import drafting, positive, positive_list, positive_real, positive_reals, words


def demo(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.demo`."""
    target(parser, required=False, default="the embedded models/eesd-code-10m")
    drafting(parser)
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="new tokens a prompt")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line; default: held-out code")
    parser.add_argument("--json", default="build/demo.json", metavar="FILE", help="results")
    parser.add_argument("--no-color", action="store_true", help="mark drafted tokens without colours")
    parser.add_argument("--svg", metavar="FILE", help="also write what the terminal shows as a picture")


def latency(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.latency`."""
    measured(parser, rounds=5)
    compared(parser)
    parser.add_argument("--batch", type=positive_list, default=[1, 4], metavar="B,...", help="batch sizes")
    text = "end every greedy text where plain's begins to repeat itself"
    parser.add_argument("--up-to-loops", action="store_true", help=text)


def throughput(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.throughput`."""
    measured(parser, rounds=3)
    compared(parser)
    parser.add_argument("--rate", type=positive_reals, default=[1.0, 2.0, 4.0], metavar="R,...", help="per second")
    parser.add_argument("--requests", type=positive, default=32, metavar="Q", help="per round")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")


def sweep(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.sweep`."""
    measured(parser, rounds=3)
    text = "layers to draft headless from, or head: the head's own"
    parser.add_argument("--exit-layers", type=words, default=["head"], metavar="N,...", help=text)
    parser.add_argument("--lengths", type=positive_list, default=[2, 4, 8], metavar="K,...", help="longest drafts")
    parser.add_argument("--policies", type=words, default=["goodput", "fixed"], metavar="P,...", help="policies")
    parser.add_argument("--batch", type=positive_list, default=[1], metavar="B,...", help="batch sizes")


def trace_record(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.trace_record`."""
    target(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a `prompt` a line")
    parser.add_argument("--workload", required=True, metavar="NAME", help="what the prompts are, for tables")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="per prompt")
    temperature(parser)
    parser.add_argument("--num-speculative-tokens", type=int, default=8, metavar="K", help="drafted")
    parser.add_argument("--batch", type=positive_list, default=[1, 4, 8], metavar="B,...", help="whose steps to time")
    parser.add_argument("-o", "--output", required=True, metavar="TRACE", help="file to write, compressed if *.gz")


def trace(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.trace`."""
    text = "show a recorded trace, of `eesd trace-record` or a server's trace_file; default: generate now"
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=text)
    parser.add_argument("--request", type=positive, default=1, metavar="R", help="of that trace")
    target(parser, required=False, default="the one a TRACE names, for its tokenizer")
    parser.add_argument("--prompt", metavar="P", help="text to complete, without a TRACE")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="new tokens")
    dtype(parser)
    drafting(parser)
    parser.add_argument("-o", "--output", required=True, metavar="HTML", help="page to write")


def top(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.top`."""
    parser.add_argument("--url", required=True, metavar="URL", help="of the server, like http://127.0.0.1:8000")
    parser.add_argument("--interval", type=positive_real, default=2.0, metavar="S", help="seconds between two looks")
    parser.add_argument("--window", type=positive_real, default=10.0, metavar="S", help="seconds summed")
    parser.add_argument("--count", type=positive, metavar="C", help="looks, then end (default: until Ctrl-C)")


def target(parser: argparse.ArgumentParser, required: bool = True, default: str = "") -> None:
    """Which model, with which exit head; `default` says what is taken where none is required."""
    text = "target: a directory or a Hub id" + ("" if required else f"; default: {default}")
    parser.add_argument("--model", required=required, metavar="M", help=text)
    parser.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")


def measured(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What is measured, for every measurement."""
    target(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line")
    prompts.add_argument("--workload", metavar="NAME", help="one of models/prompts")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="per prompt")
    dtype(parser)
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="R", help="passes over all methods")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")


def compared(parser: argparse.ArgumentParser) -> None:
    """Which methods, and what they draft with."""
    text = "of plain, eesd, eesd-head, ngram, suffix, draft_model, eagle (eagle@K drafts K tokens); comma-separated"
    parser.add_argument("--methods", type=words, default=["plain", "eesd", "ngram"], metavar="M,...", help=text)
    drafting(parser)
    text = "directory of draft_model/ and eagle/; default: peers/ in the target's"
    parser.add_argument("--peers", metavar="P", help=text)
    temperature(parser)


def temperature(parser: argparse.ArgumentParser) -> None:
    """Of sampling."""
    text = "of every request; above 0 it samples"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=text)


def dtype(parser: argparse.ArgumentParser) -> None:
    """Of the target."""
    parser.add_argument("--dtype", default="float32", help="of the target; only float32 output is compared exactly")
