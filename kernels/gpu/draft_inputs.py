"""The inputs of draft steps, in one launch before a round and one after each step.

Both kernels have a program for so many rows; no row needs anything of another.
"""

import torch
import triton
import triton.language as tl

from ..reference.draft_inputs import DraftInputs, Drafts, TargetOutputs

__all__ = ["advance_draft_inputs", "prepare_draft_inputs"]

# Rows per program.
ROWS = 128


@triton.jit(do_not_specialize=["num_reqs"])
def _prepare_kernel(
    input_ids_ptr,  # the fields of DraftInputs
    positions_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    position_limit_ptr,
    columns_ptr,
    last_rows_ptr,
    target_idx_mapping_ptr,  # the fields of TargetOutputs
    target_seq_lens_ptr,
    target_query_start_loc_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    num_blocks_ptr,
    num_reqs,
    max_num_reqs,
    block_size,
    max_model_len,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists, here = row < max_num_reqs, row < num_reqs
    slot = tl.load(target_idx_mapping_ptr + row, mask=here, other=-1).to(tl.int64)
    num_rejected = tl.load(num_rejected_ptr + row, mask=here, other=0)
    position = (tl.load(target_seq_lens_ptr + row, mask=here, other=0) - num_rejected).to(tl.int64)
    num_blocks = tl.load(num_blocks_ptr + slot, mask=slot >= 0, other=0).to(tl.int64)
    limit = tl.minimum(num_blocks * block_size, max_model_len)
    num_sampled = tl.load(num_sampled_ptr + row, mask=here, other=0)
    may_write = (slot >= 0) & (num_sampled > 0) & (position < limit)
    position = tl.where(may_write, position, 0)
    token = tl.load(last_sampled_ptr + slot, mask=may_write, other=0)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=exists)
    tl.store(positions_ptr + row, position, mask=exists)
    tl.store(seq_lens_ptr + row, tl.where(here, position + 1, 0).to(tl.int32), mask=exists)
    tl.store(idx_mapping_ptr + row, tl.where(may_write, slot, -1), mask=exists)
    tl.store(position_limit_ptr + row, tl.where(may_write, limit, 0), mask=exists)
    tl.store(columns_ptr + row, tl.zeros([ROWS], tl.int64), mask=exists)
    query_end = tl.load(target_query_start_loc_ptr + row + 1, mask=here, other=1)
    tl.store(last_rows_ptr + row, (query_end - 1 - num_rejected).to(tl.int64), mask=exists)
    tl.store(query_start_loc_ptr + row, tl.minimum(row, num_reqs), mask=row <= max_num_reqs)


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(
    input_ids_ptr,  # the fields of DraftInputs
    positions_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    position_limit_ptr,
    columns_ptr,
    draft_tokens_ptr,  # [max_num_reqs, K] int64
    draft_confidences_ptr,  # [max_num_reqs, K] float32
    tokens_ptr,
    confidences_ptr,
    num_rows,
    K,
    max_model_len,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    token = tl.load(tokens_ptr + row, mask=here, other=0)
    confidence = tl.load(confidences_ptr + row, mask=here, other=0.0)
    column = tl.load(columns_ptr + row, mask=here, other=0)
    cell = row.to(tl.int64) * K + column
    tl.store(draft_tokens_ptr + cell, token, mask=here)
    tl.store(draft_confidences_ptr + cell, confidence, mask=here)
    tl.store(columns_ptr + row, tl.where(column + 1 < K, column + 1, 0), mask=here)
    tl.store(input_ids_ptr + row, token.to(tl.int32), mask=here)
    position = tl.load(positions_ptr + row, mask=here, other=0) + 1
    limit = tl.load(position_limit_ptr + row, mask=here, other=0)
    slot = tl.load(idx_mapping_ptr + row, mask=here, other=-1)
    tl.store(idx_mapping_ptr + row, tl.where(position >= limit, -1, slot), mask=here)
    position = tl.minimum(position, max_model_len - 1)
    tl.store(positions_ptr + row, position, mask=here)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32), mask=here)


def prepare_draft_inputs(
    inputs: DraftInputs, target: TargetOutputs, num_blocks: torch.Tensor, block_size: int, max_model_len: int
) -> None:
    """Fill the inputs of a round's first draft step; see `reference.draft_inputs`."""
    max_num_reqs = len(inputs.seq_lens)
    sizes = len(target.idx_mapping), max_num_reqs, block_size, max_model_len
    grid = (triton.cdiv(max_num_reqs + 1, ROWS),)
    _prepare_kernel[grid](*inputs, *target, num_blocks, *sizes, ROWS=ROWS, num_warps=4)


def advance_draft_inputs(
    inputs: DraftInputs, drafts: Drafts, tokens: torch.Tensor, confidences: torch.Tensor, max_model_len: int
) -> None:
    """Keep what a draft step drafted, and make it the next step's input; see `reference.draft_inputs`."""
    assert drafts.tokens.is_contiguous() and drafts.confidences.is_contiguous()
    num_rows, K = len(tokens), drafts.tokens.shape[1]
    rows = inputs.input_ids, inputs.positions, inputs.seq_lens, *inputs[4:7]
    made = *drafts, tokens, confidences
    _advance_kernel[(triton.cdiv(num_rows, ROWS),)](*rows, *made, num_rows, K, max_model_len, ROWS=ROWS, num_warps=4)
