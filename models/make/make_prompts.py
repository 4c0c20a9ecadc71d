"""Cut completion prompts from the held-out sources: what an editor would send, never chosen by how well they draft.

    python models/make/make_prompts.py --tokenizer build/target/tokenizer -o models/prompts/held_out_code.jsonl

A prompt starts at the first line of a file or of a top-level definition and ends inside a function, at the end of its
docstring or of a statement about half-way through its body. One prompt per file; files and cuts are drawn by a hash of
their names; the sources take turns, so that the first eight prompts come from eight of them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
from pack_text import HELD_OUT, is_held_out, source_files  # noqa: E402

MIN_TOKENS, MAX_TOKENS = 60, 160
# A function with less after the cut leaves little to complete.
MIN_LINES_LEFT = 4
#: From a file's lines, (start, end) of those that may be a prompt, end exclusive.
Pieces = Callable[[list[str]], Iterator[tuple[int, int]]]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def make_prompts(count: int, num_tokens: Callable[[str], int], pieces: Pieces) -> list[dict[str, str]]:
    """Return `count` prompts with their sources, in a fixed order.

    Args:
        pieces: what of a file's lines may be a prompt.
    Raises:
        ValueError: the held-out sources hold fewer.
    """
    queues: dict[str, list[tuple[str, Path]]] = {source: [] for source in sorted(HELD_OUT, key=order)}
    for name, path in sorted(source_files(), key=lambda file: order(file[0])):
        if is_held_out(name):
            parts = name.split("/")
            queues[parts[0] if parts[0] in HELD_OUT else "/".join(parts[:2])].append((name, path))
    prompts: list[dict[str, str]] = []
    while len(prompts) < count and any(queues.values()):
        for queue in queues.values():
            prompt = next_prompt(queue, num_tokens, pieces)
            if prompt is not None and len(prompts) < count:
                prompts.append(prompt)
    if len(prompts) < count:
        raise ValueError(f"count={count} is too many; allowed: at most {len(prompts)} from the sources installed here")
    return prompts


def order(name: str) -> str:
    """Return a sort key that is arbitrary and always the same."""
    return hashlib.sha256(name.encode()).hexdigest()


def next_prompt(
    queue: list[tuple[str, Path]], num_tokens: Callable[[str], int], pieces: Pieces
) -> dict[str, str] | None:
    """Take files from the queue until one yields a prompt."""
    while queue:
        name, path = queue.pop(0)
        lines = path.read_text(encoding="utf-8").splitlines()
        found = {}
        for start, end in pieces(lines):
            text = "\n".join(lines[start:end])
            if MIN_TOKENS <= num_tokens(text) <= MAX_TOKENS:
                found[f"{name}:{start + 1}-{end}"] = text
        if found:
            source = min(found, key=order)
            return {"prompt": found[source], "source": source}
    return None


def cuts(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) line ranges, end exclusive: every start and every natural place to stop after it."""
    top_level = ast.parse("\n".join(lines)).body
    definitions = [node for node in top_level if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    starts = [0, *map(start_of, definitions)]
    for top in definitions:
        for node in ast.walk(top):
            if isinstance(node, FUNCTIONS):
                for end in places_to_stop(node):
                    yield from ((start, end) for start in starts if start < end)


def start_of(definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the index of its first line, that of a decorator if it has one."""
    return min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)]) - 1


def places_to_stop(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the last line of the docstring and of the statement half-way through the body."""
    if function.end_lineno - function.body[0].end_lineno >= MIN_LINES_LEFT and ast.get_docstring(function):
        yield function.body[0].end_lineno
    middle = (function.body[0].lineno + function.end_lineno) // 2
    ends = [n.end_lineno for n in ast.walk(function) if isinstance(n, ast.stmt) and n.end_lineno <= middle]
    if ends and function.end_lineno - max(ends) >= MIN_LINES_LEFT:
        yield max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=Path("build/target/tokenizer"))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("-o", "--output", type=Path, default=Path("models/prompts/held_out_code.jsonl"))
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer)
    prompts = make_prompts(args.count, lambda text: len(tokenizer(text)["input_ids"]), cuts)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(f"wrote {len(prompts)} prompts to {args.output}")


if __name__ == "__main__":
    main()
