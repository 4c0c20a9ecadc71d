"""The flags of `eesd simulate` and `eesd plan`."""

from __future__ import annotations

import argparse

from vllm_eesd.flags import natural, policy, positive, positive_list, positive_real, thousands, words


def simulate(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.simulate.run`."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="dense traces; of several also their mixture")
    parser.add_argument("--policies", type=words, metavar="P,...", help="comma-separated (default: all)")
    parser.add_argument("--cost-scale", metavar="draft=F,verify=F", help="multiply costs of drafting, verification")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="requests at once (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of policies and timing noise (default 0)")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")
    parser.add_argument("--plot", metavar="PNG", help="goodput, regret and lengths (needs the extra [plot])")


def plan(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.simulate.plan`."""
    parser.add_argument(
        "--trace",
        required=True,
        nargs="+",
        metavar="TRACE",
        help="dense traces of heads to compare, of `eesd trace-record`",
    )
    parser.add_argument("--gpu", required=True, metavar="G", help="a100, b200, h100, h200, l4 or l40s")
    parser.add_argument(
        "--exit-layer", type=int, metavar="N", help="target layers a draft runs (default: as deep as the trace's)"
    )
    parser.add_argument(
        "--head-layers", type=positive, metavar="M", help="the exit head's (default: the trace's, or 1)"
    )
    parser.add_argument(
        "--aux-layers", type=natural, default=3, metavar="A", help="from which its KV is filled too (default 3)"
    )
    parser.add_argument("--draft-vocab", type=thousands, metavar="V", help="rows of the LM head a draft multiplies")
    parser.add_argument("--headless", action="store_true", help="without an exit layer after them")
    parser.add_argument("--model", metavar="DIR", help="read the target's sizes from its config.json")
    for size, text in (
        ("layers", "decoder layers"),
        ("hidden", "width"),
        ("vocab", "vocabulary"),
        ("intermediate", "the MLP's width (default 3.5 times the width)"),
        ("heads", "attention heads (default: width / head-dim)"),
        ("kv-heads", "heads of keys and values (default 8)"),
        ("head-dim", "(default 128)"),
    ):
        parser.add_argument(f"--{size}", type=positive, metavar="n", help=text)
    parser.add_argument("--tp", type=positive, default=1, metavar="T", help="devices, tensor parallel (default 1)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights: bfloat16 or fp8 (default bfloat16)")
    parser.add_argument(
        "--context", type=positive, default=1024, metavar="C", help="tokens in the cache (default 1024)"
    )
    parser.add_argument("--batch", type=positive_list, default=[1, 2, 4, 8, 16, 32, 64], help="(default 1,2,...,64)")
    policy(parser)
    parser.add_argument("--reached", type=positive_real, default=1.0, help="share of published peaks (default 1)")
    for overhead in ("step", "draft", "round", "verify"):
        parser.add_argument(
            f"--{overhead}-overhead-ms", type=float, default=0.0, metavar="MS", help="added (default 0)"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the policy and of timing noise (default 0)")
    parser.add_argument("--json", metavar="OUT", help="write what was planned")
