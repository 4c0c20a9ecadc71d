"""The pages: every link, command and file that they name exists, and they stay short."""

import re
from pathlib import Path

import pytest

from vllm_eesd.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
#: What a user or an engineer reads from beginning to end; tables, decisions and model cards are looked things up in.
READ = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "models").glob("*/README.md")),
]
MAX_WORDS = 16_000


def without_code(text):
    """The text without blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """What a link may name after its #, as GitHub makes it of the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """The links of a page that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


def of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_link_leads_somewhere(page):
    assert not list(broken(page))


def test_a_link_that_leads_nowhere_is_seen(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, of two\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading-of-two) [b](gone.md) [c](there.md#no-such) [d](#e) [f](https://g)\n# E\n")
    assert list(broken(page)) == ["gone.md", "there.md#no-such"]


@pytest.mark.parametrize("page", PAGES, ids=of)
def test_every_command_exists(page):
    """`eesd NAME`, in a block of code or between backticks."""
    names = {command.name.split()[0] for command in COMMANDS} | {"--version"}
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL), *re.findall(r"`([^`\n]+)`", text)])
    assert set(re.findall(r"(?:^|[$(] ?)eesd ([a-z][\w-]*)", code, re.MULTILINE)) <= names


@pytest.mark.parametrize("page", [ROOT / "docs" / f"{name}.md" for name in ("design", "extending", "guide")], ids=of)
def test_every_file_that_a_page_names_exists(page):
    """Files of the project between backticks, from its root or from any folder on."""
    files = [
        f"/{path.relative_to(ROOT)}"
        for part in ("vllm_eesd", "kernels", "tests", "benchmarks", ".ci")
        for path in (ROOT / part).rglob("*")
    ]
    named = set(re.findall(r"`(\.?\w+(?:/[\w.]+)+)(?:[:`\[ ])", page.read_text(encoding="utf-8")))
    named = {name for name in named if "." in name.rpartition("/")[2] and not name.startswith("models/")}
    assert named and not [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)]


def test_the_pages_are_short():
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in READ) <= MAX_WORDS
