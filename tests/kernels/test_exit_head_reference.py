"""The exit head's reference against float64."""

import pytest
import torch
from vllm_eesd.kernels.reference.exit_head import exit_head

# The logits come out of a float32 product over hidden_size.
LOGIT_TOLERANCE = 2e-5
# Their sum over a vocabulary of n is off by 4 sqrt(n) u at most, u the unit roundoff, once in a thousand sums or less,
# whatever its order (Higham and Mary 2019, theorem 2.4).
UNIT_ROUNDOFF = 2**-24


def inputs(num_tokens, vocab_size, hidden_size, dtype=torch.float32, seed=0):
    """A strided view of hidden states among NaN, an LM head whose logits spread over about [-4, 4], a norm weight."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, hidden_size + 5), torch.nan, dtype=dtype)
    wide[:, :hidden_size] = torch.randn((num_tokens, hidden_size), generator=g).to(dtype)
    weight = (torch.randn((vocab_size, hidden_size), generator=g) * hidden_size**-0.5).to(dtype)
    return wide[:, :hidden_size], weight, (torch.rand(hidden_size, generator=g) + 0.5).to(dtype)


def naive(hidden_states, weight, norm_weight):
    """float64 logits."""
    x = hidden_states.double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
    return x @ weight.double().T


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(2, 8), (1001, 65), (4096, 192), (20001, 64)])
def test_tokens_and_probabilities_equal_those_of_float64(num_tokens, vocab_size, hidden_size):
    hidden_states, weight, norm_weight = inputs(num_tokens, vocab_size, hidden_size)
    result = exit_head(hidden_states, weight, norm_weight=norm_weight)
    logits = naive(hidden_states, weight, norm_weight)
    assert torch.equal(result.token_ids, logits.argmax(-1))
    rtol = LOGIT_TOLERANCE + 4 * vocab_size**0.5 * UNIT_ROUNDOFF
    torch.testing.assert_close(result.top1_prob.double(), logits.softmax(-1).amax(-1), rtol=rtol, atol=0)


def test_a_draft_vocabulary_gives_target_ids():
    hidden_states, weight, norm_weight = inputs(4, 50, 12)
    d2t = torch.arange(50) * 3 + 7
    result = exit_head(hidden_states, weight, norm_weight=norm_weight, d2t=d2t)
    assert torch.equal(result.token_ids, d2t[naive(hidden_states, weight, norm_weight).argmax(-1)])


def test_logits_are_rounded_before_they_are_judged():
    """Two logits that bfloat16 cannot tell apart tie, and the lower id wins, as if the logits had been written."""
    hidden_states = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [8.0, 0.0], [8.0, 0.015625]], dtype=torch.bfloat16)
    assert exit_head(hidden_states, weight).token_ids.tolist() == [1]


@pytest.mark.parametrize("vocab_size", [1, 2, 130, 10922, 10923, 20000, 151937])
def test_long_rows_are_reduced_as_short_ones(vocab_size):
    """Both sides of the two-level reductions' threshold, with ties, with the maximum in the last, short block."""
    from vllm_eesd.kernels.reference.row_reductions import row_argmax, row_choice

    g = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 9, (3, vocab_size), generator=g).float()
    values[2, -1] = 99.0
    assert torch.equal(row_argmax(values), values.argmax(-1))
    weights = values.clamp(min=0)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-24])
    otherwise = torch.full((3,), -7)
    running = weights.double().cumsum(-1)
    expected = [
        int((row > u * row[-1]).nonzero()[0]) if row[-1] > 0 else -7
        for row, u in zip(running, uniforms.double(), strict=True)
    ]
    assert row_choice(weights, uniforms, otherwise).tolist() == expected
