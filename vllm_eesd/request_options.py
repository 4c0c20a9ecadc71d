"""What one request may say about its own speculation: flat keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS, POLICY_NAMES

PREFIX = "eesd_"


@dataclass(frozen=True)
class RequestOptions:
    """One request's wishes.

    Attributes:
        enabled: False drafts nothing for it (`eesd_enabled`).
        max_draft_tokens: the longest draft it may have; at most the engine's (`eesd_max_draft_tokens`).
        policy: a policy of its own, with that one's default arguments; None is the engine's (`eesd_policy`).
    """

    enabled: bool = True
    max_draft_tokens: int = MAX_SPECULATIVE_TOKENS
    policy: str | None = None

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """Return the options in `extra_args`; keys that do not start with `eesd_` are somebody else's.

        Raises:
            ValueError: one line naming the key, the value and what is allowed.
        """
        if not extra_args:
            return _DEFAULT
        given = {key: value for key, value in extra_args.items() if isinstance(key, str) and key.startswith(PREFIX)}
        fields = {key: _READERS[key](key, value) for key, value in given.items() if key in _READERS}
        if unknown := sorted(given.keys() - _READERS.keys()):
            raise ValueError(f"{unknown[0]!r:.80} is not an option of EESD; allowed: {', '.join(_READERS)}")
        return cls(**{key.removeprefix(PREFIX): value for key, value in fields.items()})


def _read_flag(key: str, value: Any) -> bool:
    # vllm_xargs carries strings, numbers and lists, but no booleans.
    flags = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, (bool, int, float, str)) or value not in flags:
        raise ValueError(f"{key}={value!r:.80} is not valid, must be true or false")
    return flags[value]


def _read_length(key: str, value: Any) -> int:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= MAX_SPECULATIVE_TOKENS and value == int(value)):
        raise ValueError(f"{key}={value!r:.80} is not valid, must be a whole number from 0 to {MAX_SPECULATIVE_TOKENS}")
    return int(value)


def _read_policy(key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in POLICY_NAMES:
        raise ValueError(f"{key}={value!r:.80} is not valid, must be one of {', '.join(POLICY_NAMES)}")
    return value


_READERS = {"eesd_enabled": _read_flag, "eesd_max_draft_tokens": _read_length, "eesd_policy": _read_policy}
_DEFAULT = RequestOptions()
