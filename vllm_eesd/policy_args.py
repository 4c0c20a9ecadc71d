"""What `policy_args` may hold: one record per policy, checked when made, without the policy itself (or numba)."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from vllm_eesd.config import POLICY_NAMES

PRIOR_KEYS = ("none", "lora")


@dataclass(frozen=True)
class PolicyArgs:
    """The settings of every policy.

    Attributes:
        uses_ngrams: whether the policy may submit n-gram continuations instead of drafts.
        prior_key: whose learned prior a request starts from: everybody's, or its LoRA adapter's.
        state_file: where learned state is kept over restarts; None: nowhere.
        trace_file: where rounds are written, see `vllm_eesd.traces.rounds`; None: nowhere.
    Raises:
        ValueError: one line: the setting, its value, what is allowed. Nothing is read or written to find out.
    """

    uses_ngrams: ClassVar[bool] = False
    prior_key: str = "none"
    state_file: str | None = None
    trace_file: str | None = None

    def __post_init__(self) -> None:
        if self.prior_key not in PRIOR_KEYS:
            raise _invalid("prior_key", self.prior_key, f"choose one of {', '.join(PRIOR_KEYS)}")
        check_state_file(self.state_file)
        check_trace_file(self.trace_file)

    def own(self) -> dict[str, Any]:
        """Return the settings that this policy alone has."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _COMMON}


@dataclass(frozen=True)
class ConfidenceArgs(PolicyArgs):
    """The settings of `confidence`.

    Attributes:
        threshold: the least confidence to go on after, in [0, 1]; transformers' assistant_confidence_threshold.
    """

    threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise _invalid("threshold", self.threshold, "must be 0 to 1")


@dataclass(frozen=True)
class GoodputArgs(PolicyArgs):
    """The settings of `goodput`.

    Attributes:
        probe_budget: share of the time that drafting may lose against plain decoding in the long run, in (0, 0.5].
        ngram: whether to copy n-gram continuations.
    """

    probe_budget: float = 0.01
    ngram: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.probe_budget) or not 0 < self.probe_budget <= 0.5:
            raise _invalid("probe_budget", self.probe_budget, "above 0, at most 0.5")
        if not isinstance(self.ngram, bool):
            raise _invalid("ngram", self.ngram, "true or false")

    @property
    def uses_ngrams(self) -> bool:
        return self.ngram


_COMMON = tuple(field.name for field in fields(PolicyArgs))
_ARGS: dict[str, type[PolicyArgs]] = {"confidence": ConfidenceArgs, "goodput": GoodputArgs}


def read_policy_args(policy: str, given: Mapping[str, Any]) -> PolicyArgs:
    """Return the settings of policy `policy` that a user's `policy_args` describe.

    Raises:
        ValueError: one line: the policy does not exist, or does not take one of them.
    """
    if policy not in POLICY_NAMES:
        raise ValueError(f"eesd: policy={policy!r} is not valid: choose one of {', '.join(POLICY_NAMES)}")
    record = _ARGS.get(policy, PolicyArgs)
    allowed = sorted(field.name for field in fields(record))
    if unknown := sorted(set(given) - set(allowed)):
        names = ", ".join(allowed)
        raise ValueError(
            f"eesd: policy_args has unknown key {unknown[0]!r:.80} for policy {policy!r}; allowed: {names}"
        )
    return record(**given)


def check_state_file(path: Any) -> None:
    """Refuse a `state_file` that names no file in a directory that is; None is none.

    Raises:
        ValueError: one line.
    """
    names_a_file = isinstance(path, str) and path and "\0" not in path and not os.path.isdir(path)
    if path is not None and not (names_a_file and os.path.isdir(os.path.dirname(path) or ".")):
        raise ValueError(
            f"eesd: policy_args.state_file={path!r:.200} is not valid: must name a file in a directory that is"
        )


def check_trace_file(path: Any) -> None:
    """Refuse a `trace_file` that cannot be written; None is none. A file that is not there is not created.

    Raises:
        ValueError: one line: the value, the reason, what is allowed.
    """
    if path is None:
        return
    reason = "not a path"
    if isinstance(path, str) and path:
        try:
            _try_to_write(path)
            return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    raise ValueError(
        f"eesd: policy_args.trace_file={path!r:.200} is not valid ({reason}): must name a file that can be written"
    )


def _try_to_write(path: str) -> None:
    try:
        # Without waiting: a pipe without a reader is refused.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path)) if not path.endswith("/") else path
        os.stat(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _invalid(name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"eesd: policy_args.{name}={value!r:.80} is not valid: {allowed}")
