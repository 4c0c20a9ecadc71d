"""The inputs of draft steps: the kernels against their reference, in batches of several programs."""

import pytest
import torch
from vllm_eesd.kernels.gpu import draft_inputs
from vllm_eesd.kernels.reference import draft_inputs as reference
from vllm_eesd.kernels.reference.draft_inputs import DraftInputs, Drafts, TargetOutputs

K, BLOCK_SIZE, MAX_MODEL_LEN = 3, 4, 30


def buffers(max_num_reqs, device):
    """Inputs and drafts that hold what an earlier round has left."""

    def left(size, dtype):
        return torch.full((size,), 77, dtype=dtype, device=device)

    ints, longs = torch.int32, torch.int64
    inputs = DraftInputs(
        input_ids=left(max_num_reqs + 5, ints),
        positions=left(max_num_reqs + 5, longs),
        seq_lens=left(max_num_reqs, ints),
        query_start_loc=left(max_num_reqs + 1, ints),
        idx_mapping=left(max_num_reqs, ints),
        position_limit=left(max_num_reqs, longs),
        columns=left(max_num_reqs, longs),
        last_rows=left(max_num_reqs, longs),
    )
    tokens = torch.full((max_num_reqs, K), -7, dtype=longs, device=device)
    return inputs, Drafts(tokens, torch.full((max_num_reqs, K), 0.25, device=device))


def target(num_reqs, max_num_reqs, index, device):
    """A step of requests that decode, of prompt chunks, of rows without a request; and their KV blocks."""
    g = torch.Generator().manual_seed(num_reqs)

    def draw(low, high, size, dtype=torch.int32):
        return torch.randint(low, high, (size,), generator=g, dtype=dtype)

    slots = torch.randperm(max_num_reqs, generator=g)[:num_reqs]
    lengths = draw(1, 4, num_reqs)
    outputs = TargetOutputs(
        idx_mapping=torch.where(draw(0, 5, num_reqs) == 0, -1, slots).to(index),
        seq_lens=draw(4, MAX_MODEL_LEN + 1, num_reqs),
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
        num_sampled=draw(0, 3, num_reqs),
        num_rejected=(lengths - 1).int(),
        last_sampled=draw(0, 500, max_num_reqs, torch.int64)[:, None],
    )
    return TargetOutputs(*(tensor.to(device) for tensor in outputs)), draw(0, 9, max_num_reqs).to(device)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_reqs", "max_num_reqs"), [(1, 1), (3, 8), (127, 128), (130, 300)])
def test_a_round_of_inputs_is_the_references(num_reqs, max_num_reqs, index, device):
    outputs, num_blocks = target(num_reqs, max_num_reqs, index, device)
    (mine, my_drafts), (theirs, their_drafts) = (buffers(max_num_reqs, device) for _ in range(2))
    sizes = num_blocks, BLOCK_SIZE, MAX_MODEL_LEN
    draft_inputs.prepare_draft_inputs(mine, outputs, *sizes)
    reference.prepare_draft_inputs(theirs, outputs, *sizes)
    g = torch.Generator().manual_seed(0)
    for step in range(K + 1):  # one more: the column begins again
        for name, my_values, their_values in zip(DraftInputs._fields, mine, theirs, strict=True):
            assert torch.equal(my_values, their_values), (step, name)
        num_rows = min(num_reqs + 2, max_num_reqs)  # a graph's rows
        tokens = torch.randint(0, 500, (num_rows,), generator=g).to(device)
        made = tokens, torch.rand(num_rows, generator=g).to(device), MAX_MODEL_LEN
        draft_inputs.advance_draft_inputs(mine, my_drafts, *made)
        reference.advance_draft_inputs(theirs, their_drafts, *made)
        assert torch.equal(my_drafts.tokens, their_drafts.tokens)
        assert torch.equal(my_drafts.confidences, their_drafts.confidences)
    assert max_num_reqs == 1 or (mine.idx_mapping == -1).any()
