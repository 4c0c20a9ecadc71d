"""The n-gram kernels against their reference: texts of every length and of several blocks, rows without a request."""

import pytest
import torch
from vllm_eesd.kernels.gpu import ngram
from vllm_eesd.kernels.reference import ngram as reference

from vllm_eesd.round.ngram import MAX_MATCH, MAX_SEARCHED

K, BOUNDS = 5, (MAX_MATCH, MAX_SEARCHED)


def requests(longest, vocab_size, seed, device):
    """Texts of seven requests, [7, longest], and how long they are; a repetitive one among them."""
    g = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, vocab_size, (7, longest), generator=g, dtype=torch.int32)
    texts[3] = torch.arange(longest) % 3
    num_tokens = torch.randint(1, longest + 1, (7,), generator=g, dtype=torch.int32)
    num_tokens[0], num_tokens[1] = 1, longest
    return texts.to(device), num_tokens.to(device)


@pytest.mark.parametrize("longest", [24, 100, 2500])
@pytest.mark.parametrize("vocab_size", [2, 40])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_finds_and_judges_as_the_reference(longest, vocab_size, index, device):
    texts, num_tokens = requests(longest, vocab_size, longest + vocab_size, device)
    num_tokens = num_tokens.clamp(max=longest - 4)
    idx_mapping = torch.tensor([5, -1, 0, 3, 1, 6], dtype=index, device=device)
    mine, theirs = (torch.zeros(7, K, dtype=torch.int64, device=device) for _ in range(2))
    for emitted in ([1, 1, 1, 1, 1, 1], [1, 2, 0, 4, 1, 3]):
        num_sampled = torch.tensor(emitted, dtype=torch.int32, device=device)
        if max(emitted) > 1:
            for row, slot in enumerate(idx_mapping.tolist()):
                num_tokens[slot] += emitted[row] if slot >= 0 else 0
        arguments = texts, num_tokens, idx_mapping, num_sampled
        found = ngram.find_ngrams(*arguments, mine, *BOUNDS)
        assert torch.equal(found, reference.find_ngrams(*arguments, theirs, *BOUNDS))
        assert torch.equal(mine, theirs)
    assert found[:, 1].any() and found[:, 2].any()


def test_only_the_end_of_a_long_text_is_searched(device):
    text = torch.arange(100, dtype=torch.int32, device=device)[None].clone()
    text[0, 59], text[0, 60] = 7, 99  # the 7 just outside, the 99 just inside what is searched
    ones, drafts = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(1, K, dtype=torch.int64, device=device)
    for last, matched in ((7, 0), (99, 1)):
        text[0, 99] = last
        arguments = (text, 100 * ones, torch.zeros(1, dtype=torch.int64, device=device), ones, drafts, MAX_MATCH, 40)
        assert ngram.find_ngrams(*arguments).tolist()[0][2] == matched
        assert reference.find_ngrams(*arguments).tolist()[0][2] == matched


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_puts_as_the_reference(dtype, device):
    g = torch.Generator().manual_seed(0)
    drafts = torch.randint(0, 5000, (4, K), generator=g).to(device)
    drafts[2] = -1
    idx_mapping = torch.tensor([2, 0, -1, 1, 3], device=device)
    taken = torch.tensor([True, True, True, False, True], device=device)
    results = []
    for put in (ngram.put_ngrams, reference.put_ngrams):
        draft_tokens = torch.full((5, K), 11, device=device)
        draft_tokens[:, 1] = -1
        logits = None if dtype is None else torch.ones(4, K, 5000, dtype=dtype, device=device)
        put(drafts, idx_mapping, taken, draft_tokens, logits)
        assert draft_tokens[0].tolist() == [11, 0] + [11] * (K - 2)
        results.append((draft_tokens, logits))
    assert torch.equal(results[0][0], results[1][0])
    assert dtype is None or torch.equal(results[0][1], results[1][1])
