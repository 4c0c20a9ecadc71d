"""The flags of `eesd trace` and `eesd top`."""

from __future__ import annotations

import argparse

from vllm_eesd.flags import drafting, positive, positive_real


def trace(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.view.trace`."""
    parser.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    parser.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    parser.add_argument("--prompt", required=True, metavar="P", help="text to complete")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="T", help="new tokens (default 128)")
    parser.add_argument("--dtype", default="float32", help="of the target (default float32)")
    drafting(parser)
    parser.add_argument("-o", "--output", required=True, metavar="HTML", help="page to write")


def top(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.view.top`."""
    parser.add_argument("--url", required=True, metavar="URL", help="of the server, like http://127.0.0.1:8000")
    parser.add_argument("--interval", type=positive_real, default=2.0, metavar="S", help="seconds a look (default 2)")
    parser.add_argument("--window", type=positive_real, default=10.0, metavar="S", help="seconds summed (default 10)")
    parser.add_argument("--count", type=positive, metavar="C", help="looks, then end (default: until Ctrl-C)")
