"""docs/design.md names places in the code; they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
STOPS = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE)))


def names_in(tree):
    """Names that a module's statements, and those of its classes, define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def files_called(path):
    """The files of the project that a page means by this path, which may begin anywhere."""
    files = [*(ROOT / "vllm_eesd").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [file for file in files if f"/{file.relative_to(ROOT)}".endswith(f"/{path}")]


def test_the_page_names_the_way_of_a_token():
    assert len(STOPS) > 15


@pytest.mark.parametrize(("path", "name"), STOPS, ids=lambda part: part)
def test_a_place_that_the_page_names(path, name):
    files = files_called(path)
    assert files, f"no {path}"
    assert any(name.rpartition(".")[2] in names_in(ast.parse(file.read_text())) for file in files)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE))))
def test_a_file_that_the_page_names(path):
    assert files_called(path) or (ROOT / path).exists()
