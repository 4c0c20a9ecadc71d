"""Token for token: what Model Runner V2's own sampler emits for the same logits, drafts and seeds.

Without a GPU vLLM's kernels run under the interpreter too, which vLLM allows once Triton names a backend `cpu`.
"""

import pytest
import torch
import triton
import vllm_eesd.kernels.gpu.rejection as kernel
from triton.language import core
from vllm_eesd.kernels.gpu.rejection import rejection
from vllm_eesd.kernels.gpu.shared_draw import shared_draw
from vllm_eesd.kernels.reference import rejection as reference


@triton.jit
def same_seed(seed, step):
    return seed


NUM_DRAFTS = [0, 1, 3, 4, 2, 4, 4, 0]
K = 4


@pytest.fixture(scope="module")
def v2(device):
    """vLLM's own `rejection_sample`, able to run here."""
    if device == "cpu":
        from triton.backends import backends

        backends.setdefault("cpu", next(iter(backends.values())))
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    if device == "cpu":
        mend_interpreter(rejection_sampler_utils.tldevice)
    return rejection_sampler_utils.rejection_sample


def mend_interpreter(libdevice):
    """Give the interpreter what vLLM's kernels need of it: log1p, and masks that are Python bools or integers."""
    import numpy as np
    from triton.runtime import interpreter

    def log1p(x, _semantic=None):
        return core.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p
    builder = interpreter.InterpreterBuilder
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        plain = getattr(builder, name)

        def with_bool_mask(self, *arguments, plain=plain, position=position):
            mask = arguments[position]
            as_bool = interpreter.TensorHandle(mask.data.astype(bool), core.int1)
            return plain(self, *arguments[:position], as_bool, *arguments[position + 1 :])

        setattr(builder, name, with_bool_mask)


def theirs(v2, batch, full, block_verification):
    """V2's (sampled, num_sampled); temperature is applied before, as its sampler does."""
    counts = batch.cu_num_logits.diff()
    rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    row_temperature = batch.temperature[batch.idx_mapping][rows]
    scale = torch.where(row_temperature == 0, 1.0, row_temperature)
    local = torch.arange(len(rows), device=counts.device) - batch.cu_num_logits[:-1].long()[rows]
    return v2(
        (batch.target_logits.float() / scale[:, None]).contiguous(),
        batch.draft_logits if full else None,
        batch.draft_sampled,
        batch.cu_num_logits,
        batch.positions,
        batch.idx_mapping.int(),
        batch.idx_mapping[rows].int(),
        local.int(),
        batch.temperature,
        batch.seeds,
        K,
        use_block_verification=block_verification,
    )


@pytest.mark.parametrize("vocab_size", [300, 9000])
@pytest.mark.parametrize("full", [False, True], ids=["one-hot", "full"])
@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
def test_verified_tokens_equal_v2s(v2, make_batch, device, vocab_size, full, block_verification, monkeypatch):
    from vllm_eesd.host.speculative import blocks_are_exact  # late: the fixture prepares for vLLM

    if block_verification and not blocks_are_exact():
        # vLLM 0.32 tests with the same number whatever the step, which is why EESD has it verify no blocks.
        if device != "cpu":
            pytest.skip("a compiled kernel cannot be made to do as vLLM 0.32 does")
        monkeypatch.setattr(kernel, "step_seed", same_seed)
    for seed, temperatures in enumerate(([0.0, 1.0, 0.3, 1.7], [1.0])):
        batch = make_batch(NUM_DRAFTS, vocab_size, temperatures, seed, agreement=0.8)
        batch = type(batch)(*(tensor.to(device) for tensor in batch))
        ours = rejection(
            batch.target_logits,
            batch.draft_sampled,
            batch.cu_num_logits,
            K,
            temperature=batch.temperature,
            draft_logits=batch.draft_logits if full else None,
            seeds=batch.seeds,
            positions=batch.positions,
            idx_mapping=batch.idx_mapping,
            block_verification=block_verification,
        )
        sampled, num_sampled = theirs(v2, batch, full, block_verification)
        assert torch.equal(ours.num_sampled, num_sampled)
        for request, count in enumerate(num_sampled.tolist()):
            assert ours.sampled[request, :count].tolist() == sampled[request, :count].tolist()


@pytest.mark.parametrize("vocab_size", [300, 9000])
def test_drafts_drawn_by_shared_noise_are_what_v2s_plain_step_draws(v2, device, vocab_size):
    """Each row at a position, temperature and seed of its own; rows of no request and of requests that do not share."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    g = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(24, vocab_size, generator=g) * 2
    slots, positions = torch.arange(24) % 12, torch.randint(0, 5000, (24,), generator=g)
    temperature, seeds = torch.rand(12, generator=g) + 0.3, torch.randint(0, 2**60, (12,), generator=g)
    given = [tensor.to(device) for tensor in (logits, slots, temperature, seeds, positions)]
    theirs = gumbel_sample(*given, apply_temperature=True, is_drafting=False)
    shares = torch.ones(12, dtype=torch.bool, device=device)
    kept = torch.full((24,), -5, device=device), torch.full((24,), 2.0, device=device)
    tokens, confidences = shared_draw(*given, shares, *kept)
    assert torch.equal(tokens, theirs)
    assert ((confidences >= 0) & (confidences <= 1)).all()
    moved, _ = shared_draw(*given[:-1], given[-1] + 1, shares, *kept)
    assert (moved != theirs).any(), "noise of another position would be noticed"


@pytest.mark.parametrize("generator", ["uniform", "gumbel"])
def test_other_numbers_would_be_noticed(v2, make_batch, device, monkeypatch, generator):
    """The comparison is of single tokens, so noise that is merely as good does not pass."""
    drawn = getattr(reference, generator)
    monkeypatch.setattr(reference, generator, lambda seed, position, *key: drawn(seed, position + 1, *key))
    batch = make_batch([3] * 40, 300, [1.0], agreement=0.8, max_drafts=K)
    arguments = {"temperature": batch.temperature, "seeds": batch.seeds, "positions": batch.positions}
    wrong = reference.rejection(*batch[:3], K, idx_mapping=batch.idx_mapping, **arguments)
    sampled, num_sampled = theirs(v2, type(batch)(*(tensor.to(device) for tensor in batch)), False, False)
    if generator == "uniform":
        assert not torch.equal(wrong.num_sampled, num_sampled.cpu())
    else:
        assert torch.equal(wrong.num_sampled, num_sampled.cpu())
        last = (num_sampled[:, None] - 1).long().cpu()
        assert not torch.equal(wrong.sampled.gather(1, last), sampled.cpu().gather(1, last))


def test_triton_runs_the_way_this_folder_assumes(device):
    assert (device == "cpu") == bool(triton.knobs.runtime.interpret)
