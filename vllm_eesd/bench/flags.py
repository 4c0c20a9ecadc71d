"""The flags of `eesd demo`, `bench`, `trace`, `trace-record` and `top`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_eesd.flags import chat_template, drafting, positive, positive_list, positive_real, words


def demo(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.demo`."""
    default = "SmolLM2-135M-Instruct as `eesd model smollm2` makes it, or else the embedded model"
    target(parser, required=False, default=default)
    drafting(parser)
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="new tokens a prompt, at most")
    text = "JSONL with a `prompt` or `messages` a line: of a chat model, questions; default: some of either kind"
    parser.add_argument("--prompts", metavar="FILE", help=text)
    chat_template(parser)
    parser.add_argument("--json", default="build/demo.json", metavar="FILE", help="results")
    parser.add_argument("--no-color", action="store_true", help="mark drafted tokens without colours")
    parser.add_argument("--svg", metavar="FILE", help="also write what the terminal shows as a picture")


def latency(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.latency`."""
    measured(parser, rounds=5)
    compared(parser, ["plain", "plain-again", "eesd", "eesd-fixed@4", "ngram"])
    parser.add_argument("--batch", type=positive_list, default=[1, 4], metavar="B,...", help="batch sizes")
    text = "only the file's first so many"
    parser.add_argument("--num-prompts", type=positive, metavar="N", help=text)
    text = "prompts that a method does before the next has its turn; default: all"
    parser.add_argument("--block", type=positive, metavar="P", help=text)
    text = "go on after the end of a text, to --max-tokens; conversations end where the model ends them"
    parser.add_argument("--fixed-length", action="store_true", help=text)
    text = "end every greedy text where plain's begins to repeat itself"
    parser.add_argument("--up-to-loops", action="store_true", help=text)


def trace_record(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.trace_record`."""
    target(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a `prompt` or `messages` a line")
    chat_template(parser)
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
    text = "without a TRACE: what a user says to a chat model; text that any other completes"
    parser.add_argument("--prompt", metavar="P", help=text)
    parser.add_argument("--raw", action="store_true", help="a chat model completes the prompt, too")
    chat_template(parser)
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
    prompts.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` or `messages` a line")
    prompts.add_argument("--workload", metavar="NAME", help="one of models/prompts")
    chat_template(parser)
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="per prompt")
    dtype(parser)
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="R", help="passes over all methods")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")


def compared(parser: argparse.ArgumentParser, methods: Sequence[str] = ("plain", "eesd", "ngram")) -> None:
    """Which methods, and what they draft with."""
    text = "of plain, eesd, eesd-head, ngram, suffix, draft_model, eagle (eagle@K drafts K tokens); comma-separated. "
    text += "Beside them plain-again, plain measured twice; eesd-fixed@K, the head at a fixed length; eesd-ratio and "
    text += "eesd-shared-noise, the two ways to verify requests that sample without a seed"
    parser.add_argument("--methods", type=words, default=list(methods), metavar="M,...", help=text)
    drafting(parser)
    text = "directory of draft_model/ and eagle/; default: peers/ in the target's"
    parser.add_argument("--peers", metavar="P", help=text)
    temperature(parser)
    text = "sample from the likeliest tokens that make up this share"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="S", help=text)


def temperature(parser: argparse.ArgumentParser) -> None:
    """Of sampling."""
    text = "of every request; above 0 it samples"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help=text)


def dtype(parser: argparse.ArgumentParser) -> None:
    """Of the target."""
    parser.add_argument("--dtype", default="float32", help="of the target; only float32 output is compared exactly")
