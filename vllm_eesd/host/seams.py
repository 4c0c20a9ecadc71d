"""Seams: the few places where vLLM's own code is wrapped, each a record that is checked before anything is touched."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

#: Set on a wrapper, so that installing twice is seen.
_MARK = "_eesd_seam"


@dataclass(frozen=True)
class Seam:
    """One wrapped function of vLLM: a method or property of a class, or a function only its own module calls.

    Attributes:
        target: "package.module:Class.attribute" or "package.module:function".
        digests: of the source this wrapper was written against, one per vLLM release that differs; see `digest_of`.
        wrap: gets the original function, returns its replacement.
        why: what would not work without it.
        retired_by: what upstream change would make it unnecessary.
    """

    target: str
    digests: tuple[str, ...]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str
    retired_by: str


@dataclass(frozen=True)
class SeamStatus:
    """Whether a seam fits the installed vLLM; `reason` says why not."""

    name: str
    target: str
    ok: bool
    reason: str
    why: str
    retired_by: str


def digest_of(function: Callable[..., Any]) -> str:
    """Return 16 hex digits identifying a function's source, indentation and comments at the line's end aside."""
    return digest_of_lines(inspect.getsource(function).splitlines())


def digest_of_lines(lines: list[str]) -> str:
    """Return the digest of a function's source lines."""
    lines = textwrap.dedent("\n".join(lines)).splitlines()
    code = "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _locate(target: str) -> tuple[type | ModuleType, str, Any]:
    """Return (class or module, attribute name, the raw attribute) of a seam's target."""
    module_name, _, qualified = target.partition(":")
    class_name, _, attribute = qualified.rpartition(".")
    module = importlib.import_module(module_name)
    owner = getattr(module, class_name) if class_name else module
    return owner, attribute, inspect.getattr_static(owner, attribute)


def _function_of(raw: Any) -> Callable[..., Any]:
    """Return the plain function behind a method, static method or property."""
    if isinstance(raw, property):
        return raw.fget
    return getattr(raw, "__func__", raw)


def _rewrapped(raw: Any, function: Callable[..., Any]) -> Any:
    """Return `function` as the kind of attribute `raw` is."""
    if isinstance(raw, property):
        return property(function)
    return type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function


def source_of(seam: Seam) -> str:
    """Return the installed source of a seam's function, at the left margin."""
    function = _function_of(_locate(seam.target)[2])
    return textwrap.dedent(inspect.getsource(getattr(function, _MARK, function)))


def check(seam: Seam) -> SeamStatus:
    """Return whether the installed vLLM's code at this seam is the code it was written against."""
    try:
        function = _function_of(_locate(seam.target)[2])
        digest = digest_of(getattr(function, _MARK, function))
        reason = "" if digest in seam.digests else f"its code has changed (digest {digest})"
    except (ImportError, AttributeError, OSError, TypeError) as error:
        reason = f"not found: {error}"
    name = seam.target.rpartition(":")[2]
    return SeamStatus(name, seam.target, not reason, reason, seam.why, seam.retired_by)


def install(seam: Seam) -> None:
    """Wrap the seam's target; a second call changes nothing."""
    owner, attribute, raw = _locate(seam.target)
    original = _function_of(raw)
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(seam.wrap(original))
    setattr(wrapper, _MARK, original)
    setattr(owner, attribute, _rewrapped(raw, wrapper))


def remove(seam: Seam) -> None:
    """Put the original back (tests only)."""
    owner, attribute, raw = _locate(seam.target)
    original = getattr(_function_of(raw), _MARK, None)
    if original is not None:
        setattr(owner, attribute, _rewrapped(raw, original))
