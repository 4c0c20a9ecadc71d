"""The n-gram search's reference against the host's own (`round/ngram.py`), which is tested against the obvious way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_eesd.kernels.reference.ngram import find_ngrams, put_ngrams

from vllm_eesd.round.ngram import MAX_MATCH, MAX_SEARCHED, NgramDrafter

K, BOUNDS = 5, (MAX_MATCH, MAX_SEARCHED)


def found_by(drafter, drafts, text, slot=1):
    """Have both find the draft of a text; (columns of `find_ngrams`, its draft)."""
    texts = torch.full((3, 80), 9, dtype=torch.int32)
    texts[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    one = np.array([slot])
    drafter.update(one, texts.numpy(), one, np.array([len(text)]), np.ones(1, dtype=bool))
    num_tokens = torch.tensor([0, len(text), 0], dtype=torch.int32)
    return texts, num_tokens


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40), steps=st.lists(st.integers(1, 6), min_size=1, max_size=5)
)
def test_finds_what_the_host_finds_and_judges_it(text, steps):
    drafter, drafts = NgramDrafter(3, K), torch.zeros(3, K, dtype=torch.int64)
    last = None
    for number, num_sampled in enumerate([1, *steps]):
        emitted = [(number + 2 * j) % 3 for j in range(num_sampled)]
        text = [*text, *emitted]
        texts, num_tokens = found_by(drafter, drafts, text)
        sampled = torch.tensor([num_sampled], dtype=torch.int32)
        counts = find_ngrams(texts, num_tokens, torch.tensor([1]), sampled, drafts, *BOUNDS)[0].tolist()
        assert counts[0] == num_sampled and counts[2] == drafter.matched[1]
        assert drafts[1].tolist() == (drafter.tokens[1].tolist() if counts[2] else [-1] * K)
        if last is not None:
            right = [a == b for a, b in zip(emitted, last, strict=False)]
            assert counts[1] == next((i for i, equal in enumerate(right) if not equal), len(right))
        last = drafts[1].tolist()


def test_rows_without_a_request_or_a_token_change_nothing():
    texts, num_tokens = torch.zeros(2, 8, dtype=torch.int32), torch.full((2,), 8, dtype=torch.int32)
    drafts = torch.full((2, K), 7)
    num_sampled = torch.tensor([1, 0], dtype=torch.int32)
    found = find_ngrams(texts, num_tokens, torch.tensor([-1, 1]), num_sampled, drafts, *BOUNDS)
    assert found.tolist() == [[1, 0, 0], [0, 0, 0]] and (drafts == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_that_is_put_is_certain(dtype):
    drafts = torch.tensor([[-1] * K, [3, 1, 3, 1, 3], [0] * K])
    draft_tokens = torch.full((4, K), 2)
    draft_tokens[0, 1] = -1  # as vLLM overwrites drafts that it does not want
    logits = torch.randn(3, K, 6).to(dtype)
    kept = logits.clone()
    taken = torch.tensor([True, True, False, True])
    put_ngrams(drafts, torch.tensor([0, 1, 2, -1]), taken, draft_tokens, logits)
    assert draft_tokens.tolist() == [[2, 0] + [2] * (K - 2), [3, 1, 3, 1, 3], [2] * K, [2] * K]
    assert torch.equal(logits[2], kept[2])
    for temperature in (1.0, 0.01):
        drawn = (logits[:2].float() / temperature).softmax(-1)
        assert torch.equal(drawn, torch.nn.functional.one_hot(draft_tokens[:2], 6).float())
