"""Conversations of the target's own: it answers what users said, or what it asks itself where there are no users."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_eesd.conversations import Conversation, Message, continuation_ids, prompt_ids, user_prefix
from vllm_eesd.distill.answers import Ways, user_turns
from vllm_eesd.distill.journal import Journal
from vllm_eesd.progress import telling

#: Conversations of a batch: an engine that runs half as many at a time is busy nearly to its end.
BATCH = 256
# A user turn that is longer has no end.
TURN_TOKENS = 256
# The target has no more to ask where of so many batches in a row each brings less than this share of new turns.
FRUITLESS_BATCHES, FRUITLESS_SHARE = 4, 0.02

# `answers.answer` without its first argument.
Answer = Callable[..., list[list[int]]]


@dataclass(frozen=True)
class Asking:
    """How a target is asked, the same for every batch.

    Attributes:
        tokenizer: the target's.
        ways: how it samples and ends.
        temperatures: of sampled conversations, in turns; every other one is greedy.
        answer_tokens: the longest answer.
        longest: tokens of the longest conversation.
        seed: of all samples.
        weights: the target's fingerprint.
        chat_template: that renders conversations; None is the tokenizer's own.
    """

    tokenizer: Any
    ways: Ways
    temperatures: list[float]
    answer_tokens: int
    longest: int
    seed: int
    weights: float
    chat_template: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return what conversations depend on, for a journal."""
        template = self.chat_template or self.tokenizer.get_chat_template()
        settings = {
            name: getattr(self, name) for name in ("temperatures", "answer_tokens", "longest", "seed", "weights")
        }
        return settings | {"ways": [*self.ways.sampling, *self.ways.ends], "template": digest(template)}


def digest(content: Any) -> str:
    """Return the SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Talk:
    """A conversation while the target answers it.

    Attributes:
        asked: messages of the file, whose answers are left out.
        said: messages so far.
        ids: tokens so far.
        answers: [start, end) of each answer.
        finished: whether the last answer ended by itself.
    """

    asked: list[Message]
    temperature: float
    said: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    finished: bool = True
    read: int = 0

    def prompt(self, asking: Asking) -> list[int] | None:
        """Return the tokens before the next answer, None where there is none to be given."""
        turns = [place for place in user_turns(self.asked) if place >= self.read]
        if not turns or not self.finished:
            return None
        new = [message for message in self.asked[self.read : turns[0] + 1] if message["role"] != "assistant"]
        if not self.ids:
            ids = prompt_ids(asking.tokenizer, new, asking.chat_template)
        else:
            try:
                ids = self.ids + continuation_ids(asking.tokenizer, self.said + new, asking.chat_template)
            except ValueError:
                return None  # the template shows this answer otherwise from here on, a thought left out, say
        if len(ids) >= asking.longest:
            return None
        self.said, self.read = self.said + new, turns[0] + 1
        return ids

    def hear(self, prompt: list[int], new: list[int], asking: Asking) -> None:
        """Take an answer's tokens."""
        self.ids, self.finished = prompt + new, new[-1] in asking.ways.ends
        self.answers.append([len(prompt), len(self.ids)])
        words = new[:-1] if self.finished else new
        content = asking.tokenizer.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.said = [*self.said, {"role": "assistant", "content": content}]

    def row(self) -> dict[str, Any]:
        """Return the line of `regenerated.jsonl`."""
        row = {"messages": self.said, "ids": self.ids, "answers": self.answers}
        return row | {"temperature": self.temperature, "finished": self.finished}


