"""Conversations: read from a JSONL line, rendered by a chat template, and which of their tokens the assistant wrote.

The ids are those of the rendered text without what the tokenizer itself would add, as servers tokenise a chat: a
template that wants a first token writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: A role and what was said, as templates take them: {"role": ..., "content": ...}.
Message = dict[str, str]

FIELDS = ("messages", "conversations")
ROLES = ("system", "user", "assistant")
# ShareGPT's names of who speaks.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
ALLOWED = (
    'allowed: "messages": [{"role": "user", "content": "..."}, ...] with roles system, user, assistant, or '
    '"conversations": [{"from": "human", "value": "..."}, ...] with human, gpt, system'
)
# How a template marks what the assistant says, where it does.
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
# A user turn that no template knows.
MARKER = "USERTURN"
# Halves of characters, which JSON can hold and UTF-8 cannot.
SURROGATES = re.compile("[\ud800-\udfff]")


class Conversation(NamedTuple):
    """A conversation as its target reads it.

    Attributes:
        ids: [num_tokens] int64.
        answers: [num_tokens] bool, tokens the assistant wrote, its end marker included.
    """

    ids: np.ndarray
    answers: np.ndarray


def is_conversation(row: Any) -> bool:
    """Return whether what a JSONL line holds is meant as a conversation."""
    return isinstance(row, dict) and any(row.get(field) is not None for field in FIELDS)


def parse(row: Any, place: str) -> list[Message]:
    """Return the messages of what a JSONL line holds; at most the system speaks before the user does.

    Args:
        row: {"messages": [{"role", "content"}, ...]}, where content is a string or a list of parts {"type": "text",
            "text"}, or {"conversations": [{"from", "value"}, ...]}.
        place: file and line, for the error.
    Raises:
        ValueError: it is neither; one line.
    """
    field = next((name for name in FIELDS if isinstance(row, dict) and row.get(name) is not None), None)
    said = row[field] if field else None
    if not isinstance(said, list) or not said:
        raise ValueError(f"{place}: {field or 'messages'} is no list of messages; {ALLOWED}")
    messages = [_message(entry, field, f"{place}: message {number}") for number, entry in enumerate(said, 1)]
    speaks = [message["role"] for message in messages]
    if (first := next((role for role in speaks if role != "system"), None)) != "user":
        told = "no user speaks" if first is None else "the assistant speaks before any user"
        raise ValueError(f"{place}: {told}; allowed: conversations that a user begins, after system messages if any")
    return messages


def _message(entry: Any, field: str, place: str) -> Message:
    who, what = ("role", "content") if field == "messages" else ("from", "value")
    if not isinstance(entry, dict) or who not in entry or what not in entry:
        raise ValueError(f"{place} has no {who} and {what}; {ALLOWED}")
    said_by = entry[who] if isinstance(entry[who], str) else type(entry[who]).__name__
    role = said_by if field == "messages" else SPEAKERS.get(said_by.lower())
    if role not in ROLES:
        raise ValueError(f"{place}: {who}={said_by!r:.40} is not known; {ALLOWED}")
    content = entry[what]
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str) or not content.isascii() and SURROGATES.search(content):
        raise ValueError(f"{place}: {what} is no text; allowed: a string, or a list of {{'type': 'text', 'text': ...}}")
    return {"role": role, "content": content}


def read_chat_template(path: str | Path | None) -> str | None:
    """Return the content of `--chat-template FILE`, None where none is given.

    Raises:
        ValueError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(
            f"chat_template: {path}: cannot be read ({reason}); allowed: a file of a Jinja template"
        ) from None


