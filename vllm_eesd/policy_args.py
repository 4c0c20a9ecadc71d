"""The policies by name, each one entry: its class and what its `policy_args` may hold.

To read this imports no policy, and none of numba.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

#: Fields of `EESDConfig` that were settings of policies once.
FILES = {"state_file", "trace_file"}


class PolicyArgs(BaseModel):
    """The settings of every policy.

    Attributes:
        prior_key: whose learned prior a request starts from: everybody's, or its LoRA adapter's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prior_key: Literal["none", "lora"] = "none"

    @property
    def uses_ngrams(self) -> bool:
        """Whether the policy may submit n-gram drafts."""
        return False


class ConfidenceArgs(PolicyArgs):
    """The settings of `confidence`.

    Attributes:
        threshold: the least confidence to go on after; transformers' assistant_confidence_threshold.
    """

    threshold: float = Field(0.4, ge=0, le=1)


class GoodputArgs(PolicyArgs):
    """The settings of `goodput`.

    Attributes:
        probe_budget: share of the time that drafting may lose against plain decoding in the long run.
        ngram: whether n-gram drafts may be submitted.
    """

    probe_budget: float = Field(0.01, gt=0, le=0.5)
    ngram: bool = True

    @property
    def uses_ngrams(self) -> bool:
        return self.ngram


class Policy(NamedTuple):
    """A policy that a user can name.

    Attributes:
        implementation: "module:Class" within `vllm_eesd.policy`, a `DraftLengthPolicy`.
        settings: what its `policy_args` may hold.
    """

    implementation: str
    settings: type[PolicyArgs] = PolicyArgs

    @property
    def takes_ngrams(self) -> bool:
        """Whether it can submit n-gram drafts; its setting `ngram` turns them off."""
        return "ngram" in self.settings.model_fields


POLICIES = {
    "adaedl": Policy("thresholds:AdaEDL"),
    "beta_ts": Policy("thompson:BetaThompson"),
    "calibrated_ts": Policy("thompson:CalibratedThompson"),
    "confidence": Policy("thresholds:Confidence", ConfidenceArgs),
    "draft_verify": Policy("thresholds:DraftVerify"),
    "fixed": Policy("protocol:DraftLengthPolicy"),
    "goodput": Policy("goodput:Goodput", GoodputArgs),
}


def read_policy_args(policy: str, given: Mapping[str, Any]) -> PolicyArgs:
    """Return the settings of policy `policy` that a user's `policy_args` describe. Nothing is read or written.

    Raises:
        ValueError: one line: the policy does not exist, or does not take one of them.
    """
    if policy not in POLICIES:
        raise ValueError(f"eesd: policy={policy!r} is not valid: choose one of {', '.join(POLICIES)}")
    record = POLICIES[policy].settings
    try:
        return record.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, allowed = str(first["loc"][0]), first["msg"][0].lower() + first["msg"][1:]
        if name in FILES:
            line = f"eesd: policy_args.{name} is not valid: {name} is a field beside policy_args, not in it"
        elif first["type"] == "extra_forbidden":
            names = ", ".join(sorted(record.model_fields))
            line = f"eesd: policy_args has unknown key {name!r:.80} for policy {policy!r}; allowed: {names}"
        else:
            line = f"eesd: policy_args.{name}={first['input']!r:.80} is not valid: {allowed}"
        raise ValueError(line) from None
