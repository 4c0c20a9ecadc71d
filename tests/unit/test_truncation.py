"""Top-k and top-p by the largest logits: the very tokens that vLLM's own function keeps, row by row."""

import inspect

import pytest
import torch

from vllm_eesd.host.v1 import truncation

VOCAB_SIZE = 5_000


@pytest.fixture
def by_sorting():
    """vLLM's own, which notes how many rows it is asked for; an engine of an earlier test may have wrapped it."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    original = inspect.unwrap(apply_top_k_top_p_pytorch)

    def counted(logits, k, p):
        counted.num_rows += len(logits)
        return original(logits, k, p, allow_cpu_sync=True)

    counted.num_rows = 0
    return counted


def rows(num_rows, scale, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, VOCAB_SIZE, generator=generator) * scale).to(dtype).float()


def mixed(num_rows, seed=1):
    """Top-k of 1 to 200 or none, top-p of 0.01 to 0.999 or none, row by row."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randint(1, 200, (num_rows,), generator=generator)
    k[torch.rand(num_rows, generator=generator) < 0.4] = VOCAB_SIZE
    p = torch.rand(num_rows, generator=generator).clamp(0.01, 0.999)
    p[torch.rand(num_rows, generator=generator) < 0.3] = 1.0
    return k.int(), p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16, with equal logits"])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("which", ["k and p", "p alone", "k alone"])
def test_as_vllm_cuts(by_sorting, dtype, scale, which):
    logits, (k, p) = rows(300, scale, dtype=dtype), mixed(300)
    k, p = None if which == "p alone" else k, None if which == "k alone" else p
    expected = by_sorting(logits.clone(), k, p)
    cut = truncation.apply_top_k_top_p(by_sorting, logits.clone(), k, p)
    assert torch.equal(cut, expected)


def test_hardly_a_row_is_sorted(by_sorting):
    p = torch.full((200,), 0.95)
    cut = truncation.apply_top_k_top_p(by_sorting, rows(200, 6.0), None, p)
    assert by_sorting.num_rows < 10
    assert cut.isfinite().sum(dim=-1).float().mean() > 5


@pytest.mark.parametrize(
    "values",
    [[9.0, 9.0, 9.0, 9.0], [9.0, 8.0, 8.0, 1.0], [9.0, 9.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0, 0.0]],
)
@pytest.mark.parametrize("k", [None, 1, 2, 3, 127, 128, 129])
@pytest.mark.parametrize("p", [0.3, 0.5, 0.75, 1.0])
def test_cuts_between_equal_logits(by_sorting, values, k, p):
    logits = torch.full((1, VOCAB_SIZE), -4.0)
    logits[0, [17, 5, 4000, 77]] = torch.tensor(values)
    k, p = None if k is None else torch.tensor([k]), torch.tensor([p])
    expected = by_sorting(logits.clone(), k, p)
    assert torch.equal(truncation.apply_top_k_top_p(by_sorting, logits.clone(), k, p), expected)


def test_rows_that_want_no_cut_are_left_alone(by_sorting, monkeypatch):
    looked_at = []
    cut = truncation._cut
    monkeypatch.setattr(truncation, "_cut", lambda logits, k, p: (looked_at.append(len(logits)), cut(logits, k, p))[1])
    logits, p = rows(4, 6.0), torch.tensor([1.0, 0.9, 1.0, 0.5])
    expected = by_sorting(logits.clone(), None, p)
    assert torch.equal(truncation.apply_top_k_top_p(by_sorting, logits.clone(), None, p), expected)
    assert looked_at == [2]
    assert torch.equal(truncation.apply_top_k_top_p(by_sorting, logits.clone(), None, torch.ones(4)), logits)
    assert looked_at == [2]


def test_a_sum_within_rounding_of_p_is_left_to_vllm(by_sorting):
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, :4] = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    truncation.apply_top_k_top_p(by_sorting, logits.clone(), None, torch.tensor([0.75]))
    assert by_sorting.num_rows == 1
    truncation.apply_top_k_top_p(by_sorting, logits.clone(), None, torch.tensor([0.76]))
    assert by_sorting.num_rows == 1


def test_what_is_not_a_number_is_left_to_vllm(by_sorting):
    logits = rows(3, 6.0)
    logits[1, 40] = torch.nan
    truncation.apply_top_k_top_p(by_sorting, logits, None, torch.full((3,), 0.9))
    assert by_sorting.num_rows == 1


def test_drafts_are_cut_where_it_is_cheap(by_sorting):
    logits = torch.cat([rows(5, 6.0), rows(1, 0.01)])
    p = torch.full((6,), 0.9)
    cut = truncation.draft_logits(logits, None, p)
    assert torch.equal(cut[:5], by_sorting(logits[:5].clone(), None, p[:5]))
    assert torch.equal(cut[5], logits[5])
    assert truncation.draft_logits(logits, None, None) is logits
    k = torch.full((6,), 3)
    assert (truncation.draft_logits(logits, k, None).isfinite().sum(dim=-1) == 3).all()