def has_template(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Return whether conversations can be rendered."""
    return bool(chat_template or getattr(tokenizer, "chat_template", None))


def prompt_ids(tokenizer: Any, messages: Sequence[Message], chat_template: str | None = None) -> list[int]:
    """Return the tokens of a conversation up to where the assistant answers its last user turn.

    Args:
        messages: what the assistant says after the last user turn is left out.
        chat_template: instead of the tokenizer's own.
    Raises:
        ValueError: no user speaks, there is no template, or it refuses these messages; one line.
    """
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError("no user speaks; allowed: messages with a user turn")
    text = render(tokenizer, messages[: last + 1], chat_template, answer=True)
    return single_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def conversation(tokenizer: Any, messages: Sequence[Message], chat_template: str | None = None) -> Conversation:
    """Return a conversation's tokens and which of them the assistant wrote.

    Raises:
        ValueError: there is no template, it refuses these messages, or it does not say where an answer is: one that
            rewrites earlier turns when another follows; one line.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say which text a token is of; allowed: fast tokenizers")
    text = render(tokenizer, messages, chat_template)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, spans = encoded["input_ids"], np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    answers = np.zeros(len(ids), dtype=bool)
    for first, end in _answers(tokenizer, messages, chat_template, text):
        answers |= (spans[:, 0] >= first) & (spans[:, 0] < end) & (spans[:, 1] > spans[:, 0])
    doubled = len(ids) - len(single_bos(tokenizer, ids))
    return Conversation(np.array(ids, dtype=np.int64)[doubled:], answers[doubled:])


def continuation_ids(tokenizer: Any, messages: Sequence[Message], chat_template: str | None = None) -> list[int]:
    """Return what the template puts between the end of the last answer and where the assistant answers the next turn.

    Args:
        messages: with an answer, and after it what is to be answered.
    Raises:
        ValueError: see `conversation`.
    """
    text = render(tokenizer, messages, chat_template, answer=True)
    _, end = _answers(tokenizer, messages, chat_template, text)[-1]
    return tokenizer(text[end:], add_special_tokens=False)["input_ids"]


def user_prefix(tokenizer: Any, chat_template: str | None = None) -> tuple[list[int], list[int]]:
    """Return the tokens that a user's first turn follows, and the tokens that end it.

    Raises:
        ValueError: the template puts nothing before it.
    """
    before, _, after = render(tokenizer, [{"role": "user", "content": MARKER}], chat_template).partition(MARKER)
    # What the user says begins with a space itself where a template puts one.
    prefix = single_bos(tokenizer, tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])
    if not prefix:
        raise ValueError("the chat template puts nothing before what a user says, so the target cannot ask itself")
    end = after[: _after_marker(after, 0, _end_markers(tokenizer))].strip()
    return prefix, tokenizer(end, add_special_tokens=False)["input_ids"][-1:] if end else []


def single_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Return the ids without a first token that only repeats the tokenizer's beginning of a text."""
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def render(tokenizer: Any, messages: Sequence[Message], chat_template: str | None = None, answer: bool = False) -> str:
    """Return the text of messages.

    Args:
        answer: whether it goes on to where the assistant begins to speak.
    Raises:
        ValueError: there is no template, or it refuses these messages; one line.
    """
    if not has_template(tokenizer, chat_template):
        raise ValueError(
            "messages need a chat template, which the target's tokenizer has not; give one by --chat-template FILE"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=chat_template, tokenize=False, add_generation_prompt=answer
        )
    except Exception as error:  # whatever a template raises, Jinja's errors and its own, is the user's to read
        raise ValueError(f"the chat template refuses these messages ({' '.join(str(error).split()):.160})") from None


def _answers(
    tokenizer: Any, messages: Sequence[Message], chat_template: str | None, text: str
) -> list[tuple[int, int]]:
    """Return (first character, end) of each answer in the rendered text, its end marker included."""
    ends = _end_markers(tokenizer)
    if GENERATION.search(chat_template or tokenizer.get_chat_template()):
        return [(first, _after_marker(text, end, ends)) for first, end in _marked(tokenizer, messages, chat_template)]
    found: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], chat_template, answer=True)
        where = _find(text, message["content"], len(before)) if text.startswith(before) else None
        if where is None or found and len(before) < found[-1][1]:
            raise ValueError(
                f"the chat template changes message {index + 1} or what is before it when others follow, so that "
                "answers cannot be told from the rest; give another by --chat-template FILE, with {% generation %}, say"
            )
        found.append((len(before), _after_marker(text, where, ends)))
    return found


def _find(text: str, content: str, start: int) -> int | None:
    """Return where what the assistant said ends; templates may put something before it, or strip it."""
    for said in (content, content.strip()):
        if (where := text.find(said, start)) >= 0:
            return where + len(said)
    return None


def _marked(tokenizer: Any, messages: Sequence[Message], chat_template: str | None) -> list[tuple[int, int]]:
    """Return (first character, end) of what the template itself marks as generated."""
    encoded = tokenizer.apply_chat_template(
        list(messages),
        chat_template=chat_template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    mask = np.array([0, *encoded["assistant_masks"], 0])
    edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2)
    spans = encoded["offset_mapping"]
    return [(spans[first][0], spans[end - 1][1]) for first, end in edges.tolist()]


def _end_markers(tokenizer: Any) -> list[str]:
    """Return the texts of tokens that may end an answer, the longest first: what begins a text does not."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    begins = {tokenizer.bos_token} - {tokenizer.eos_token}
    return sorted(special - begins, key=len, reverse=True)


def _after_marker(text: str, end: int, markers: list[str]) -> int:
    """Return where an answer ends: after a marker that follows what was said, with spaces between at most."""
    said = len(text) - len(text[end:].lstrip())
    marker = next((marker for marker in markers if text.startswith(marker, said)), None)
    return end if marker is None else said + len(marker)
