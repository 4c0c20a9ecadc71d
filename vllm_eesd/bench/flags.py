"""The flags of `eesd demo`, `eesd bench ...` and `eesd trace-record`."""

from __future__ import annotations

import argparse

from vllm_eesd.flags import drafting, positive, positive_list, positive_reals, words

METHODS_HELP = (
    "of plain, eesd, eesd-head, ngram, suffix, draft_model, eagle; comma-separated (default plain,eesd,ngram)"
)


def demo(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.demo`."""
    parser.add_argument("--model", metavar="DIR", help="target; default: the embedded models/eesd-code-10m")
    parser.add_argument("--head", metavar="DIR", help="exit head; default: eesd/ in the target's directory")
    drafting(parser)
    parser.add_argument(
        "--max-tokens", type=positive, default=256, metavar="T", help="new tokens a prompt (default 256)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line; default: held-out code")
    parser.add_argument("--json", default="build/demo.json", metavar="FILE", help="results (default build/demo.json)")
    parser.add_argument("--no-color", action="store_true", help="mark drafted tokens without colours")


def latency(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.latency`."""
    measured(parser)
    parser.add_argument("--methods", type=words, default=["plain", "eesd", "ngram"], help=METHODS_HELP)
    parser.add_argument(
        "--batch", type=positive_list, default=[1, 4], help="batch sizes, comma-separated (default 1,4)"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="R", help="passes over all methods (default 5)")
    drafting(parser)
    peers(parser)
    temperature(parser)


def throughput(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.throughput`."""
    measured(parser)
    parser.add_argument("--methods", type=words, default=["plain", "eesd", "ngram"], help=METHODS_HELP)
    parser.add_argument(
        "--rate", type=positive_reals, default=[1.0, 2.0, 4.0], metavar="R,...", help="per second (default 1,2,4)"
    )
    parser.add_argument("--requests", type=positive, default=32, metavar="Q", help="per round (default 32)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="R", help="passes (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default 0)")
    drafting(parser)
    peers(parser)
    temperature(parser)


def sweep(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.sweep`."""
    measured(parser)
    parser.add_argument(
        "--exit-layers", type=words, default=["head"], metavar="N,...", help="headless; or head (default head)"
    )
    parser.add_argument("--lengths", type=positive_list, default=[2, 4, 8], metavar="K,...", help="(default 2,4,8)")
    parser.add_argument(
        "--policies", type=words, default=["goodput", "fixed"], metavar="P,...", help="(default goodput,fixed)"
    )
    parser.add_argument("--batch", type=positive_list, default=[1], help="batch sizes, comma-separated (default 1)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="R", help="passes (default 3)")


def trace_record(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.bench.trace_record`."""
    parser.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    parser.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a `prompt` a line")
    parser.add_argument("--workload", required=True, metavar="NAME", help="what the prompts are, for tables")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="per prompt (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the target (default 0, greedy)")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, metavar="K", help="drafted (default 8)")
    parser.add_argument(
        "--batch", type=positive_list, default=[1, 4, 8], help="batch sizes whose steps to time (default 1,4,8)"
    )
    parser.add_argument("-o", "--output", required=True, metavar="TRACE", help="file to write, compressed if *.gz")


def measured(parser: argparse.ArgumentParser) -> None:
    """What is measured, for every measurement."""
    parser.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    parser.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line")
    prompts.add_argument("--workload", metavar="NAME", help="in a clone: one of models/prompts")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="per prompt (default 128)")
    parser.add_argument("--dtype", default="float32", help="of the target (default float32, where identity can hold)")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")


def temperature(parser: argparse.ArgumentParser) -> None:
    """Of sampling."""
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of every request; above 0 output is not compared"
    )


def peers(parser: argparse.ArgumentParser) -> None:
    """Where trained peers are."""
    parser.add_argument(
        "--peers", metavar="P", help="directory of draft_model/ and eagle/; default: peers/ in the target's"
    )
