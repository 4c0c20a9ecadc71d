"""Where vLLM calls what EESD wraps or stands in for: read from source, compared with `call-sites.json`.

A function's own code can stay as it is while whoever calls it begins to unpack one value more, to call it on an
occasion that did not exist, or to pass it something else. So every call is known by the statement it is part of.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

#: Statements that were read, per release: {release: {"module:function: callee": digest, "receiver.attribute": ""}}.
KNOWN = Path(__file__).with_name("call-sites.json")
#: Where vLLM keeps objects of EESD's classes; everything it asks of them counts.
RECEIVERS = ("adaptive_verification", "drafter", "speculator")
#: Made-up requests reach EESD from the first, and what a step's sampling is told is the second.
ALSO = ("warmup_kernels", "ExecuteModelState")
#: Nothing outside these folders calls any of it.
FOLDERS = ("vllm/config/", "vllm/engine/", "vllm/triton_utils/", "vllm/v1/")


def read(sources: Callable[[], Iterable[tuple[str, str]]], wrapped: Iterable[str]) -> dict[str, list[str]]:
    """Return {"module:function: callee": its statements} and {"receiver.attribute": []} of a release.

    Args:
        sources: gives ("vllm/path.py", source) of every file.
        wrapped: names of the functions whose calls count.
    """
    callees = {*wrapped, *ALSO} - {"__init__"}
    sites: dict[str, list[str]] = {}
    for path, source in sources():
        if path.startswith(FOLDERS) and any(name in source for name in (*callees, *RECEIVERS)):
            for key, statement in _sites(path.removesuffix(".py").replace("/", "."), ast.parse(source), callees):
                sites.setdefault(key, []).extend([statement] if statement else [])
    return sites


def _sites(module: str, tree: ast.Module, callees: set[str]) -> Iterator[tuple[str, str]]:
    """Go through a module, the innermost function and statement at hand."""
    pending: list[tuple[ast.AST, str, ast.AST]] = [(tree, "", tree)]
    while pending:
        node, owner, statement = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            owner = f"{owner}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.Attribute) and (receiver := _last_name(node.value)) in RECEIVERS:
            yield f"{receiver}.{node.attr}", ""
        if isinstance(node, ast.Call):
            callee = _last_name(node.func)
            of_ours = isinstance(node.func, ast.Attribute) and _last_name(node.func.value) in RECEIVERS
            if callee in callees or of_ours:
                # A statement with a body is too much to know it by.
                yield f"{module}:{owner}: {callee}", ast.unparse(node if hasattr(statement, "body") else statement)
        pending += [(child, owner, statement) for child in ast.iter_child_nodes(node)]


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def digests_of(sites: dict[str, list[str]]) -> dict[str, str]:
    """Return a digest of each site's statements, "" of an attribute."""
    return {
        key: hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] if lines else ""
        for key, lines in sorted(sites.items())
    }


def complaints(sites: dict[str, list[str]]) -> Iterator[str]:
    """Say which calls are none that were read before, which are gone, and what is newly asked of EESD's objects."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    now = digests_of(sites)
    for key in sorted(set(now).union(*known.values())):
        if now.get(key) in {release.get(key) for release in known.values()}:
            continue
        if key not in now:
            yield f"{key}: no longer there"
        else:
            yield "\n      ".join([f"{key}: not read yet", *sites[key]])


def accept(release: str, sites: dict[str, list[str]]) -> None:
    """Write down that a release's call sites were read."""
    known = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.is_file() else {}
    known[release] = digests_of(sites)
    KNOWN.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
