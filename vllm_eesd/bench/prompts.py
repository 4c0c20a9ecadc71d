"""Prompt files: JSONL, one object with a `prompt` per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ALLOWED = 'a JSON object with a non-empty string "prompt"'


@dataclass(frozen=True)
class Prompt:
    """A text to complete and, if the file says so, where it is from."""

    text: str
    source: str = ""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return the prompts of a JSONL file, in order; blank lines are skipped.

    Raises:
        ValueError: one line with file:line and what is allowed there.
    """
    path = Path(path)
    try:
        # Not splitlines(): JSON strings may hold U+2028 and its kind.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(f"{path}: cannot be read ({reason}); allowed: a JSONL file, each line {ALLOWED}") from None
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompt; allowed: a JSONL file, each line {ALLOWED}")
    return prompts


def _prompt(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno}); allowed: {ALLOWED}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deeply
        raise ValueError(f"{place}: not JSON ({error}); allowed: {ALLOWED}") from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{place}: {_shown(entry)} has no usable prompt; allowed: {ALLOWED}")
    return Prompt(prompt, str(entry.get("source", "")))


def _shown(entry: object) -> str:
    try:
        text = json.dumps(entry)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
