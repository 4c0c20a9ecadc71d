"""What of vLLM was read for EESD, release by release: `reviewed.json`, and how the same is read from another release.

A function's own code can stay as it is while whoever calls it begins to unpack one value more, to call it on an
occasion that did not exist, or to pass it something else. So beside signatures every call is known, by the statement
it is part of, and everything that is asked of the objects that EESD puts in vLLM's place.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_eesd.host.vllm_source import Reader, find

#: {release: {what: digest of its lines}}; what they are is said where they are read.
FILE = Path(__file__).with_name("reviewed.json")
#: Where vLLM keeps objects of EESD's classes.
RECEIVERS = ("adaptive_verification", "drafter", "speculator")
#: The first calls EESD with made-up requests, the second is what a step's sampling is told.
ALSO = ("warmup_kernels", "ExecuteModelState")
#: Nothing outside these packages calls any of it.
PACKAGES = ("vllm.config.", "vllm.engine.", "vllm.triton_utils.", "vllm.v1.")
#: Before a seam's target: its digest is the one of its record.
SEAM = "seam "

#: What was read of a release: {what: its lines}.
Lines = dict[str, list[str]]


def calls(read: Reader, modules: Iterable[str], wrapped: Iterable[str]) -> Lines:
    """Return the statements of {"module:function calls callee"}, and "receiver.attribute" without any.

    Args:
        modules: every module of the release.
        wrapped: names of the functions whose calls count, beside all that is called of RECEIVERS.
    """
    callees = {*wrapped, *ALSO} - {"__init__"}
    found: Lines = {}
    for module in modules:
        source = read(module) or "" if module.startswith(PACKAGES) else ""
        if any(name in source for name in (*callees, *RECEIVERS)):
            for key, statement in _calls_in(module, ast.parse(source), callees):
                found.setdefault(key, []).extend([statement] if statement else [])
    return found


def _calls_in(module: str, tree: ast.Module, callees: set[str]) -> Iterator[tuple[str, str]]:
    """Go through a module, the innermost function and statement at hand."""
    pending: list[tuple[ast.AST, str, ast.AST]] = [(tree, "", tree)]
    while pending:
        node, owner, statement = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            owner = f"{owner}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.Attribute) and (receiver := last_name(node.value)) in RECEIVERS:
            yield f"{receiver}.{node.attr}", ""
        if isinstance(node, ast.Call):
            callee = last_name(node.func)
            of_ours = isinstance(node.func, ast.Attribute) and last_name(node.func.value) in RECEIVERS
            if callee in callees or of_ours:
                # A statement with a body is too much to know it by.
                yield f"{module}:{owner} calls {callee}", ast.unparse(node if hasattr(statement, "body") else statement)
        pending += [(child, owner, statement) for child in ast.iter_child_nodes(node)]


def last_name(node: ast.AST) -> str:
    """Return what an expression ends in: `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def signatures(read: Reader, functions: Iterable[str]) -> Lines:
    """Return {"module:function": [what it takes and returns]} of those there are."""
    found = {target: find(read, *target.split(":")) for target in functions}
    return {target: [definition.signature] for target, definition in found.items() if definition}


def is_of_vllms_doing(what: str) -> bool:
    """Return whether this is told where it is missing: what has a signature may be what EESD no longer asks for."""
    return " calls " in what or what.partition(".")[0] in RECEIVERS


def digests(lines: Lines) -> dict[str, str]:
    """Return what `reviewed.json` keeps: a digest of the lines, "" where there are none; of a seam what it goes by."""
    return {what: of[0] if what.startswith(SEAM) else _digest(of) for what, of in sorted(lines.items())}


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] if lines else ""


def complaints(lines: Lines) -> Iterator[str]:
    """Say what no reviewed release has like this, with the lines to read; seams speak for themselves."""
    reviewed = json.loads(FILE.read_text(encoding="utf-8"))
    now = digests(lines)
    for what in sorted(set(now).union(*reviewed.values())):
        if what.startswith(SEAM) or now.get(what) in {release.get(what) for release in reviewed.values()}:
            continue
        if what in now:
            yield "\n      ".join([f"{what}: CHANGED, now", *lines[what]])
        elif is_of_vllms_doing(what):
            yield f"{what}: GONE"


def accept(release: str, lines: Lines) -> None:
    """Write down that all of this was read of a release."""
    reviewed = json.loads(FILE.read_text(encoding="utf-8"))
    reviewed[release] = digests(lines)
    FILE.write_text(json.dumps(dict(sorted(reviewed.items())), indent=1) + "\n", encoding="utf-8")
