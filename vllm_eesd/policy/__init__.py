"""How many tokens to draft: the protocol, and the policies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome
from vllm_eesd.policy.source import DRAWN, GREEDY, NGRAM, SHARED_NOISE
from vllm_eesd.policy.state import load_state
from vllm_eesd.policy_args import POLICIES, read_policy_args

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


def build_policy(
    name: str,
    posterior: BetaPosterior,
    seed: int,
    policy_args: dict[str, Any],
    costs: CostModel | None = None,
    calibration: Calibration | None = None,
    state_file: str | None = None,
    restores: bool = True,
) -> DraftLengthPolicy:
    """Return the policy `name`, with the state of `state_file` if there is one.

    Args:
        policy_args: see `vllm_eesd.policy_args`.
        posterior, seed, costs, calibration, state_file: see `DraftLengthPolicy`.
        restores: False where that state was learned with other weights: it will be written over.
    Raises:
        ValueError: the policy does not exist or does not take one of `policy_args`.
    """
    settings = read_policy_args(name, policy_args)
    module, class_name = POLICIES[name].implementation.split(":")
    policy_class = getattr(import_module(f"{__name__}.{module}"), class_name)
    policy = policy_class(posterior, seed, costs, calibration, settings, state_file)
    if restores and state_file is not None:
        load_state(state_file, policy.posterior, policy.calibration)
    return policy
