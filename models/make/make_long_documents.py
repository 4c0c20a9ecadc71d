"""Write models/prompts/long_documents.jsonl: long texts, each with the request to summarise it or to edit a passage.

    python models/make/make_long_documents.py --tokenizer "$(eesd model smollm2)"

Half of the documents are pages of this repository as they were at one commit (Apache-2.0), half the documentation of
modules of Python's standard library (PSF-2.0), as each line says. A document is cut at a paragraph's end, at 2,000 to
6,000 tokens. Edits ask for a passage of it again, changed: most of the answer stands in the document.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "models" / "prompts" / "long_documents.jsonl"
#: The commit whose pages were used.
COMMIT = "d89f923"
PAGES = ("LICENSE", "docs/seams.md", "docs/distill.md", "docs/policies.md", "docs/design.md", "docs/kernels.md")
MODULES = ("statistics", "difflib", "random", "optparse", "typing", "doctest")
#: What documents are cut to in turn, tokens, the request not counted.
LENGTHS = (2000, 3500, 5500)
#: Characters of a passage that is to be edited.
PASSAGE = (200, 900)
SUMMARIES = (
    "Summarise the document above in five sentences.",
    "What are the three most important points of the document above? Explain each in two sentences.",
)
EDITS = (
    "Copy the following passage of the document, and write every number in it as a word. Change nothing else.",
    "Rewrite the following passage of the document in plainer words, and keep every name in it as it is.",
)


def page(name: str) -> tuple[str, str]:
    """Return a page of the repository, as it was at `COMMIT`, and where it is from."""
    command = ["git", "-C", str(ROOT), "show", f"{COMMIT}:{name}"]
    text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return text, f"{name} of vllm-eesd, Apache-2.0"


def module(name: str) -> tuple[str, str]:
    """Return the documentation of a module, its classes, their methods and its functions, and where it is from."""
    found = importlib.import_module(name)
    paragraphs = [f"{name}\n\n{inspect.getdoc(found)}"]
    for title in found.__all__:
        member = getattr(found, title)
        methods = vars(member).items() if inspect.isclass(member) else ()
        named = [(title, member), *((f"{title}.{at}", part) for at, part in methods if not at.startswith("_"))]
        paragraphs += [f"{at}\n\n{inspect.getdoc(part)}" for at, part in named if callable(part) and part.__doc__]
    return "\n\n".join(paragraphs), f"documentation of Python's module {name}, PSF-2.0"


def cut(text: str, length: int, num_tokens: Callable[[str], int]) -> str:
    """Return as many whole paragraphs from the start as fit in so many tokens.

    Raises:
        ValueError: the text is far shorter than that.
    """
    kept: list[str] = []
    total = 0
    for paragraph in text.split("\n\n"):
        total += num_tokens(paragraph + "\n\n")
        if total > length:
            return "\n\n".join(kept)
        kept.append(paragraph)
    if total < 0.8 * length:
        raise ValueError(f"a document has {total} tokens, at least {0.8 * length:.0f} are needed")
    return "\n\n".join(kept)


def passage_of(document: str) -> str:
    """Return the paragraph of a usable size that is nearest to the middle.

    Raises:
        ValueError: there is none.
    """
    paragraphs, place, usable = document.split("\n\n"), 0, []
    for paragraph in paragraphs:
        if PASSAGE[0] <= len(paragraph) <= PASSAGE[1] and "|---" not in paragraph:
            usable.append((abs(place - len(document) / 2), paragraph))
        place += len(paragraph) + 2
    if not usable:
        raise ValueError(f"no paragraph of {PASSAGE[0]} to {PASSAGE[1]} characters")
    return min(usable)[1].strip("\n")


def conversation(number: int, text: str, source: str, num_tokens: Callable[[str], int]) -> dict[str, object]:
    """Return a line of the file; even ones are to be summarised, odd ones edited."""
    document = cut(text, LENGTHS[number // 2 % len(LENGTHS)], num_tokens)
    if number % 2 == 0:
        category, request = "summary", SUMMARIES[number // 2 % 2]
    else:
        category, request = "edit", f"{EDITS[number // 2 % 2]}\n\n{passage_of(document)}"
    content = f"{document}\n\n---\n\n{request}"
    return {"messages": [{"role": "user", "content": content}], "category": category, "source": source}


def conversations(num_tokens: Callable[[str], int]) -> list[dict[str, object]]:
    """Return all lines: two pages and two modules in turn, of each two one is summarised and one edited."""
    pages, modules = map(page, PAGES), map(module, MODULES)
    documents = [found for kind in (pages, modules) for found in kind]
    half = len(PAGES)
    order = [kind + one for pair in range(0, half, 2) for kind in (0, half) for one in (pair, pair + 1)]
    return [conversation(number, *documents[index], num_tokens) for number, index in enumerate(order)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", required=True, help="of the model whose tokens are counted")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    lines = conversations(lambda text: len(tokenizer(text)["input_ids"]))
    PATH.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
