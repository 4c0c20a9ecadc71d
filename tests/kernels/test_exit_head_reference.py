"""The exit head's reference against float64, shard by shard, and by distribution."""

import pytest
import torch
from vllm_eesd.kernels.reference import Sampling, choose_tokens, exit_head, exit_head_partials, merge_partials

# float32 sums over a vocabulary, relative to the value; about 40 units in the last place.
SUM_TOLERANCE = 5e-6
# The logits themselves come out of a float32 product over hidden_size; a margin is a difference of two of them.
LOGIT_TOLERANCE = 2e-5


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
def test_tokens_and_confidences_equal_those_of_float64(num_tokens, vocab_size, hidden_size):
    hidden_states, weight, norm_weight = inputs(num_tokens, vocab_size, hidden_size)
    result = exit_head(hidden_states, weight, norm_weight=norm_weight, entropy=True)
    logits = naive(hidden_states, weight, norm_weight)
    p = logits.softmax(-1)
    top = logits.topk(2).values
    assert torch.equal(result.token_ids, logits.argmax(-1))
    torch.testing.assert_close(result.logsumexp.double(), logits.logsumexp(-1), rtol=SUM_TOLERANCE, atol=1e-5)
    torch.testing.assert_close(result.top1_prob.double(), p.amax(-1), rtol=LOGIT_TOLERANCE, atol=0)
    torch.testing.assert_close(result.margin.double(), top[:, 0] - top[:, 1], rtol=0, atol=LOGIT_TOLERANCE)
    torch.testing.assert_close(result.entropy.double(), -(p * p.log()).sum(-1), rtol=SUM_TOLERANCE, atol=1e-5)


@pytest.mark.parametrize("sampled", [False, True])
def test_shards_merge_to_the_whole(sampled):
    hidden_states, weight, norm_weight = inputs(6, 900, 33)
    g = torch.Generator().manual_seed(1)
    exponentials = torch.empty(6, 900).exponential_(generator=g)
    temperature = torch.tensor([0.0, 1.0, 0.3, 1.7, 1.0, 0.0])
    sampling = Sampling(temperature, exponentials=exponentials) if sampled else None
    whole = exit_head(hidden_states, weight, norm_weight=norm_weight, sampling=sampling, entropy=True)
    shards = [
        exit_head_partials(
            hidden_states,
            weight[start:end],
            norm_weight=norm_weight,
            sampling=sampling and sampling._replace(exponentials=exponentials[:, start:end]),
            first_token_id=start,
        )
        for start, end in ((0, 300), (300, 301), (301, 900))
    ]
    merged = merge_partials(type(shards[0])(*(torch.stack(parts) for parts in zip(*shards, strict=True))), entropy=True)
    assert torch.equal(whole.token_ids, merged.token_ids)
    for ours, theirs in zip(whole[1:], merged[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=SUM_TOLERANCE, atol=1e-5)


def test_seeded_noise_is_the_same_in_every_shard():
    hidden_states, weight, _ = inputs(64, 700, 16)
    sampling = Sampling(torch.ones(64), torch.arange(64) - 5, torch.arange(64) * 3)
    whole = exit_head(hidden_states, weight, sampling=sampling)
    shards = [
        exit_head_partials(hidden_states, weight[a:b], sampling=sampling, first_token_id=a)
        for a, b in ((0, 256), (256, 700))
    ]
    merged = merge_partials(type(shards[0])(*(torch.stack(parts) for parts in zip(*shards, strict=True))))
    assert torch.equal(whole.token_ids, merged.token_ids)


def test_a_draft_vocabulary_gives_target_ids_and_scattered_logits():
    hidden_states, weight, norm_weight = inputs(4, 50, 12)
    d2t = torch.arange(50) * 3 + 7
    logits_out = torch.full((4, 200), -torch.inf)
    result = exit_head(hidden_states, weight, norm_weight=norm_weight, d2t=d2t, logits_out=logits_out)
    assert torch.equal(result.token_ids, logits_out.argmax(-1))
    assert set((logits_out > -torch.inf).nonzero()[:, 1].tolist()) == set(d2t.tolist())


def test_logits_are_rounded_before_they_are_judged():
    """Two logits that bfloat16 cannot tell apart tie, and the lower id wins, as if the logits had been written."""
    hidden_states = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [8.0, 0.0], [8.0, 0.015625]], dtype=torch.bfloat16)
    assert exit_head(hidden_states, weight).token_ids.tolist() == [1]


