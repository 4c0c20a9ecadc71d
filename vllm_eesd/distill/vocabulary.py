"""A smaller vocabulary to draft from: the tokens the target meets most often, and logits over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm_eesd.distill.data import CHUNK_TOKENS, SELF_SHARE, TokenData, as_source
from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME, offsets_of, token_ids_of

#: That a source is cut into to be split into halves alike.
PIECES = 16


def token_shares(data: TokenData, vocab_size: int) -> np.ndarray:
    """Return how often each token is predicted in a batch, [vocab_size] float64 that sums to 1; read in pieces.

    Of conversations the answers count: the rest is not drafted.
    """
    text = _shares(data.text + (_answers(data) or as_source(data.conversations or [])), vocab_size)
    if data.generated is None:
        return text
    return (1 - SELF_SHARE) * text + SELF_SHARE * _shares(list(data.generated), vocab_size)


def _shares(sources: list[Any], vocab_size: int) -> np.ndarray:
    counts = _counts(sources, vocab_size)
    return counts / counts.sum()


def _counts(sources: list[Any], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in sources:
        for first in range(0, len(tokens), CHUNK_TOKENS):
            counts += np.bincount(tokens[first : first + CHUNK_TOKENS], minlength=vocab_size)
    return counts


def own_text(data: TokenData) -> list[Any]:
    """Return the target's own text, what it drafts on, as sources of token ids; where there is none, all text."""
    own = _answers(data) + ([] if data.generated is None else list(data.generated))
    return own or data.text or data.sources


def _answers(data: TokenData) -> list[Any]:
    return [said.ids[said.answers] for said in data.conversations or [] if said.answers.any()]


def coverage(sources: list[Any], vocab_size: int, always: list[int]) -> np.ndarray:
    """Return the share of text that the s most frequent tokens of other such text are, [vocab_size + 1] float64.

    The tokens counted in one half of the text are looked for in the other, and the other way round: in the text they
    were counted in, even a token that occurs once would be covered.

    Args:
        sources: token ids; of many sources every other one is a half, few are cut into pieces that take turns.
        always: ids that are among the first, however rare.
    """
    pieces = sources
    if len(sources) < PIECES:
        pieces = [piece for tokens in sources for piece in np.array_split(tokens, PIECES)]
    halves = [_counts(pieces[first::2], vocab_size) for first in (0, 1)]
    covered = np.zeros(vocab_size + 1)
    for counted, other in (halves, halves[::-1]):
        ranked = counted.astype(np.float64)
        ranked[always] = np.inf
        covered[1:] += other[np.argsort(-ranked, kind="stable")].cumsum() / max(1, 2 * other.sum())
    return covered


def most_frequent(shares: np.ndarray, size: int, always: list[int]) -> Tensor:
    """Return the ids of the `size` most frequent tokens, ascending, int64; equally frequent ones by id.

    Args:
        shares: [vocab_size], of `token_shares`.
        always: ids kept however rare: the end of a text is one token a text, and ends every request.
    Raises:
        ValueError: see `check_size`.
    """
    check_size(size, len(shares))
    ranked = shares.copy()
    ranked[always] = np.inf
    return torch.from_numpy(np.sort(np.argsort(-ranked, kind="stable")[:size]))


def check_size(size: int, vocab_size: int) -> None:
    """Refuse a draft vocabulary that is none.

    Raises:
        ValueError: size is not below the target's vocabulary.
    """
    if not 1 <= size < vocab_size:
        raise ValueError(f"draft_vocab is {size}, must be 1 to {vocab_size - 1}: the target has {vocab_size} tokens")


def end_tokens(config: Any) -> list[int]:
    """Return the ids that end the target's text, as its config says."""
    ids = config.eos_token_id
    ids = [ids] if isinstance(ids, int) else list(ids or ())
    return [token_id for token_id in ids if token_id < config.vocab_size]


def restrict(head: nn.Module, token_ids: Tensor) -> None:
    """Make the head draft from these tokens only; its state_dict then has `d2t`, as its checkpoint.

    Args:
        token_ids: [draft_vocab_size] int64, ascending.
    """
    head.register_buffer(D2T_NAME, offsets_of(token_ids.to(next(head.parameters()).device)))


def draft_token_ids(head: nn.Module) -> Tensor | None:
    """Return the target's ids that the head drafts from, [draft_vocab_size] int64; None if all."""
    d2t = getattr(head, D2T_NAME, None)
    return None if d2t is None else token_ids_of(d2t)


def widened(logits: Tensor, head: nn.Module, vocab_size: int) -> Tensor:
    """Return the draft's logits over the target's vocabulary, [..., vocab_size]: -inf for what it cannot draft.

    Args:
        logits: [..., draft_vocab_size], or over the whole vocabulary for a head that drafts from all of it.
    """
    if (token_ids := draft_token_ids(head)) is None:
        return logits
    drafted = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    drafted[..., token_ids] = logits
    return drafted
