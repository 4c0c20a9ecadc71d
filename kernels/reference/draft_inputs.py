"""The inputs of draft steps on Model Runner V2: of a round's first step, and of each next one."""

from typing import NamedTuple

import torch

__all__ = ["DraftInputs", "Drafts", "TargetOutputs", "advance_draft_inputs", "prepare_draft_inputs"]


class DraftInputs(NamedTuple):
    """What a draft step reads; the first rows are the batch's, the others pad a CUDA graph's batch.

    Attributes:
        input_ids: [max_num_reqs or more] int32.
        positions: [max_num_reqs or more] int64.
        seq_lens: [max_num_reqs] int32, the position's token included; 0 where there is no request.
        query_start_loc: [max_num_reqs + 1] int32, one token a request.
        idx_mapping: [max_num_reqs] int, the request state; -1 where the row may write no KV slot.
        position_limit: [max_num_reqs] int64, the first position the row may not write.
        columns: [max_num_reqs] int64, the column of the drafts that the step writes, the same in all rows.
        last_rows: [max_num_reqs] int64, the row of the target's forward that held the last token that counts.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    idx_mapping: torch.Tensor
    position_limit: torch.Tensor
    columns: torch.Tensor
    last_rows: torch.Tensor


class TargetOutputs(NamedTuple):
    """The target's step that has just run.

    Attributes:
        idx_mapping: [num_reqs] int, the request state; negative for none.
        seq_lens: [num_reqs] int32, with all drafts of the step.
        query_start_loc: [num_reqs + 1] int32.
        num_sampled: [num_reqs] int32, 0 in prompt chunks.
        num_rejected: [num_reqs] int32.
        last_sampled: [max_num_reqs, 1] int64, by request state.
    """

    idx_mapping: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor


class Drafts(NamedTuple):
    """What draft steps have drafted, [max_num_reqs, K] each: tokens int64, confidences float32."""

    tokens: torch.Tensor
    confidences: torch.Tensor


def prepare_draft_inputs(
    inputs: DraftInputs, target: TargetOutputs, num_blocks: torch.Tensor, block_size: int, max_model_len: int
) -> None:
    """Fill the inputs of a round's first draft step: every request's last token, one position after its KV.

    Args:
        inputs: overwritten.
        num_blocks: [max_num_reqs] int32, KV blocks by request state, of `block_size` tokens; 0 where nothing may be
            written.
        max_model_len: the longest sequence there may be.
    """
    num_reqs = len(target.idx_mapping)
    slots = target.idx_mapping.long()
    positions = (target.seq_lens - target.num_rejected).long()
    some_slot = slots.clamp(min=0)
    limit = (num_blocks[some_slot].long() * block_size).clamp(max=max_model_len)
    may_write = (slots >= 0) & (target.num_sampled > 0) & (positions < limit)
    positions = torch.where(may_write, positions, 0)
    rows = {
        "input_ids": torch.where(may_write, target.last_sampled[some_slot, 0], 0),
        "positions": positions,
        "seq_lens": positions + 1,
        "idx_mapping": torch.where(may_write, slots, -1),
        "position_limit": torch.where(may_write, limit, 0),
        "last_rows": target.query_start_loc[1:] - 1 - target.num_rejected,
    }
    max_num_reqs = len(inputs.seq_lens)
    for name, values in rows.items():
        buffer = getattr(inputs, name)
        buffer[:num_reqs] = values
        buffer[num_reqs:max_num_reqs] = -1 if name == "idx_mapping" else 0
    starts = torch.arange(max_num_reqs + 1, device=slots.device, dtype=torch.int32)
    inputs.query_start_loc.copy_(starts.clamp(max=num_reqs))
    inputs.columns.zero_()


def advance_draft_inputs(
    inputs: DraftInputs, drafts: Drafts, tokens: torch.Tensor, confidences: torch.Tensor, max_model_len: int
) -> None:
    """Keep what a draft step drafted, and make it the next step's input.

    A row past its last KV slot writes nowhere from there on; what it drafts then is not worth much.

    Args:
        inputs, drafts: overwritten in the rows that were drafted.
        tokens: [num_rows] int64.
        confidences: [num_rows] float32.
    """
    num_rows, K = len(tokens), drafts.tokens.shape[1]
    column = inputs.columns[:num_rows, None]
    drafts.tokens[:num_rows].scatter_(1, column, tokens[:, None])
    drafts.confidences[:num_rows].scatter_(1, column, confidences[:, None])
    inputs.columns[:num_rows] = (column[:, 0] + 1) % K
    inputs.input_ids[:num_rows] = tokens.int()
    positions = inputs.positions[:num_rows] + 1
    inputs.idx_mapping[:num_rows].masked_fill_(positions >= inputs.position_limit[:num_rows], -1)
    positions.clamp_(max=max_model_len - 1)
    inputs.positions[:num_rows] = positions
    inputs.seq_lens[:num_rows] = (positions + 1).int()
