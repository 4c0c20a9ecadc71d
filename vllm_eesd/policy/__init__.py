"""How many tokens to draft: the protocol, and the policies."""

from __future__ import annotations

from typing import Any

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.goodput import Goodput
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome
from vllm_eesd.policy.source import DRAWN, GREEDY, NGRAM, SHARED_NOISE
from vllm_eesd.policy.state import load_state
from vllm_eesd.policy.thompson import BetaThompson, CalibratedThompson
from vllm_eesd.policy.thresholds import AdaEDL, Confidence, DraftVerify
from vllm_eesd.policy_args import read_policy_args

__all__ = [
    "DRAWN",
    "GREEDY",
    "NGRAM",
    "POLICIES",
    "SHARED_NOISE",
    "BetaPosterior",
    "Calibration",
    "CostModel",
    "DraftLengthPolicy",
    "Outcome",
    "build_policy",
]

POLICIES: dict[str, type[DraftLengthPolicy]] = {
    "adaedl": AdaEDL,
    "beta_ts": BetaThompson,
    "calibrated_ts": CalibratedThompson,
    "confidence": Confidence,
    "draft_verify": DraftVerify,
    "fixed": DraftLengthPolicy,
    "goodput": Goodput,
}


def build_policy(
    name: str,
    posterior: BetaPosterior,
    seed: int,
    policy_args: dict[str, Any],
    costs: CostModel | None = None,
    calibration: Calibration | None = None,
    restores: bool = True,
) -> DraftLengthPolicy:
    """Return the policy `name`, with the state of `policy_args["state_file"]` if there is one.

    Args:
        policy_args: see `vllm_eesd.policy_args`.
        posterior, seed, costs, calibration: see `DraftLengthPolicy`.
        restores: False where that state was learned of other weights: it will be written over.
    Raises:
        ValueError: the policy does not exist or does not take one of `policy_args`.
    """
    settings = read_policy_args(name, policy_args)
    policy = POLICIES[name](posterior, seed, costs, calibration, settings)
    if restores and settings.state_file is not None:
        load_state(settings.state_file, policy.posterior, policy.calibration)
    return policy
