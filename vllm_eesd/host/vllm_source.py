"""Functions of vLLM as its source files have them: nothing is imported, of the installed release or of a wheel.

A reader returns the source of a module by its dotted name, None where there is no such module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Reader = Callable[[str], "str | None"]
Function = ast.FunctionDef | ast.AsyncFunctionDef

#: How often a name is followed through `from ... import name`.
MAX_IMPORTS = 4


class Definition(NamedTuple):
    """A function and the source lines it takes, decorators included."""

    lines: list[str]
    node: Function

    @property
    def digest(self) -> str:
        """See `digest_of_lines`."""
        return digest_of_lines(self.lines)

    @property
    def arguments(self) -> str:
        """The arguments as the source writes them."""
        return ast.unparse(self.node.args)

    @property
    def signature(self) -> str:
        """The arguments and what is returned, as the source writes them."""
        returns = ast.unparse(self.node.returns) if self.node.returns else ""
        return f"({self.arguments}) -> {returns}".rstrip()


def installed_source(module: str) -> str | None:
    """Return the source of an installed module, found from its top-level package's folder.

    `importlib.util.find_spec` of a submodule would import the packages above it.
    """
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *parts)
        for file in (path / "__init__.py", path.with_suffix(".py")) if parts else (path / "__init__.py",):
            if file.is_file():
                return file.read_text(encoding="utf-8")
    return None


def digest_of_lines(lines: list[str]) -> str:
    """Return 16 hex digits identifying a function's source; indentation, comment lines and line ends do not count."""
    lines = textwrap.dedent("\n".join(lines)).splitlines()
    code = "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def find(read: Reader, module: str, qualified: str) -> Definition | None:
    """Return the function "name" or "Class.name" of a module, followed to where it was imported from.

    It is found by how the text is indented, and only its own lines are parsed: parsing vLLM's large files takes a tenth
    of a second each, in every process.

    Raises:
        SyntaxError: those lines are no function, as where a string in it starts at the left margin.
    """
    for _ in range(MAX_IMPORTS):
        if (source := read(module)) is None:
            return None
        if (lines := _indented_block(source, qualified)) is not None:
            return Definition(lines, ast.parse(textwrap.dedent("\n".join(lines))).body[0])
        if (origin := _imported_from(source, qualified)) is None:
            return None
        module = origin
    return None


def _indented_block(source: str, qualified: str) -> list[str] | None:
    lines = source.splitlines()
    *owners, name = qualified.split(".")
    for depth, owner in enumerate(owners):
        if (first := _head(lines, rf"class {owner}\b", depth)) is None:
            return None
        lines = lines[first : _end(lines, first, depth)]
    depth = len(owners)
    if (first := _head(lines, rf"(?:async )?def {name}\(", depth)) is None:
        return None
    end = _end(lines, first, depth)
    while first and lines[first - 1].startswith("    " * depth + "@"):
        first -= 1
    return lines[first:end]


def _head(lines: list[str], pattern: str, depth: int) -> int | None:
    head = re.compile("    " * depth + pattern)
    return next((index for index, line in enumerate(lines) if head.match(line)), None)


def _end(lines: list[str], first: int, depth: int) -> int:
    """The line after the block whose head is line `first`: one that is indented no further and closes nothing."""
    inside = "    " * depth + " "
    for index in range(first + 1, len(lines)):
        line = lines[index]
        if line.strip() and not line.startswith(inside) and line.lstrip()[0] not in ")]}#":
            return index
    return len(lines)


def _imported_from(source: str, name: str) -> str | None:
    for match in re.finditer(r"^from ([\w.]+) import (?:\(([^)]*)\)|([^(\n]*))$", source, re.MULTILINE):
        if name in re.findall(r"\w+", match[2] or match[3] or ""):
            return match[1]
    return None
