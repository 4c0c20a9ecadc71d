"""The flags of `eesd simulate`."""

from __future__ import annotations

import argparse

from vllm_eesd.flags import positive, words


def simulate(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.simulate.run`."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="dense traces; of several also their mixture")
    parser.add_argument("--policies", type=words, metavar="P,...", help="comma-separated (default: all)")
    parser.add_argument("--cost-scale", metavar="draft=F,verify=F", help="multiply costs of drafting, verification")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="requests at once (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of policies and timing noise (default 0)")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")
    parser.add_argument("--plot", metavar="PNG", help="goodput, regret and lengths (needs the extra [plot])")