class OwnConversations:
    """Conversations that the target has answered, on disk; every other one is greedy, the rest are sampled.

    Each batch is a function of (seed, its number) and appended when done, so an interrupted run goes on where it
    stopped.

    Args:
        work: directory of `regenerated.jsonl` and `regenerated.json` (how they were made).
        asking: how the target is asked.
        asked: conversations whose user turns are answered.
    """

    def __init__(self, work: Path, asking: Asking, asked: Sequence[list[Message]]) -> None:
        self.asking, self.asked = asking, asked
        self.journal = Journal(work / "regenerated.jsonl", asking.settings() | {"asked": digest(list(asked))})

    @property
    def is_complete(self) -> bool:
        return self.journal.batches * BATCH >= len(self.asked)

    def make(self, generator: str, answer: Answer) -> None:
        """Answer the conversations that are missing.

        Args:
            generator: name of what `answer` runs on.
        Raises:
            ValueError: `work` holds conversations made with other settings, or the template refuses one.
        """
        self.journal.check(generator)
        first = self.journal.batches
        state = Counted(len(self.asked), min(first * BATCH, len(self.asked)))
        with telling(lambda: f"regenerating: {state.line('conversations')}", quiet=self.is_complete):
            for number in range(first, -(-len(self.asked) // BATCH)):
                talks = self._batch(number, answer, state)
                self.journal.append([talk.row() for talk in talks if talk.answers], generator)

    def conversations(self) -> list[Conversation]:
        """Return them, with the tokens as the target wrote them."""
        return [from_row(row) for row in self.journal.rows()]

    def _batch(self, number: int, answer: Answer, state: Counted) -> list[Talk]:
        asking, rows = self.asking, range(number * BATCH, min((number + 1) * BATCH, len(self.asked)))
        sampled = asking.temperatures
        talks = [Talk(self.asked[i], sampled[i // 2 % len(sampled)] if i % 2 else 0.0) for i in rows]
        for turn in range(max(len(talk.asked) for talk in talks)):
            prompts = [(talk, prompt) for talk in talks if (prompt := talk.prompt(asking)) is not None]
            if not prompts:
                break
            state.turn(turn)
            new = answer(
                [prompt for _, prompt in prompts],
                [talk.temperature for talk, _ in prompts],
                [min(asking.answer_tokens, asking.longest - len(prompt)) for _, prompt in prompts],
                asking.ways.ends,
                seed=asking.seed * 1_000_003 + number * 1_009 + turn,
                top_p=asking.ways.sampling.top_p,
                top_k=asking.ways.sampling.top_k,
                tell=state.tell,
            )
            for (talk, prompt), tokens in zip(prompts, new, strict=True):
                talk.hear(prompt, tokens, asking)
                state.tokens += len(tokens)
        state.batch(len(talks))
        return talks


class Counted:
    """How far a batch-wise job is, for its line of progress."""

    def __init__(self, wanted: int, done: int) -> None:
        self.wanted, self.done, self.running, self.tokens, self.turns = wanted, done, 0, 0, 0
        self.began = time.monotonic()

    def tell(self, finished: int) -> None:
        """Take how many of the running batch are finished."""
        self.running = finished

    def turn(self, number: int) -> None:
        """Begin a turn of the running batch."""
        self.running, self.turns = 0, number

    def batch(self, size: int) -> None:
        """End the running batch."""
        self.done, self.running, self.turns = self.done + size, 0, 0

    def line(self, what: str) -> str:
        """Return the line."""
        elapsed = max(1e-3, time.monotonic() - self.began)
        running = f" (and {self.running} of this batch, turn {self.turns + 1})" if self.running else ""
        speed = f", {self.tokens / elapsed:.0f} tokens/s" if self.tokens else ""
        return f"{self.done} of {self.wanted} {what}{running}, {elapsed:.0f} s{speed}"


def from_row(row: dict[str, Any]) -> Conversation:
    """Return the conversation of a line of `regenerated.jsonl`."""
    answers = np.zeros(len(row["ids"]), dtype=bool)
    for start, end in row["answers"]:
        answers[start:end] = True
    return Conversation(np.array(row["ids"], dtype=np.int64), answers)


class OwnTurns:
    """User turns that the target asks itself: it goes on where a user would begin to speak.

    Args:
        work: directory of `turns.jsonl` and `turns.json`.
        asking: how the target is asked; turns are sampled at temperature 1 from all of its distribution.
        count: turns wanted.
    Source: arXiv 2406.08464, section 2.
    """

    def __init__(self, work: Path, asking: Asking, count: int) -> None:
        self.asking, self.count = asking, count
        self.prefix, self._ends = user_prefix(asking.tokenizer, asking.chat_template)
        settings = {name: value for name, value in asking.settings().items() if name not in ("temperatures", "longest")}
        self.journal = Journal(work / "turns.jsonl", settings)

    @property
    def is_complete(self) -> bool:
        return self.journal.has_ended or sum(1 for _ in self.journal.rows()) >= self.count

    def make(self, generator: str, answer: Answer) -> None:
        """Ask for the turns that are missing; see `OwnConversations.make`.

        Raises:
            ValueError: `work` holds turns made with other settings, or the target asks nothing.
        """
        self.journal.check(generator)
        seen = {folded(row["messages"][0]["content"]) for row in self.journal.rows()}
        state, fruitless, number = Counted(self.count, len(seen)), 0, self.journal.batches
        wanted = 0 if self.journal.has_ended else self.count
        with telling(lambda: f"asking itself: {state.line('turns')}", quiet=len(seen) >= wanted):
            while len(seen) < wanted and fruitless < FRUITLESS_BATCHES:
                rows = [[{"role": "user", "content": text}] for text in self._new(answer, number, seen, state)]
                self.journal.append([{"messages": messages} for messages in rows], generator)
                fruitless = fruitless + 1 if len(rows) < FRUITLESS_SHARE * BATCH else 0
                number += 1
                state.batch(len(rows))
        if not seen:
            raise ValueError("data is empty, and the target asks nothing by itself; name files of conversations")
        if len(seen) < self.count:
            self.journal.end()  # a run that goes on shall answer the same turns
            print(f"the target asked itself {len(seen)} different turns and little new in the end", flush=True)

    def messages(self) -> list[list[Message]]:
        """Return the turns, each the only message of a conversation."""
        return [row["messages"] for row in self.journal.rows()][: self.count]

    def _new(self, answer: Answer, number: int, seen: set[str], state: Counted) -> list[str]:
        """Return the turns of a batch that are whole, not empty and not yet `seen`, which then are."""
        ends = sorted({*self.asking.ways.ends, *self._ends})
        limit = max(1, min(TURN_TOKENS, self.asking.longest - len(self.prefix) - 1))
        seed = self.asking.seed * 1_000_003 + number
        said = answer([self.prefix] * BATCH, [1.0] * BATCH, [limit] * BATCH, ends, seed=seed, tell=state.tell)
        state.tokens += sum(map(len, said))
        new = []
        for ids in said:
            text = self.asking.tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False).strip()
            # A token that is no text in the midst of it: the target has left the user's turn.
            plain = self.asking.tokenizer.decode(ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            whole = ids[-1] in ends and text == plain.strip() and any(map(str.isalpha, text))
            if whole and folded(text) not in seen:
                seen.add(folded(text))
                new.append(text)
        return new


def folded(text: str) -> str:
    """Return what two texts have in common that differ in case and spaces only."""
    return " ".join(text.lower().split())