def test_float8_weights_are_scaled():
    hidden_states, weight, _ = inputs(3, 40, 16)
    scale = weight.abs().amax(-1) / 448
    quantised = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    expected = naive_product = hidden_states.double() @ (quantised.double() * scale.double()[:, None]).T
    logits_out = torch.full((3, 40), torch.nan)
    result = exit_head(hidden_states, quantised, weight_scale=scale, logits_out=logits_out)
    torch.testing.assert_close(logits_out.double(), naive_product, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE)
    assert torch.equal(result.token_ids, expected.argmax(-1))


@pytest.mark.parametrize("noise", ["exponentials", "seeds", "uniforms"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampled_tokens_have_the_softmaxs_law(assert_same_law, temperature, noise):
    num_tokens, vocab_size = 200_000, 16
    g = torch.Generator().manual_seed(3)
    row = torch.randn(vocab_size, generator=g) * 2
    if noise == "seeds":
        sampling = Sampling(torch.full((num_tokens,), temperature), torch.arange(num_tokens), torch.arange(num_tokens))
    elif noise == "uniforms":
        sampling = Sampling(
            torch.full((num_tokens,), temperature), uniforms=torch.rand(num_tokens, generator=g, dtype=torch.float64)
        )
    else:
        exponentials = torch.empty(num_tokens, vocab_size).exponential_(generator=g)
        sampling = Sampling(torch.full((num_tokens,), temperature), exponentials=exponentials)
    token_ids = choose_tokens(row.expand(num_tokens, vocab_size), sampling=sampling).token_ids
    assert_same_law(torch.bincount(token_ids, minlength=vocab_size), (row.double() / temperature).softmax(-1))


def test_a_padded_row_is_greedy_and_needs_no_request():
    logits = torch.randn(3, 30)
    sampling = Sampling(
        torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.arange(3), idx_mapping=torch.tensor([-1, -1, -1])
    )
    assert torch.equal(choose_tokens(logits, sampling=sampling).token_ids, logits.argmax(-1))


def test_uniforms_leave_greedy_and_padded_rows_alone():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, -1, 1, 1])
    sampling = Sampling(torch.tensor([0.0, 1.0]), idx_mapping=rows, uniforms=torch.full((4,), 0.999))
    token_ids, best = choose_tokens(logits, sampling=sampling, confidence=True).token_ids, logits.argmax(-1)
    assert torch.equal(token_ids[:2], best[:2])
    assert (token_ids[2:] > 250).all()  # almost all of the mass is before it


def test_a_temperature_without_noise_is_refused():
    with pytest.raises(ValueError, match="seeds"):
        choose_tokens(torch.zeros(1, 4), sampling=Sampling(torch.ones(1)))
    with pytest.raises(ValueError, match="seeds"):  # a shard knows no whole row to invert
        exit_head_partials(
            torch.zeros(1, 4), torch.zeros(4, 4), sampling=Sampling(torch.ones(1), uniforms=torch.zeros(1))
        )


@pytest.mark.parametrize("vocab_size", [1, 2, 130, 10922, 10923, 20000, 151937])
def test_long_rows_are_reduced_as_short_ones(vocab_size):
    """Both sides of the two-level reductions' threshold, with ties, with the maximum in the last, short block."""
    from vllm_eesd.kernels.row_reductions import row_argmax, row_choice, row_top2

    g = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 9, (3, vocab_size), generator=g).float()
    values[2, -1] = 99.0
    assert torch.equal(row_argmax(values), values.argmax(-1))
    sorted_values = values.sort(descending=True).values
    second = sorted_values[:, 1] if vocab_size > 1 else torch.full((3,), -torch.inf)
    assert torch.equal(row_top2(values), torch.stack([sorted_values[:, 0], second], dim=1))
    weights = values.clamp(min=0)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-24])
    otherwise = torch.full((3,), -7)
    running = weights.double().cumsum(-1)
    expected = [
        int((row > u * row[-1]).nonzero()[0]) if row[-1] > 0 else -7
        for row, u in zip(running, uniforms.double(), strict=True)
    ]
    assert row_choice(weights, uniforms, otherwise).tolist() == expected
