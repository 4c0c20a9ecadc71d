"""How many tokens to draft: the protocol, one file per policy."""

from __future__ import annotations

import os
from typing import Any

from vllm_eesd.policy.adaedl import AdaEDL
from vllm_eesd.policy.beta_ts import BetaThompson
from vllm_eesd.policy.calibrated_ts import CalibratedThompson
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.confidence import Confidence
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.draft_verify import DraftVerify
from vllm_eesd.policy.fixed import Fixed
from vllm_eesd.policy.goodput import Goodput
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome
from vllm_eesd.policy.state import load_state

__all__ = [
    "POLICIES",
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
    "fixed": Fixed,
    "goodput": Goodput,
}
#: `policy_args` that every policy takes: whose learned prior a request starts from, where learned state is kept, and
#: where rounds are written (by the host, see `vllm_eesd.round_trace`).
COMMON_ARGS = ("prior_key", "state_file", "trace_file")
PRIOR_KEYS = ("none", "lora")


def build_policy(
    name: str,
    posterior: BetaPosterior,
    seed: int,
    policy_args: dict[str, Any],
    costs: CostModel | None = None,
    calibration: Calibration | None = None,
) -> DraftLengthPolicy:
    """Return the policy `name`, with the state of `policy_args["state_file"]` if there is one.

    Args:
        policy_args: what the policy's class and `COMMON_ARGS` allow.
        posterior, seed, costs, calibration: see `DraftLengthPolicy`.
    Raises:
        ValueError: the policy does not exist or does not take one of `policy_args`.
    """
    if name not in POLICIES:
        raise ValueError(f"eesd: policy={name!r} is not valid: choose one of {', '.join(POLICIES)}")
    policy_class = POLICIES[name]
    allowed = sorted((*COMMON_ARGS, *policy_class.ARGS))
    unknown = sorted(set(policy_args) - set(allowed))
    if unknown:
        names = ", ".join(allowed)
        raise ValueError(f"eesd: policy_args has unknown key {unknown[0]!r:.80} for policy {name!r}; allowed: {names}")
    own = {key: value for key, value in policy_args.items() if key in policy_class.ARGS}
    policy = policy_class(posterior, seed, costs, calibration, **own)
    policy.keyed_by_lora = _prior_key(policy_args.get("prior_key", PRIOR_KEYS[0])) == "lora"
    policy.state_file = _state_file(policy_args.get("state_file"))
    if policy.state_file is not None:
        load_state(policy.state_file, policy.posterior, policy.calibration)
    return policy


def _prior_key(value: Any) -> str:
    if value not in PRIOR_KEYS:
        names = ", ".join(PRIOR_KEYS)
        raise ValueError(f"eesd: policy_args.prior_key={value!r:.80} is not valid: choose one of {names}")
    return value


def _state_file(value: Any) -> str | None:
    names_a_file = isinstance(value, str) and value and "\0" not in value and not os.path.isdir(value)
    if value is not None and not (names_a_file and os.path.isdir(os.path.dirname(value) or ".")):
        raise ValueError(
            f"eesd: policy_args.state_file={value!r:.200} is not valid: must name a file in a directory that is"
        )
    return value
