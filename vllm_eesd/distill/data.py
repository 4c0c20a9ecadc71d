"""Token windows to distill on; a batch is a function of (seed, step), which is what makes a resumed run exact."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_eesd.conversations import FIELDS, Conversation, Message, conversation, is_conversation, parse

# Fields of a JSONL line that hold text, in the order they are looked for.
TEXT_FIELDS = ("text", "content", "code", "prompt")
# Share of each file kept for measuring when no held-out file is given.
HELD_OUT_SHARE = 0.05
# Half of every batch is the target's own text: that is what the head meets when it drafts; the rest keeps prompts good.
SELF_SHARE = 0.5
# A text file is tokenised in pieces of about this size, split at line ends, so that its size does not matter.
PIECE_CHARS = 1 << 20
# Token ids looked at at one time: 4 MiB of uint32.
CHUNK_TOKENS = 1 << 20

# Token ids of one source, [num_tokens] uint16 or uint32, in memory or mapped from a file.
Tokens = np.ndarray


@dataclass(frozen=True)
class TokenData:
    """What a run trains on.

    Attributes:
        text: per source; windows start anywhere.
        generated: [num_windows, seq_len] text of the target's own, or None; windows are taken whole.
        conversations: whole documents, or None.
    """

    text: list[Tokens]
    generated: np.ndarray | None = None
    conversations: list[Conversation] | None = None

    @cached_property
    def sources(self) -> list[Tokens]:
        """All text, the conversations one after the other as one source of it."""
        return self.text + as_source(self.conversations or [])

    def batch_at(self, step: int, batch: int, seq_len: int, seed: int) -> torch.Tensor:
        """Return [batch, seq_len] int64, depending on the arguments only."""
        rng = np.random.default_rng((seed, step))
        share = 0 if self.generated is None else SELF_SHARE if self.sources else 1
        num_generated = round(batch * share)
        rows = random_windows(self.sources, batch - num_generated, seq_len, rng) if self.sources else []
        if num_generated:
            rows += [self.generated[i] for i in rng.integers(len(self.generated), size=num_generated)]
        return stacked(rows)


@dataclass(frozen=True)
class Corpus:
    """What files hold.

    Attributes:
        text: token ids per source.
        conversations: in the order of the files.
        messages: of each conversation.
    """

    text: list[Tokens]
    conversations: list[Conversation] = field(default_factory=list)
    messages: list[list[Message]] = field(default_factory=list)

    @property
    def sources(self) -> list[Tokens]:
        """All of it as text."""
        return self.text + as_source(self.conversations)

    def of(self, chosen: Iterable[int]) -> Corpus:
        """Return the conversations of these numbers, without the text."""
        chosen = list(chosen)
        return Corpus([], [self.conversations[i] for i in chosen], [self.messages[i] for i in chosen])


def as_source(conversations: list[Conversation]) -> list[Tokens]:
    """Return conversations as one source of text, no source where there are none."""
    ids = [said.ids for said in conversations]
    return [np.concatenate(ids).astype(np.uint32)] if ids else []


def stacked(rows: list[np.ndarray]) -> torch.Tensor:
    """Return windows of one length as one tensor, [num_windows, length] int64."""
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def random_windows(sources: list[Tokens], count: int, length: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return `count` windows; each place where one can start is as likely as any other."""
    num_starts = np.array([len(tokens) - length + 1 for tokens in sources])
    rows = []
    for source in rng.choice(len(sources), count, p=num_starts / num_starts.sum()):
        start = rng.integers(num_starts[source])
        rows.append(sources[source][start : start + length])
    return rows


def spaced_windows(sources: list[Tokens], count: int, seq_len: int) -> torch.Tensor:
    """Return [count, seq_len] int64, evenly spaced over all sources."""
    windows, lengths = [], np.array([len(tokens) for tokens in sources])
    shares = np.maximum(1, np.round(count * lengths / lengths.sum())).astype(int)
    for tokens, share in zip(sources, shares, strict=True):
        starts = np.linspace(0, len(tokens) - seq_len, share).astype(int)
        windows += [tokens[start : start + seq_len] for start in starts]
    kept = np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)
    return stacked([windows[i] for i in kept])


