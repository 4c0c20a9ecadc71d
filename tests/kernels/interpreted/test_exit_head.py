"""The exit-head kernels against their reference and against float64."""

import pytest
import torch
from vllm_eesd.kernels import reference
from vllm_eesd.kernels.exit_head import (
    CUBLAS_FROM,
    Sampling,
    choose_tokens,
    exit_head,
    exit_head_partials,
    merge_partials,
    tiles,
)

# float32 sums over hidden_size and over the vocabulary, in another order than torch's.
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


def assert_close(ours, expected, tolerance):
    for name, a, b in zip(ours._fields[1:], ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 33])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(65, 64), (129, 97)])
def test_tokens_equal_the_references_ties_included(num_tokens, vocab_size, hidden_size, dtype, device):
    hidden_states, weight = exact_inputs(num_tokens, vocab_size, hidden_size, dtype, device)
    ours = exit_head(hidden_states, weight, entropy=True)
    expected = reference.exit_head(hidden_states, weight, entropy=True)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours, expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_an_odd_hidden_size_in_strided_rows(num_tokens, dtype, device):
    hidden_states, weight = exact_inputs(num_tokens, 65, 4097, dtype, device)
    assert hidden_states.stride(0) == 4100
    ours = exit_head(hidden_states, weight, entropy=True)
    # On some CPUs torch's own bfloat16 product lets the NaN behind an odd row into the row.
    expected = reference.exit_head(hidden_states.contiguous(), weight, entropy=True)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours, expected, FLOAT32_TOLERANCE)


def test_a_real_vocabulary_and_one_token_more(device):
    hidden_states, weight = exact_inputs(2, 151937, 8, torch.float32, device)
    hidden_states[0, 0] = 2.0
    weight[-1] = 3 * hidden_states[0].sign()  # no other weight is larger than 2
    ours, expected = (f(hidden_states, weight, entropy=True) for f in (exit_head, reference.exit_head))
    assert int(ours.token_ids[0]) == 151936
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours, expected, FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)]
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_norm_is_part_of_the_product(num_tokens, dtype, tolerance, device):
    hidden_states, weight, norm_weight = real_inputs(num_tokens, 700, 130, dtype, device)
    logits_out = torch.full((num_tokens, 703), torch.nan, dtype=dtype, device=device)
    ours = exit_head(hidden_states, weight, norm_weight=norm_weight, entropy=True, logits_out=logits_out)
    x = hidden_states.double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
    logits = x @ weight.double().T
    torch.testing.assert_close(logits_out[:, :700].double(), logits, rtol=tolerance, atol=tolerance)
    assert logits_out[:, 700:].isnan().all()
    assert torch.equal(ours.token_ids, logits_out[:, :700].float().argmax(-1))
    assert_close(ours, reference.choose_tokens(logits_out[:, :700], entropy=True), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("noise", ["seeds", "exponentials"])
def test_sampled_tokens_equal_the_references(noise, device):
    num_tokens, vocab_size = 6, 900
    hidden_states, weight = exact_inputs(num_tokens, vocab_size, 32, torch.float32, device)
    g = torch.Generator().manual_seed(4)
    temperature = torch.tensor([0.0, 1.0, 0.3, 1.7, torch.nan]).to(device)
    idx_mapping = torch.tensor([3, 0, -1, 1, 2, 1]).to(device)
    if noise == "seeds":
        seeds = torch.randint(-(2**62), 2**62, (5,), generator=g).to(device)
        sampling = Sampling(temperature, seeds, torch.arange(num_tokens).to(device) * 9, idx_mapping=idx_mapping)
    else:
        draws = torch.empty(num_tokens, vocab_size).exponential_(generator=g).to(device)
        sampling = Sampling(temperature, exponentials=draws, idx_mapping=idx_mapping)
    ours = exit_head(hidden_states / 4, weight, sampling=sampling, confidence=True)
    expected = reference.exit_head(hidden_states / 4, weight, sampling=sampling, confidence=True)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours._replace(entropy=ours.margin), expected._replace(entropy=expected.margin), FLOAT32_TOLERANCE)


