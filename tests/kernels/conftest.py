"""Batches of verification rows, as ragged as they come; shared by the references' and the kernels' tests."""

from typing import NamedTuple

import pytest
import torch


class Batch(NamedTuple):
    """Arguments of `rejection`, under its names."""

    target_logits: torch.Tensor
    draft_sampled: torch.Tensor
    cu_num_logits: torch.Tensor
    positions: torch.Tensor
    draft_logits: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    uniforms: torch.Tensor
    exponentials: torch.Tensor
    idx_mapping: torch.Tensor
    block_table: torch.Tensor


def strided(shape, generator, dtype=torch.float32):
    """Random numbers of a wider tensor whose unused columns are NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype)
    wide[..., : shape[-1]] = torch.randn(shape, generator=generator).to(dtype)
    return wide[..., : shape[-1]]


def make_batch(num_drafts, vocab_size, temperatures, seed=0, agreement=0.6, max_drafts=None, dtype=torch.float32):
    """A batch of len(num_drafts) requests; `agreement` of the drafts are the target's argmax, one in nine is -1."""
    g = torch.Generator().manual_seed(seed)
    num_reqs, max_num_reqs = len(num_drafts), len(num_drafts) + 2
    max_drafts = max_drafts or max(max(num_drafts), 1)
    counts = torch.tensor(num_drafts) + 1
    cu_num_logits = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    num_logits = int(cu_num_logits[-1])
    target_logits = strided((num_logits, vocab_size), g, dtype)
    best = target_logits.argmax(-1).roll(1)
    draft_sampled = torch.where(
        torch.rand(num_logits, generator=g) < agreement,
        best,
        torch.randint(0, vocab_size, (num_logits,), generator=g),
    )
    draft_sampled[torch.rand(num_logits, generator=g) < 1 / 9] = -1
    idx_mapping = torch.randperm(max_num_reqs, generator=g)[:num_reqs]
    draft_logits = torch.full((max_num_reqs, max_drafts, vocab_size), torch.nan, dtype=dtype)
    temperature, seeds = torch.full((max_num_reqs,), torch.nan), torch.zeros(max_num_reqs, dtype=torch.int64)
    for request, state in enumerate(idx_mapping.tolist()):
        start, drafts = int(cu_num_logits[request]), num_drafts[request]
        near = target_logits[start : start + drafts].float() + torch.randn((drafts, vocab_size), generator=g)
        draft_logits[state, :drafts] = near.to(dtype)
        temperature[state] = temperatures[request % len(temperatures)]
        seeds[state] = int(torch.randint(-(2**62), 2**62, (1,), generator=g))
    steps = torch.arange(num_logits) - cu_num_logits[:-1].long().repeat_interleave(counts)
    first = torch.randint(0, 40, (num_reqs,), generator=g)
    return Batch(
        target_logits,
        draft_sampled,
        cu_num_logits,
        first.repeat_interleave(counts) + steps,
        draft_logits,
        temperature,
        seeds,
        torch.rand((num_logits, 2), generator=g, dtype=torch.float64),
        torch.empty(num_reqs, vocab_size).exponential_(generator=g),
        idx_mapping,
        torch.randperm(num_reqs * 12, generator=g).view(num_reqs, 12).int(),
    )


@pytest.fixture(name="make_batch")
def make_batch_fixture():
    return make_batch


def assert_same_law(counts, expected, z=4.5):
    """Fail if counts are unlikely (p < 1e-5) to have been drawn from the expected probabilities.

    The bound is the chi-squared quantile in Wilson and Hilferty's approximation, PNAS 17 (1931) 684.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten()
    total = counts.sum()
    assert counts[expected == 0].sum() == 0, "a token without probability was drawn"
    few = expected * total < 5
    counts = torch.cat([counts[~few], counts[few].sum()[None]])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0] * total
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound, f"chi-squared {statistic:.1f} with {freedom} degrees of freedom exceeds {bound:.1f}"


@pytest.fixture(name="assert_same_law")
def assert_same_law_fixture():
    return assert_same_law