def read_sources(
    paths: list[Path], tokenizer: Any, vocab_size: int, at_least: int = 1, chat_template: str | None = None
) -> list[Tokens]:
    """Return all that files hold as sources of text, see `read_corpus`."""
    return read_corpus(paths, tokenizer, vocab_size, at_least, chat_template).sources


def read_corpus(
    paths: list[Path], tokenizer: Any, vocab_size: int, at_least: int = 1, chat_template: str | None = None
) -> Corpus:
    """Return what files hold: the tokens of each file of token ids, those of all texts, of which short ones are joined.

    A text ends with the tokenizer's end-of-text token, also where another one follows in the same source.

    Args:
        paths: `.bin` (token ids, uint16 where the vocabulary fits, else uint32), `.jsonl` (texts and conversations), or
            any text file.
        tokenizer: of the target; may be None where all files are `.bin`.
        at_least: tokens that texts are joined up to.
        chat_template: that renders conversations; None is the tokenizer's own.
    Raises:
        ValueError: a file is missing, empty, unreadable, or holds ids outside the target's vocabulary.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"data: {path}: no such file; give text, .py, .jsonl or .bin files")
        if path.stat().st_size == 0:
            raise ValueError(f"data: {path}: empty file")
    sources = [_token_ids(path, vocab_size) for path in paths if path.suffix == ".bin"]
    texts = [path for path in paths if path.suffix != ".bin"]
    if not texts:
        return Corpus(sources)
    read = _tokenised(texts, tokenizer, vocab_size, at_least, chat_template)
    return Corpus(sources + read.text, read.conversations, read.messages)


def tokens_to_split(seq_len: int) -> int:
    """Return how many tokens a source needs for `split_held_out` to keep no more than HELD_OUT_SHARE of it."""
    return round(seq_len / HELD_OUT_SHARE)


def split_held_out(sources: list[Tokens], seq_len: int) -> tuple[list[Tokens], list[Tokens]]:
    """Return (training, held-out) tokens: the end of each source is held out.

    Raises:
        ValueError: a source is too short for a training and a held-out window.
    """
    long_enough(sources, 2 * seq_len, "data", "2 x seq_len")
    kept = [max(seq_len, int(len(tokens) * HELD_OUT_SHARE)) for tokens in sources]
    train = [tokens[:-held_out] for tokens, held_out in zip(sources, kept, strict=True)]
    return train, [tokens[-held_out:] for tokens, held_out in zip(sources, kept, strict=True)]


def split_conversations(corpus: Corpus, seq_len: int) -> tuple[Corpus, Corpus]:
    """Return (training, held-out) conversations, HELD_OUT_SHARE of them held out, evenly spaced, a window at least.

    Raises:
        ValueError: there are too few for a training and a held-out window.
    """
    lengths = np.array([len(said.ids) for said in corpus.conversations])
    for count in range(max(1, round(HELD_OUT_SHARE * len(lengths))), len(lengths)):
        held_out = np.linspace(0, len(lengths) - 1, count + 2)[1:-1].round().astype(int)
        if lengths[held_out].sum() >= seq_len:
            break
    else:
        held_out = np.array([], dtype=int)
    training = np.setdiff1d(np.arange(len(lengths)), held_out)
    if not len(held_out) or lengths[training].sum() < seq_len:
        raise ValueError(
            f"data: all conversations together: {lengths.sum()} tokens in {len(lengths)}, too few for a training and a "
            f"held-out window of {seq_len} (seq_len)"
        )
    return corpus.of(training), corpus.of(held_out)


def long_enough(sources: list[Tokens], needed: int, field: str, meaning: str = "seq_len") -> list[Tokens]:
    """Return the sources, each of which holds `needed` tokens.

    Args:
        meaning: what `needed` is.
    Raises:
        ValueError: one does not.
    """
    for tokens in sources:
        if len(tokens) < needed:
            name = getattr(tokens, "filename", None) or "all texts together"
            raise ValueError(f"{field}: {name}: {len(tokens)} tokens, at least {needed} ({meaning}) are needed")
    return sources


def token_dtype(vocab_size: int) -> np.dtype:
    """Return what token ids are kept as."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _token_ids(path: Path, vocab_size: int) -> Tokens:
    """Return a file of token ids, mapped; all of them are looked at once, by reading, to see that they are in range."""
    dtype, size = token_dtype(vocab_size), path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"data: {path}: {size} bytes are no whole number of {dtype.name} token ids")
    try:
        with path.open("rb") as file:
            while len(ids := np.fromfile(file, dtype, CHUNK_TOKENS)):
                _check_range(path, int(ids.max()), vocab_size)
            return np.memmap(file, dtype, mode="r")
    except OSError as error:
        raise ValueError(f"data: {path}: cannot be read ({error.strerror})") from None


