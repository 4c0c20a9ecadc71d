"""How many tokens to draft: the protocol, one file per policy."""

from __future__ import annotations

from typing import Any

from vllm_eesd.policy.beta_ts import BetaThompson
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.fixed import Fixed
from vllm_eesd.policy.goodput import Goodput
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy

__all__ = [
    "BetaPosterior",
    "BetaThompson",
    "Calibration",
    "CostModel",
    "DraftLengthPolicy",
    "Fixed",
    "Goodput",
    "build_policy",
]

_POLICIES = {"beta_ts": BetaThompson, "fixed": Fixed, "goodput": Goodput}


def build_policy(
    name: str,
    posterior: BetaPosterior,
    seed: int,
    policy_args: dict[str, Any],
    costs: CostModel | None = None,
    calibration: Calibration | None = None,
) -> DraftLengthPolicy:
    """Return the policy `name`; the other arguments are those of `DraftLengthPolicy`.

    Raises:
        ValueError: the policy does not exist or does not take one of `policy_args`.
    """
    if name not in _POLICIES:
        raise ValueError(f"eesd: policy={name!r} is not valid: choose one of {', '.join(sorted(_POLICIES))}")
    policy = _POLICIES[name]
    unknown = sorted(set(policy_args) - set(policy.ARGS))
    if unknown:
        allowed = ", ".join(policy.ARGS) or "none"
        raise ValueError(f"eesd: policy_args has unknown key {unknown[0]!r} for policy {name!r}; allowed: {allowed}")
    return policy(posterior, seed, costs, calibration, **policy_args)
