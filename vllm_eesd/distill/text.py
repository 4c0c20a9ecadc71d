"""From files, or from the target itself, to token ids a command can run on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoTokenizer

from vllm_eesd.distill.data import Corpus, Tokens, joined, long_enough, read_corpus, spaced_windows
from vllm_eesd.distill.generate import BATCH, continue_windows
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vocabulary import end_tokens
from vllm_eesd.traces.dense import DenseTrace
from vllm_eesd.traces.read import read

# Files taken from a directory or a data set: text for sure. Token ids, .bin, must be named one by one.
TEXT_SUFFIXES = {".jsonl", ".md", ".py", ".rst", ".txt"}


def check_seq_len(config: Any, seq_len: int) -> None:
    """Refuse windows longer than the target can attend over.

    Raises:
        ValueError: seq_len is above max_position_embeddings or the sliding window.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    for field, longest in (
        ("max_position_embeddings", getattr(config, "max_position_embeddings", None)),
        ("sliding_window", window),
    ):
        if longest is not None and seq_len > longest:
            raise ValueError(f"seq_len is {seq_len}, must be at most {longest}, the target's {field}")


def text_files(name: str | os.PathLike) -> list[Path]:
    """Return the file `name`, or the files of text below a directory or in a data set of the Hub, sorted.

    Hidden files and folders below it (.git, .venv) are left out, as are files that hold nothing.

    Raises:
        ValueError: there are none, or the data set is not available.
    """
    path = Path(name)
    could_be_id = str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))
    if could_be_id and not path.exists() and path.suffix not in TEXT_SUFFIXES | {".bin"}:
        patterns = [f"*{suffix}" for suffix in sorted(TEXT_SUFFIXES)]
        try:
            path = Path(snapshot_download(str(name), repo_type="dataset", allow_patterns=patterns))
        except Exception as error:  # the Hub client's own hierarchy, network errors included
            reason = " ".join(str(error).split())
            raise ValueError(f"data: {name}: neither a file nor an available data set ({reason:.160})") from None
    if not path.is_dir():
        return [path]  # the reader says what is wrong with it
    texts = (file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    visible = (file for file in texts if not any(part.startswith(".") for part in file.relative_to(path).parts))
    files = sorted(file for file in visible if file.stat().st_size > 0)
    if not files:
        raise ValueError(f"data: {name}: no text in it; a file's name must end in {', '.join(sorted(TEXT_SUFFIXES))}")
    return files


def read_text(
    model: str, config: Any, names: Sequence[str | os.PathLike], at_least: int, chat_template: str | None = None
) -> list[Tokens]:
    """Return what the files hold as sources of text, see `read_files`."""
    return read_files(model, config, names, at_least, chat_template).sources


def read_files(
    model: str, config: Any, names: Sequence[str | os.PathLike], at_least: int, chat_template: str | None = None
) -> Corpus:
    """Return what the files hold; the target's tokenizer is loaded only where a file is not token ids already.

    Args:
        names: files, directories or data sets of the Hub.
        at_least: tokens that texts are joined up to, see `read_corpus`.
        chat_template: that renders conversations; None is the tokenizer's own.
    Raises:
        ValueError: a file cannot be used, see `read_corpus`.
    """
    paths = [path for name in names for path in text_files(name)]
    needs_tokenizer = any(path.suffix != ".bin" for path in paths)
    tokenizer = AutoTokenizer.from_pretrained(model) if needs_tokenizer else None
    return read_corpus(paths, tokenizer, config.vocab_size, at_least, chat_template)


def read_traces(config: Any, paths: Sequence[str | os.PathLike], at_least: int) -> list[Tokens]:
    """Return what requests said, as traces hold it: a server's rounds without the prompts, dense traces with them.

    Args:
        config: the target's.
        paths: of traces of either format.
        at_least: tokens that traces are joined up to.
    Raises:
        ValueError: a file is no trace, holds no text, or ids the target does not have.
    """
    ends = end_tokens(config)
    whole = [
        (Path(path), [ids if ids[-1] in ends else ids + ends[:1] for ids in _traced_texts(path)]) for path in paths
    ]
    return joined(whole, config.vocab_size, at_least)


def _traced_texts(path: str | os.PathLike) -> list[list[int]]:
    """Return the token ids of each of a trace's requests."""
    try:
        trace = read(path)
    except OSError as error:
        raise ValueError(f"from_trace: {path}: cannot be read ({error.strerror})") from None
    if isinstance(trace, DenseTrace):
        texts = [request.text().tolist() for request in trace.requests]
    else:
        by_request: dict[str, list[int]] = {}
        for round_ in trace:
            by_request.setdefault(round_["request"], []).extend(round_["emitted"])
        texts = list(by_request.values())
    if not (said := [ids for ids in texts if ids]):
        raise ValueError(f"from_trace: {path}: no request's text in it")
    return said


def measuring_windows(
    target: Target,
    model: str,
    paths: Sequence[str | os.PathLike] | None,
    count: int,
    seq_len: int,
    chat_template: str | None = None,
) -> Tensor:
    """Return windows to measure on, at most [count, seq_len] int64: of the files, else what the target writes itself.

    Raises:
        ValueError: seq_len does not fit the target, or a file cannot be used or holds no window.
    """
    check_seq_len(target.config, seq_len)
    if paths:
        text = read_text(model, target.config, paths, seq_len, chat_template)
        return spaced_windows(long_enough(text, seq_len, "text"), count, seq_len)
    return own_text(target, count, seq_len)


def own_text(target: Target, count: int, seq_len: int) -> Tensor:
    """Return [count, seq_len] int64 sampled by the target from its own first token, at temperature 1."""
    first = next((i for i in (target.config.bos_token_id, target.config.eos_token_id) if isinstance(i, int)), 0)
    prompts = enumerate(torch.full((count, 1), first).split(BATCH))
    some = [continue_windows(target, rows, seq_len, torch.ones(len(rows)), seed=i * BATCH) for i, rows in prompts]
    return torch.cat(some)
