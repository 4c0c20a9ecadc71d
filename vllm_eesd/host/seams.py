"""Seams: the few places where vLLM's own code is wrapped, each a record that is checked before anything is touched."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_eesd.host import vllm_source
from vllm_eesd.host.on_import import when_imported

#: A function of vLLM's, or what stands in for it.
Function = Callable[..., Any]
#: Set on a wrapper, so that installing twice is seen.
_MARK = "_eesd_seam"
_INSTALLING = threading.Lock()


@dataclass(frozen=True)
class Seam:
    """One wrapped function of vLLM: a method or property of a class, or a function only its own module calls.

    Attributes:
        target: "package.module:Class.attribute" or "package.module:function".
        digests: of the source this wrapper was written against, one per vLLM release that differs; see
            `vllm_source.digest_of_lines`.
        instead: what is called in the function's place: with the function itself, then with its arguments.
        why: what would not work without it.
        retired_by: what upstream change would make it unnecessary.
        upstream: the issue or pull request of vLLM that is about it, as "vllm#1"; "" where none is known.
        platform: "any", or the only one it is for, as `vllm.platforms.current_platform.device_type` calls it.
    """

    target: str
    digests: tuple[str, ...]
    instead: Function
    why: str
    retired_by: str
    upstream: str = ""
    platform: str = "any"

    @property
    def module(self) -> str:
        """Name of the module that the wrapped function is reached through."""
        return self.target.partition(":")[0]

    @property
    def qualified(self) -> str:
        """ "Class.attribute" or "function"."""
        return self.target.partition(":")[2]

    def is_for(self, platform: str) -> bool:
        """Return whether it is installed on that platform."""
        return self.platform in ("any", platform)


def seam(records: list[Seam], **described: Any) -> Callable[[Function], Function]:
    """Return a decorator that adds a `Seam`, `described` by its other attributes, whose `instead` is the function."""

    def add(instead: Function) -> Function:
        records.append(Seam(instead=instead, **described))
        return instead

    return add


@dataclass(frozen=True)
class SeamStatus:
    """Whether a seam fits the installed vLLM; `reason` says why not, the rest is the seam's."""

    name: str
    target: str
    ok: bool
    reason: str
    why: str
    retired_by: str
    upstream: str = ""
    platform: str = "any"


def check(seam: Seam, read: vllm_source.Reader = vllm_source.installed_source) -> SeamStatus:
    """Return whether vLLM's code at this seam is the code it was written against; nothing is imported for it."""
    try:
        reason = _misfit(seam, read) or _replaced(seam)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        reason = f"cannot be read: {' '.join(str(error).split())}"
    described = seam.why, seam.retired_by, seam.upstream, seam.platform
    return SeamStatus(seam.qualified, seam.target, not reason, reason, *described)


def check_all(records: Iterable[Seam]) -> list[SeamStatus]:
    """Return `check` of each, every file read once."""
    read = functools.cache(vllm_source.installed_source)
    return [check(seam, read) for seam in records]


def _misfit(seam: Seam, read: vllm_source.Reader) -> str:
    found = vllm_source.find(read, seam.module, seam.qualified)
    if found is None:
        return f"not found: {seam.module} has no function {seam.qualified}"
    return "" if found.digest in seam.digests else f"its code has changed (digest {found.digest})"


def _replaced(seam: Seam) -> str:
    """Say who else has put another function there; "" if it is vLLM's own, or the module is not imported yet."""
    module = sys.modules.get(seam.module)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return ""
    try:
        function = _function_of(_locate(module, seam.qualified)[2])
    except AttributeError as error:
        return f"not found: {error}"
    original = inspect.unwrap(getattr(function, _MARK, function))
    owner, name = getattr(original, "__module__", None) or "", getattr(original, "__qualname__", "")
    if owner.partition(".")[0] == seam.module.partition(".")[0] and name == seam.qualified:
        return ""
    return f"has been replaced by {owner}:{name}"


def _locate(module: ModuleType, qualified: str) -> tuple[type | ModuleType, str, object]:
    """Return (class or module, attribute name, the raw attribute) of a seam's target."""
    class_name, _, attribute = qualified.rpartition(".")
    owner = getattr(module, class_name) if class_name else module
    return owner, attribute, inspect.getattr_static(owner, attribute)


def _function_of(raw: object) -> Function:
    """Return the plain function of a method, static method or property."""
    if isinstance(raw, property):
        return raw.fget
    return getattr(raw, "__func__", raw)


def _rewrapped(raw: object, function: Function) -> object:
    """Return `function` as the kind of attribute `raw` is."""
    if isinstance(raw, property):
        return property(function)
    return type(raw)(function) if isinstance(raw, (staticmethod, classmethod)) else function


def install(seam: Seam) -> None:
    """Import the seam's module and wrap its target; a second call changes nothing."""
    _wrap(seam, importlib.import_module(seam.module))


@dataclass(frozen=True)
class _Installation:
    """Wraps a seam's target once its module is imported; never raises into that import."""

    seam: Seam
    otherwise: Callable[[str], None]

    def __call__(self, module: ModuleType) -> None:
        try:
            _wrap(self.seam, module)
        except Exception as error:
            self.otherwise(f"{self.seam.target} cannot be wrapped: {error}")


def install_on_import(seam: Seam, otherwise: Callable[[str], None]) -> None:
    """Wrap the seam's target as soon as its module is imported; a second call changes nothing.

    Args:
        otherwise: called with the reason where that fails; nothing is raised.
    """
    when_imported(seam.module, _Installation(seam, otherwise))


def _wrap(seam: Seam, module: ModuleType) -> None:
    with _INSTALLING:
        owner, attribute, raw = _locate(module, seam.qualified)
        original = _function_of(raw)
        if hasattr(original, _MARK):
            return

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            return seam.instead(original, *args, **kwargs)

        setattr(wrapper, _MARK, original)
        setattr(owner, attribute, _rewrapped(raw, wrapper))


def remove(seam: Seam) -> None:
    """Put the original back (tests only)."""
    owner, attribute, raw = _locate(importlib.import_module(seam.module), seam.qualified)
    original = getattr(_function_of(raw), _MARK, None)
    if original is not None:
        setattr(owner, attribute, _rewrapped(raw, original))


def table(records: Sequence[Seam]) -> str:
    """Return a Markdown table of docs/seams.md, made from the records."""
    lines = ["| place in vLLM | platform | why | what would retire it | upstream |", "|---|---|---|---|---|"]
    lines += [f"| `{s.target}` | {s.platform} | {s.why} | {s.retired_by} | {s.upstream} |" for s in records]
    return "\n".join(lines) + "\n"
