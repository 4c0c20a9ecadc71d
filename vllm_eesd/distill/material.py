"""What a run trains on and is measured on: read from files, or made by the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_eesd.conversations import Conversation, Message, has_template, read_chat_template
from vllm_eesd.distill.answers import user_turns, ways_of
from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.data import (
    Corpus,
    Tokens,
    as_source,
    long_enough,
    split_conversations,
    split_held_out,
    tokens_to_split,
)
from vllm_eesd.distill.generate import Made
from vllm_eesd.distill.regenerate import TURN_TOKENS, Answer, Asking, OwnConversations, OwnTurns
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.text import check_seq_len, read_files, read_traces

# Of the turns that a target asks itself every so many'th is held out.
HELD_OUT_EVERY = 20
# A conversation of a target that does not say how many tokens it takes.
DEFAULT_LONGEST = 4096


@dataclass(frozen=True)
class Material:
    """What files hold, parted.

    Attributes:
        text: to train on.
        held_out: text to measure on.
        talks: conversations to train on, as the files have them.
        held_out_talks: conversations to measure on.
    """

    text: list[Tokens]
    held_out: list[Tokens]
    talks: Corpus = field(default_factory=lambda: Corpus([]))
    held_out_talks: Corpus = field(default_factory=lambda: Corpus([]))

    def described(self) -> str:
        """Return how much there is."""
        parts = []
        if self.text:
            tokens = [sum(map(len, sources)) for sources in (self.text, self.held_out)]
            parts.append(f"text: {tokens[0]} tokens to train on, {tokens[1]} held out")
        if self.talks.messages:
            count, held_out = len(self.talks.messages), len(self.held_out_talks.messages)
            parts.append(f"conversations: {count} to train on, {held_out} held out")
        return "; ".join(parts) or "no text: the target asks itself"


def read_material(config: DistillConfig, target: Target) -> Material:
    """Return what the files of a run hold.

    Raises:
        ValueError: a file cannot be used, or there is too little in them.
    """
    seq_len, template = config.seq_len, read_chat_template(config.chat_template)
    check_seq_len(target.config, seq_len)
    at_least = seq_len if config.held_out else tokens_to_split(seq_len)
    corpus = Corpus([])
    if config.data:
        corpus = read_files(config.model, target.config, config.data, at_least, template)
    text = corpus.text + (read_traces(target.config, config.from_trace, at_least) if config.from_trace else [])
    if config.regenerate and config.data and not corpus.conversations:
        raise ValueError("regenerate is set, but data holds no conversations; allowed: .jsonl with `messages` a line")
    if config.held_out:
        held_out = read_files(config.model, target.config, config.held_out, seq_len, template)
        if held_out.text:
            long_enough(held_out.text, seq_len, "held_out")
        if not config.regenerate:
            long_enough(as_source(corpus.conversations), seq_len, "data")
        return Material(long_enough(text, seq_len, "data"), held_out.text, corpus.of(_all(corpus)), held_out)
    text, held_out_text = split_held_out(text, seq_len)
    if not corpus.conversations:
        return Material(text, held_out_text)
    return Material(text, held_out_text, *split_conversations(corpus, 1 if config.regenerate else seq_len))


def check_answers(config: DistillConfig, conversations: list[Conversation]) -> None:
    """Refuse conversations in which there is nothing to train on.

    Raises:
        ValueError: no answer is in any of them, and only answers are trained on.
    """
    if conversations and config.train_on == "answers" and not any(said.answers.any() for said in conversations):
        raise ValueError("data: no conversation has an answer; with --regenerate the target answers them itself")


def _all(corpus: Corpus) -> range:
    return range(len(corpus.conversations))


class OwnTalks:
    """The conversations of a run that the target makes: answers to the users of the data, or to itself.

    Args:
        config: of the run.
        target: that answers.
        work: directory of `OwnConversations`, and of `OwnTurns`.
        asked: conversations whose users are answered; empty: the target asks itself.
    Raises:
        ValueError: there is nothing to ask, or no template to ask by.
    """

    def __init__(self, config: DistillConfig, target: Target, work: Path, asked: Corpus) -> None:
        tokenizer = AutoTokenizer.from_pretrained(config.model) if _has_tokenizer(config.model) else None
        template = read_chat_template(config.chat_template)
        if tokenizer is None or not has_template(tokenizer, template):
            raise ValueError(
                "data is empty, must name files, directories or data sets unless from_trace does, or the target has a "
                "chat template and can ask itself"
            )
        self._work, self._asked = work, asked.messages
        self.asking = _asking(config, target, tokenizer, template, asked)
        self._turns = None if asked.messages else OwnTurns(work, self.asking, config.turns)

    @property
    def made(self) -> Made:
        """What is there of it."""
        journal = (self._turns or self._own()).journal
        return Made(journal.generator, self._check, self._is_complete, self.asking.longest)

    def make(self, generator: str, answer: Answer) -> None:
        """Make what is missing, see `OwnConversations.make`."""
        if self._turns is not None:
            self._turns.make(generator, answer)
        self._own().make(generator, answer)

    def conversations(self) -> list[Conversation]:
        """Return them, once they are made."""
        return self._own().conversations()

    def held_out(self) -> list[list[Message]]:
        """Return the turns of its own that are not answered for training."""
        return self._turns.messages()[::HELD_OUT_EVERY] if self._turns else []

    def _own(self) -> OwnConversations:
        turns = self._turns.messages() if self._turns else []
        asked = [turn for number, turn in enumerate(turns) if number % HELD_OUT_EVERY] if turns else self._asked
        return OwnConversations(self._work, self.asking, asked)

    def _check(self, generator: str) -> None:
        if self._turns is not None:
            self._turns.journal.check(generator)
        if self._turns is None or self._turns.is_complete:
            self._own().journal.check(generator)

    def _is_complete(self) -> bool:
        return (self._turns is None or self._turns.is_complete) and self._own().is_complete


def _has_tokenizer(model: str) -> bool:
    """Return whether a model comes with a tokenizer; one of the Hub does."""
    return not Path(model).is_dir() or any(Path(model).glob("tokenizer*"))


def _asking(config: DistillConfig, target: Target, tokenizer: Any, template: str | None, asked: Corpus) -> Asking:
    ways = ways_of(config.model, target.config, tokenizer)
    limit = getattr(target.config, "max_position_embeddings", None) or DEFAULT_LONGEST
    needed = max(
        (len(said.ids) + config.answer_tokens * len(user_turns(messages))
         for said, messages in zip(asked.conversations, asked.messages, strict=True)),
        default=2 * TURN_TOKENS + config.answer_tokens,
    )  # fmt: skip
    return Asking(
        tokenizer,
        ways,
        config.temperature or [ways.sampling.temperature],
        config.answer_tokens,
        min(limit, -(-needed // 256) * 256),
        config.seed,
        target.fingerprint,
        template,
    )