def test_shards_of_a_draft_vocabulary_merge_to_the_whole(device):
    hidden_states, weight, norm_weight = real_inputs(4, 300, 40, torch.float32, device)
    d2t = (torch.arange(300) * 2 + 5).to(device)
    sampling = Sampling(torch.ones(4).to(device), torch.arange(4).to(device), torch.arange(4).to(device))
    whole = reference.exit_head(
        hidden_states, weight, norm_weight=norm_weight, d2t=d2t, sampling=sampling, entropy=True
    )
    logits_out = torch.full((4, 700), -torch.inf, device=device)
    shards = [
        exit_head_partials(
            hidden_states, weight[s], norm_weight=norm_weight, d2t=d2t[s], sampling=sampling, logits_out=logits_out
        )
        for s in (slice(0, 64), slice(64, 65), slice(65, 300))
    ]
    merged = merge_partials(type(shards[0])(*(torch.stack(parts) for parts in zip(*shards, strict=True))), entropy=True)
    assert torch.equal(merged.token_ids, whole.token_ids)
    assert_close(merged, whole, FLOAT32_TOLERANCE)
    assert torch.equal((logits_out > -torch.inf).nonzero()[:300, 1], d2t)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_float8_weights(num_tokens, device):
    hidden_states, weight, _ = real_inputs(num_tokens, 200, 64, torch.bfloat16, device)
    scale = weight.float().abs().amax(-1) / 448
    quantised = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
    logits_out = torch.full((num_tokens, 200), torch.nan, dtype=torch.bfloat16, device=device)
    exit_head(hidden_states, quantised, weight_scale=scale, logits_out=logits_out)
    expected = hidden_states.double() @ (quantised.to(torch.float32).double() * scale.double()[:, None]).T
    torch.testing.assert_close(logits_out.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("vocab_size", [1, 2048, 5000])
def test_logits_that_are_there_already(vocab_size, device):
    logits = torch.randn((3, vocab_size + 1), generator=torch.Generator().manual_seed(0)).to(device)[:, :vocab_size]
    ours, expected = (f(logits, entropy=True) for f in (choose_tokens, reference.choose_tokens))
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours, expected, FLOAT32_TOLERANCE)


def test_many_rows_take_the_other_way_to_the_same_result(device):
    hidden_states, weight = exact_inputs(CUBLAS_FROM, 70, 16, torch.float32, device)
    norm_weight = torch.ones(16, device=device)
    logits_out = torch.full((CUBLAS_FROM, 70), torch.nan, device=device)
    ours = exit_head(hidden_states, weight, norm_weight=norm_weight, logits_out=logits_out, entropy=True)
    expected = reference.exit_head(hidden_states, weight, norm_weight=norm_weight, entropy=True)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert_close(ours, expected, FLOAT32_TOLERANCE)
    assert logits_out.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_give_a_token_of_the_vocabulary(value, device):
    logits = torch.zeros(2, 100, device=device)
    logits[0], logits[1, 40] = value, value
    sampling = Sampling(torch.ones(2).to(device), torch.arange(2).to(device), torch.arange(2).to(device))
    for arguments in ({}, {"sampling": sampling}):
        token_ids = choose_tokens(logits, **arguments).token_ids
        assert ((token_ids >= 0) & (token_ids < 100)).all()
        if value == torch.inf:
            assert int(token_ids[1]) == 40
        else:
            assert int(token_ids[1]) != 40


def test_tiles_are_what_a_tensor_core_takes():
    for num_tokens in (1, 2, 16, 17, 64, 127):
        for weight_bytes in (1, 2, 4):
            chosen = tiles(num_tokens, weight_bytes)
            assert chosen.block_t in (1, 16, 32, 64) and chosen.block_h >= 32
