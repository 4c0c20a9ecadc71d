"""The exit-head kernels against their reference and against float64."""

import pytest
import torch
from vllm_eesd.kernels.gpu.exit_head import CUBLAS_FROM, choose_tokens, exit_head, tiles
from vllm_eesd.kernels.reference import exit_head as reference

# float32 products over hidden_size, in another order than torch's.
FLOAT32_TOLERANCE = 2e-5
# bfloat16 logits of size 4 are 2**-6 apart, and the norm is applied before the product here and after it there.
BFLOAT16_TOLERANCE = 0.05


def exact_inputs(num_tokens, vocab_size, hidden_size, dtype, device, seed=0):
    """Small integers: every product and sum is exact in float32, so that ties are ties everywhere."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, hidden_size + 3), torch.nan, dtype=dtype)
    wide[:, :hidden_size] = torch.randint(-2, 3, (num_tokens, hidden_size), generator=g).to(dtype)
    weight = torch.randint(-2, 3, (vocab_size, hidden_size), generator=g).to(dtype)
    return wide.to(device)[:, :hidden_size], weight.to(device)


def real_inputs(num_tokens, vocab_size, hidden_size, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn((num_tokens, hidden_size), generator=g).to(dtype)
    weight = (torch.randn((vocab_size, hidden_size), generator=g) * hidden_size**-0.5).to(dtype)
    norm_weight = (torch.rand(hidden_size, generator=g) + 0.5).to(dtype)
    return hidden_states.to(device), weight.to(device), norm_weight.to(device)


def sum_tolerance(num_terms):
    """How far a float32 sum of so many terms may be off, relatively, whatever the order a machine adds them in.

    4 sqrt(n) u, u the unit roundoff: what rounding errors that are independent exceed once in a thousand sums or less.
    Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis (2019), theorem 2.4.
    """
    return 4 * num_terms**0.5 * 2**-24


def assert_equal(ours, expected, vocab_size=0):
    """The tokens exactly; probabilities, whose logits agree to FLOAT32_TOLERANCE, up to the sum over `vocab_size`."""
    assert ours.token_ids.dtype == expected.token_ids.dtype and torch.equal(ours.token_ids, expected.token_ids)
    rtol = FLOAT32_TOLERANCE + sum_tolerance(vocab_size)
    torch.testing.assert_close(ours.top1_prob, expected.top1_prob, rtol=rtol, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 33])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(65, 64), (129, 97)])
def test_tokens_equal_the_references_ties_included(num_tokens, vocab_size, hidden_size, dtype, device):
    hidden_states, weight = exact_inputs(num_tokens, vocab_size, hidden_size, dtype, device)
    ours = exit_head(hidden_states, weight)
    expected = reference.exit_head(hidden_states, weight)
    assert_equal(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_an_odd_hidden_size_in_strided_rows(num_tokens, dtype, device):
    hidden_states, weight = exact_inputs(num_tokens, 65, 4097, dtype, device)
    assert hidden_states.stride(0) == 4100
    ours = exit_head(hidden_states, weight)
    # On some CPUs torch's own bfloat16 product lets the NaN behind an odd row into the row.
    expected = reference.exit_head(hidden_states.contiguous(), weight)
    assert_equal(ours, expected)


def test_a_real_vocabulary_and_one_token_more(device):
    hidden_states, weight = exact_inputs(2, 151937, 8, torch.float32, device)
    hidden_states[0, 0] = 2.0
    weight[-1] = 3 * hidden_states[0].sign()  # no other weight is larger than 2
    ours, expected = (f(hidden_states, weight) for f in (exit_head, reference.exit_head))
    assert int(ours.token_ids[0]) == 151936
    assert_equal(ours, expected, vocab_size=151937)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)]
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_norm_is_part_of_the_product(num_tokens, dtype, tolerance, device):
    hidden_states, weight, norm_weight = real_inputs(num_tokens, 700, 130, dtype, device)
    ours = exit_head(hidden_states, weight, norm_weight=norm_weight)
    x = hidden_states.double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
    logits = x @ weight.double().T
    chosen = logits.gather(1, ours.token_ids[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=2 * tolerance, atol=2 * tolerance)
    probability = (chosen - logits.logsumexp(-1)).exp()
    torch.testing.assert_close(ours.top1_prob.double(), probability, rtol=2 * tolerance, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 4, CUBLAS_FROM])
def test_a_draft_vocabulary_gives_target_ids(num_tokens, device):
    hidden_states, weight = exact_inputs(num_tokens, 300, 40, torch.float32, device)
    d2t = (torch.arange(300) * 2 + 5).to(device)
    ours = exit_head(hidden_states, weight, d2t=d2t)
    assert_equal(ours, reference.exit_head(hidden_states, weight, d2t=d2t))


@pytest.mark.parametrize("vocab_size", [1, 2048, 5000])
def test_logits_that_are_there_already(vocab_size, device):
    logits = torch.randn((3, vocab_size + 1), generator=torch.Generator().manual_seed(0)).to(device)[:, :vocab_size]
    ours, expected = (f(logits) for f in (choose_tokens, reference.choose_tokens))
    assert_equal(ours, expected)


def test_many_rows_take_the_other_way_to_the_same_result(device):
    hidden_states, weight = exact_inputs(CUBLAS_FROM, 70, 16, torch.float32, device)
    norm_weight = torch.ones(16, device=device)
    ours = exit_head(hidden_states, weight, norm_weight=norm_weight)
    expected = reference.exit_head(hidden_states, weight, norm_weight=norm_weight)
    assert_equal(ours, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_a_token_of_the_vocabulary(value, device):
    logits = torch.zeros(2, 100, device=device)
    logits[0], logits[1, 40] = value, value
    token_ids = choose_tokens(logits).token_ids
    assert ((token_ids >= 0) & (token_ids < 100)).all()
    if value == torch.inf:
        assert int(token_ids[1]) == 40
    else:
        assert int(token_ids[1]) != 40


def test_tiles_are_what_a_tensor_core_takes():
    for num_tokens in (1, 2, 16, 17, 64, 127):
        for weight_bytes in (2, 4):
            chosen = tiles(num_tokens, weight_bytes)
            assert chosen.block_t in (1, 16, 32, 64) and chosen.block_h >= 32
