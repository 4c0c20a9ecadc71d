"""Token for token: what Model Runner V2's own sampler emits for the same logits, drafts and seeds.

Without a GPU vLLM's kernels run under the interpreter too, which vLLM allows once Triton names a backend `cpu`.
"""

import pytest
import torch
import triton
from triton.language import core
from vllm_eesd.kernels import noise_reference
from vllm_eesd.kernels.exit_head import Sampling, choose_tokens
from vllm_eesd.kernels.rejection import rejection

NUM_DRAFTS = [0, 1, 3, 4, 2, 4, 4, 0]
K = 4


@pytest.fixture(scope="module")
def v2(device):
    """(rejection_sample, gumbel_sample) of vLLM 0.32, able to run here."""
    if device == "cpu":
        from triton.backends import backends

        backends.setdefault("cpu", next(iter(backends.values())))
    gumbel = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel")
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    if device == "cpu":
        mend_interpreter(rejection_sampler_utils.tldevice)
    return rejection_sampler_utils.rejection_sample, gumbel.gumbel_sample


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
    return v2[0](
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
def test_verified_tokens_equal_v2s(v2, make_batch, device, vocab_size, full, block_verification):
    for seed, temperatures in enumerate(([0.0, 1.0, 0.3, 1.7], [1.0])):
        batch = make_batch(NUM_DRAFTS, vocab_size, temperatures, seed, agreement=0.8)
        batch = type(batch)(*(tensor.to(device) for tensor in batch))
        ours = rejection(
            batch.target_logits,
            batch.draft_sampled,
            batch.cu_num_logits,
            batch.positions,
            K,
            temperature=batch.temperature,
            draft_logits=batch.draft_logits if full else None,
            seeds=batch.seeds,
            idx_mapping=batch.idx_mapping,
            block_verification=block_verification,
        )
        sampled, num_sampled = theirs(v2, batch, full, block_verification)
        assert torch.equal(ours.num_sampled, num_sampled)
        for request, count in enumerate(num_sampled.tolist()):
            assert ours.sampled[request, :count].tolist() == sampled[request, :count].tolist()


def test_drafted_tokens_equal_v2s(v2, device):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn((6, 2500), generator=g).to(device)
    temperature = torch.tensor([0.0, 1.0, 0.3, 1.7]).to(device)
    seeds = torch.randint(-(2**62), 2**62, (4,), generator=g).to(device)
    positions = torch.tensor([0, 5, 17, 2**20, 3, 4]).to(device)
    idx_mapping = torch.tensor([3, 0, -1, 1, 2, 1]).to(device)
    expected = v2[1](logits, idx_mapping.int(), temperature, seeds, positions, apply_temperature=True, is_drafting=True)
    ours = choose_tokens(logits, sampling=Sampling(temperature, seeds, positions, idx_mapping=idx_mapping)).token_ids
    assert torch.equal(ours, expected)


def test_one_other_constant_would_be_noticed(v2, device, monkeypatch):
    """The comparison is of single tokens, so noise that is merely as good does not pass."""
    monkeypatch.setattr(noise_reference, "DRAFT_SALT", 1 << 29)
    from vllm_eesd.kernels import reference

    logits = torch.zeros(8, 500)
    seeds, positions = torch.arange(8), torch.arange(8)
    sampling = Sampling(torch.ones(8), seeds, positions)
    wrong = reference.choose_tokens(logits, sampling=sampling).token_ids
    on_device = [tensor.to(device) for tensor in (torch.arange(8).int(), torch.ones(8), seeds, positions)]
    expected = v2[1](logits.to(device), *on_device, apply_temperature=True, is_drafting=True)
    assert not torch.equal(wrong, expected.cpu())


def test_triton_runs_the_way_this_folder_assumes(device):
    assert (device == "cpu") == bool(triton.knobs.runtime.interpret)
