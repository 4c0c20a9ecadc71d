"""Prompt files: JSONL, a text to complete or a conversation to answer per line."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

from vllm_eesd.bench import human_eval
from vllm_eesd.conversations import Message, is_conversation, parse
from vllm_eesd.embedded import shipped

#: Prompt files of models/prompts, made by models/make (make_prompts.py, make_edits.py, make_workloads.py).
COMPLETIONS = ("held_out_code", "repetitive_code", "random_tokens", "multi_turn", "long_context", "edits", "mixed")
#: Conversations, for models with a chat template: those of models/prompts (make_chat.py, make_long_documents.py), and
#: the installed package human-eval's problems.
CHATS = ("chat", "long_documents", human_eval.NAME)
WORKLOADS = COMPLETIONS + CHATS
ALLOWED = 'a JSON object with a non-empty string "prompt", or with a conversation in "messages" or "conversations"'


@dataclass(frozen=True)
class Prompt:
    """What a model goes on with.

    Attributes:
        text: to complete; of a conversation what the user said last.
        source: where it is from, if the file says so.
        messages: of a conversation, up to the user turn that is answered.
        is_turn: whether a text is a user's turn where the target has a chat template.
        place: file and line.
    """

    text: str
    source: str = ""
    messages: tuple[Message, ...] | None = None
    is_turn: bool = False
    place: str = "prompt"


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return the prompts of a JSONL file, in order; blank lines are skipped.

    Raises:
        ValueError: one line with file:line and what is allowed there.
    """
    path = Path(path)
    if path.name == human_eval.FILE:
        return [Prompt(text, name, messages) for text, name, messages in human_eval.problems(path)]
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


def chosen_file(args: argparse.Namespace) -> str:
    """Return the file that `--prompts` or `--workload` names.

    Raises:
        ValueError: no such workload, or it is not here.
    """
    return args.prompts if args.workload is None else workload_file(args.workload)


def workload_file(name: str) -> str:
    """Return the path of a workload's prompts, as seen from the current directory.

    Raises:
        ValueError: no such workload, or it is not here.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload={name!r} is not known; allowed: {', '.join(WORKLOADS)}")
    if name == human_eval.NAME:
        return str(human_eval.installed_file())
    return os.path.relpath(shipped(f"prompts/{name}.jsonl", "prompts"))


def _prompt(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno}); allowed: {ALLOWED}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deeply
        raise ValueError(f"{place}: not JSON ({error}); allowed: {ALLOWED}") from None
    if is_conversation(entry):
        messages = parse(entry, place)
        last = max(number for number, message in enumerate(messages) if message["role"] == "user")
        asked = tuple(messages[: last + 1])
        return Prompt(asked[-1]["content"], str(entry.get("source", entry.get("category", ""))), asked, place=place)
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{place}: {_shown(entry)} has no usable prompt; allowed: {ALLOWED}")
    return Prompt(prompt, str(entry.get("source", "")), place=place)


def _shown(entry: object) -> str:
    try:
        text = json.dumps(entry)
    except RecursionError:
        return "a value nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
