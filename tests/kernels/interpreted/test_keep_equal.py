"""Verification by equality: the kernel, its reference, and a loop in Python write the same."""

import pytest
import torch
from vllm_eesd.kernels.gpu.keep_equal import keep_equal
from vllm_eesd.kernels.reference import keep_equal as reference

NUM_DRAFTS = [0, 1, 3, 5, 2, 0, 4, 5]
K = 5


def kept(tokens, drafts):
    accepted = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
    return tokens[: accepted + 1] + [-1] * (K - accepted), accepted + 1


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_kept(make_batch, device, dtype, some):
    seen = set()
    for seed in range(4):
        batch = make_batch(NUM_DRAFTS, 7, [0.0], seed, agreement=0.8)
        drafts, cu_num_logits = batch.draft_sampled.to(dtype), batch.cu_num_logits
        tokens = batch.target_logits.float().argmax(dim=-1)
        chosen = torch.arange(len(NUM_DRAFTS)) % 3 != seed % 3 if some else None
        expected = []
        for request, (start, end) in enumerate(zip(cu_num_logits.tolist(), cu_num_logits[1:].tolist(), strict=False)):
            is_written = chosen is None or chosen[request]
            of_request = kept(tokens[start:end].tolist(), drafts[start + 1 : end].tolist())
            expected.append(of_request if is_written else ([9] * (K + 1), 9))
        for function, where in ((keep_equal, device), (reference.keep_equal, "cpu")):
            sampled = torch.full((len(NUM_DRAFTS), K + 1), 9, device=where)
            num_sampled = torch.full((len(NUM_DRAFTS),), 9, dtype=torch.int32, device=where)
            given = (t if t is None else t.to(where) for t in (tokens, drafts, cu_num_logits, chosen))
            function(sampled, num_sampled, *given)
            assert list(zip(sampled.tolist(), num_sampled.tolist(), strict=True)) == expected
        seen |= {number for _, number in expected}
    assert {1, 2, 3} < seen
