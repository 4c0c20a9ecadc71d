"""The verification kernels against their reference, output by output, and by distribution."""

import pytest
import torch
from vllm_eesd.kernels.gpu.rejection import rejection
from vllm_eesd.kernels.reference import rejection as reference

NUM_DRAFTS = [0, 1, 3, 5, 2, 0, 4, 5]


def both(batch, device, num_speculative_tokens, **arguments):
    """(kernel's, reference's) Verified of one batch."""
    batch = type(batch)(*(tensor.to(device) for tensor in batch))
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    results = []
    for function in (rejection, reference.rejection):
        results.append(
            function(
                batch.target_logits,
                batch.draft_sampled,
                batch.cu_num_logits,
                num_speculative_tokens,
                temperature=batch.temperature,
                seeds=batch.seeds,
                positions=batch.positions,
                idx_mapping=batch.idx_mapping,
                **arguments,
            )
        )
    return results


def assert_equal(ours, expected):
    for name, a, b in zip(ours._fields, ours, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), f"{name}: {a.tolist()} instead of {b.tolist()}"


@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(37, torch.float32), (8193, torch.float32), (3000, torch.bfloat16)])
def test_integers_equal_the_references(make_batch, device, vocab_size, dtype, full, block_verification):
    for seed in range(2 if vocab_size == 37 else 1):
        batch = make_batch(NUM_DRAFTS, vocab_size, [0.0, 1.0, 0.3, 1.7], seed, (0.8, 0.5)[seed], dtype=dtype)
        ours, expected = both(
            batch,
            device,
            5,
            draft_logits=batch.draft_logits if full else None,
            block_verification=block_verification,
        )
        assert_equal(ours, expected)


@pytest.mark.parametrize("num_drafts", [[0], [3], [0, 0, 0], [1, 1]])
def test_greedy_batches(make_batch, device, num_drafts):
    batch = make_batch(num_drafts, 1031, [0.0], agreement=0.9)
    assert_equal(*both(batch, device, max(max(num_drafts), 1)))


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_all_rejected_and_all_accepted(make_batch, device, agreement):
    batch = make_batch([4, 4, 4], 300, [0.0])
    rows = torch.arange(15) % 5 > 0
    best = batch.target_logits.argmax(-1).roll(1)
    batch.draft_sampled[rows] = (best + int(agreement == 0.0)).remainder(300)[rows]
    ours, expected = both(batch, device, 4)
    assert ours.num_sampled.tolist() == [5 if agreement else 1] * 3
    assert_equal(ours, expected)


def test_a_real_vocabulary_and_one_token_more(make_batch, device):
    batch = make_batch([2], 151937, [1.0], agreement=1.0)
    batch.target_logits[:, -1] = 50.0
    batch.draft_sampled[1:] = 151936
    ours, expected = both(batch, device, 2)
    assert ours.sampled.tolist() == [[151936] * 3]
    assert_equal(ours, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["row", "draft", "other"])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
def test_a_broken_row_gives_a_token_of_the_vocabulary(make_batch, device, value, where, full):
    batch = make_batch([3, 2, 3], 200, [1.0, 0.0], agreement=1.0)
    columns = {"row": slice(None), "draft": int(batch.draft_sampled[1]), "other": 7}[where]
    batch.target_logits[:, columns] = value
    ours, expected = both(batch, device, 3, draft_logits=batch.draft_logits if full else None)
    tokens = ours.sampled[ours.sampled != -1]
    assert ((tokens >= 0) & (tokens < 200)).all()
    assert torch.equal(ours.num_sampled[::2], expected.num_sampled[::2])


@pytest.mark.parametrize("given", [(), ("seeds",), ("positions",)])
def test_missing_noise_is_refused(make_batch, given):
    batch = make_batch([1], 10, [1.0])
    noise = {name: getattr(batch, name) for name in given}
    with pytest.raises(ValueError, match="seeds, positions"):
        rejection(*batch[:3], 1, temperature=batch.temperature, **noise)


@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
def test_the_first_token_has_the_targets_law(assert_same_law, device, full, block_verification):
    """One prompt many times over, seeds apart. After one draft, the first token's law is p whatever was accepted."""
    num_reqs, vocab_size = 200_000 if device == "cuda" else 60, 6
    g = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, vocab_size, generator=g), torch.randn(1, vocab_size, generator=g)
    if full:
        drafts = torch.multinomial(q.softmax(-1).expand(num_reqs, -1), 1, generator=g)
    else:
        drafts = q.argmax(-1, keepdim=True).expand(num_reqs, 1)
    result = rejection(
        p.repeat(num_reqs, 1).to(device),
        torch.nn.functional.pad(drafts, (1, 0)).flatten().to(device),
        torch.arange(0, 2 * num_reqs + 1, 2, dtype=torch.int32, device=device),
        1,
        temperature=torch.ones(num_reqs, device=device),
        draft_logits=q.expand(num_reqs, 1, vocab_size).to(device) if full else None,
        seeds=torch.randint(-(2**62), 2**62, (num_reqs,), generator=g).to(device),
        positions=torch.zeros(2 * num_reqs, dtype=torch.int64, device=device),
        block_verification=block_verification,
    )
    counts = torch.bincount(result.sampled[:, 0].cpu(), minlength=vocab_size)
    assert_same_law(counts, p[0].double().softmax(-1))