def _check_range(path: Path, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise ValueError(f"data: {path}: token id {largest}, the target's vocabulary has {vocab_size}")


def _tokenised(paths: list[Path], tokenizer: Any, vocab_size: int, at_least: int, chat_template: str | None) -> Corpus:
    """Return the ids of all texts, joined as `joined` does, and all conversations."""
    end_of_text = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    conversations: list[Conversation] = []
    messages: list[list[Message]] = []

    def token_ids(path: Path) -> Iterator[list[int]]:
        for text, place in _texts(path):
            if isinstance(text, str):
                yield tokenizer(text, add_special_tokens=False)["input_ids"] + (end_of_text if place else [])
                continue
            try:
                said = conversation(tokenizer, text, chat_template)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            _check_range(path, int(said.ids.max(initial=0)), vocab_size)
            conversations.append(said)
            messages.append(text)

    text = joined([(path, token_ids(path)) for path in paths], vocab_size, at_least)
    if conversations:
        text = [tokens for tokens in text if len(tokens)]
    return Corpus(text, conversations, messages)


def joined(sources: Iterable[tuple[Path, Iterable[list[int]]]], vocab_size: int, at_least: int) -> list[Tokens]:
    """Return the ids of all sources in the order they came, joined with those after them up to `at_least` tokens.

    They are in one temporary file, mapped, which vanishes with the last part of it; one piece is in memory at a time.
    What is left at the end belongs to the last part, so only a single one can be shorter.

    Raises:
        ValueError: an id is out of range, or there is no room for them.
    """
    dtype, ends = token_dtype(vocab_size), []
    try:
        with tempfile.TemporaryFile(prefix="eesd-tokens-") as file:
            for path, pieces in sources:
                for ids in pieces:
                    _check_range(path, max(ids, default=0), vocab_size)
                    file.write(np.array(ids, dtype).tobytes())
                ends.append(file.tell() // dtype.itemsize)
            file.flush()
            tokens = np.memmap(file, dtype, mode="r") if ends[-1] else np.empty(0, dtype)
    except OSError as error:
        raise ValueError(
            f"data: {tempfile.gettempdir()}: no room for the token ids ({error.strerror}); set TMPDIR"
        ) from None
    starts = [0]
    for end in ends:
        if end - starts[-1] >= at_least:
            starts.append(end)
    return np.split(tokens, starts[1:-1])


def _pieces(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a file of text, about PIECE_CHARS at a time."""
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(PIECE_CHARS):
                if any("\0" in line for line in lines):
                    raise ValueError(f"data: {path}: not text (it holds NUL characters, as UTF-16 and binaries do)")
                yield lines
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path}: not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"data: {path}: cannot be read ({error.strerror})") from None


def _texts(path: Path) -> Iterator[tuple[str | list[Message], str]]:
    """Yield (some text of a file, or the messages of a conversation; where it is if a text ends there, else "")."""
    if path.suffix == ".jsonl":
        yield from _jsonl_texts(path)
        return
    for lines in _pieces(path):
        yield "".join(lines), ""
    yield "", str(path)


def _jsonl_texts(path: Path) -> Iterator[tuple[str | list[Message], str]]:
    for number, line in enumerate(itertools.chain.from_iterable(_pieces(path)), start=1):
        if not line.strip():
            continue
        place = f"data: {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: also a number of too many digits
            raise ValueError(f"{place}: not JSON") from None
        if is_conversation(row):
            yield parse(row, place), place
            continue
        fields = row if isinstance(row, dict) else {}
        texts = [fields[name] for name in TEXT_FIELDS if isinstance(fields.get(name), str)]
        if not texts:
            raise ValueError(
                f"{place}: no text; one of {', '.join(TEXT_FIELDS)} must hold a string, or one of {', '.join(FIELDS)} "
                "a conversation"
            )
        yield texts[0], place
