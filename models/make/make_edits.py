"""Write models/prompts/edits.jsonl: a held-out function, a change asked for, and the head of the changed function.

    python models/make/make_edits.py

What a developer asks an editor's model for: most of the answer stands in the prompt. Functions are drawn as
`make_prompts.py` draws its prompts, never by how well they draft. The kinds of change take turns: another name for the
function, a parameter before the others, another name for what is named most often in it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_prompts import FUNCTIONS, make_prompts, start_of  # noqa: E402
from make_workloads import PROMPTS, frequent_name, renamed  # noqa: E402

PARAMETER = "verbose"


def whole_functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) line ranges, end exclusive, of the functions at the top level."""
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, FUNCTIONS):
            yield start_of(node), node.end_lineno


def change(code: str, kind: int) -> tuple[str, str]:
    """Return what is asked for, in words, and the function after it; `kind` counts on."""
    name = ast.parse(code).body[0].name
    if kind % 3 == 0:
        return f"Call `{name}` `{name}_copy` instead", renamed(code, name)
    if kind % 3 == 1:
        changed = re.sub(rf"(def {name}\()(\s*)(\))?", rf"\1\2{PARAMETER}, \3", code, count=1)
        return f"Add a parameter `{PARAMETER}` before the others", changed.replace(f"{PARAMETER}, )", f"{PARAMETER})")
    often = frequent_name(code)
    return f"Call `{often}` in it `{often}_copy` instead", renamed(code, often)


def edit(piece: dict[str, str], kind: int) -> dict[str, str]:
    """Return the prompt that asks for a change of a function: its code, the request, the changed one up to its body."""
    words, changed = change(piece["prompt"], kind)
    first = ast.parse(changed).body[0].body[0].lineno
    head = "\n".join(changed.split("\n")[: first - 1])
    return {"prompt": f"{piece['prompt']}\n\n\n# {words}.\n{head}", "source": piece["source"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=str(PROMPTS.parent / "eesd-code-10m"))
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    functions = make_prompts(args.count, lambda text: len(tokenizer(text)["input_ids"]), whole_functions)
    path = PROMPTS / "edits.jsonl"
    path.write_text("".join(json.dumps(edit(piece, kind)) + "\n" for kind, piece in enumerate(functions)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
