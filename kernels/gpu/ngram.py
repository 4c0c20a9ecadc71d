"""N-gram drafts on the device: a scan of every text in blocks, and one program a row that finishes.

1. `_scan_kernel`, grid (requests, blocks of the text): per block the longest match that ends in it, the latest of
   several, packed with where it ends into one number. Bytes: the text once; its 16 shifted reads come from the cache.
2. `_finish_kernel`, grid (requests,): judges the last draft, takes the best block's match, and writes the draft.
"""

import torch
import triton
import triton.language as tl

__all__ = ["find_ngrams", "put_ngrams"]

# Tokens of a text per program.
SCAN_BLOCK = 1024
# Logits per program of `_put_kernel`.
VOCAB_BLOCK = 4096


@triton.jit
def _scan_kernel(
    best_ptr,  # [num_reqs, num_blocks] int32: matched * (MAX_SEARCHED + 1) + the token after, 0 for no match
    texts_ptr,
    text_stride,
    num_tokens_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    num_blocks,
    MAX_MATCH: tl.constexpr,
    MAX_SEARCHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    length = 0
    if (slot >= 0) & (tl.load(num_sampled_ptr + row) > 0):
        length = tl.load(num_tokens_ptr + slot)
    first = tl.maximum(length - MAX_SEARCHED, 0)
    last = length - first - 1
    text_ptr = texts_ptr + slot * text_stride + first
    ends = block * BLOCK + tl.arange(0, BLOCK)
    # Triton 3.6 keeps a mask that lives from one comparison to the next on the stack: a match is alive if its length is
    # the number of comparisons so far.
    matched = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(MAX_MATCH):
        alive = (matched == j) & (ends < last) & (ends >= j)
        token = tl.load(text_ptr + ends - j, mask=alive, other=-1)
        wanted = tl.load(text_ptr + last - j, mask=j < last, other=-2)
        matched += (alive & (token == wanted)).to(tl.int32)
    best = tl.max(tl.where(matched > 0, matched * (MAX_SEARCHED + 1) + ends + 1, 0), axis=0)
    tl.store(best_ptr + row * num_blocks + block, best)


@triton.jit
def _finish_kernel(
    found_ptr,  # [num_reqs, 3] int32
    drafts_ptr,  # [max_num_reqs, K] int64
    best_ptr,
    texts_ptr,
    text_stride,
    num_tokens_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    num_blocks,
    K,
    MAX_SEARCHED: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + row)
    tl.store(found_ptr + row * 3, num_sampled)
    num_right, matched = 0, 0
    if (slot >= 0) & (num_sampled > 0):
        length = tl.load(num_tokens_ptr + slot)
        text_ptr = texts_ptr + slot * text_stride
        steps = tl.arange(0, K_PADDED)
        num_judged = tl.minimum(num_sampled, K)
        is_judged = steps < num_judged
        emitted = tl.load(text_ptr + length - num_sampled + steps, mask=is_judged, other=-1)
        draft_ptr = drafts_ptr + slot * K
        draft = tl.load(draft_ptr + steps, mask=is_judged, other=-1)
        num_right = tl.min(tl.where(is_judged & (draft != emitted), steps, num_judged), axis=0)

        blocks = tl.arange(0, BLOCKS_PADDED)
        best = tl.max(tl.load(best_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=0), axis=0)
        first = tl.maximum(length - MAX_SEARCHED, 0)
        matched = best // (MAX_SEARCHED + 1)
        follower = best % (MAX_SEARCHED + 1)
        period = length - first - follower
        offsets = first + follower + steps % period
        tokens = tl.load(text_ptr + offsets, mask=steps < K, other=0).to(tl.int64)
        tl.store(draft_ptr + steps, tl.where(matched > 0, tokens, -1), mask=steps < K)
    tl.store(found_ptr + row * 3 + 1, num_right)
    tl.store(found_ptr + row * 3 + 2, matched)


@triton.jit
def _put_kernel(
    draft_tokens_ptr,  # [num_reqs, K] int64
    draft_tokens_stride,
    draft_logits_ptr,  # [max_num_reqs, K, vocab_size], or None
    draft_logits_stride_0,
    draft_logits_stride_1,
    drafts_ptr,  # [max_num_reqs, K] int64
    idx_mapping_ptr,
    taken_ptr,  # [num_reqs] bool
    vocab_size,
    K,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, step, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if (slot < 0) | (tl.load(taken_ptr + row) == 0):
        return
    cell_ptr = draft_tokens_ptr + row * draft_tokens_stride + step
    token = tl.load(drafts_ptr + slot * K + step)
    # Where no n-gram was found the cell keeps its token; vLLM writes -1 where it wants no drafts, which is none.
    if token < 0:
        token = tl.maximum(tl.load(cell_ptr), 0)
    if block == 0:
        tl.store(cell_ptr, token)
    if draft_logits_ptr is not None:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        logits_ptr = draft_logits_ptr + slot * draft_logits_stride_0 + step * draft_logits_stride_1
        tl.store(logits_ptr + columns, tl.where(columns == token, 0.0, LOWEST), mask=columns < vocab_size)


def find_ngrams(
    texts: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    max_match: int,
    max_searched: int,
) -> torch.Tensor:
    """Compare each row's last n-gram draft with what was emitted since, and find the next; see `reference.ngram`."""
    assert texts.stride(1) == 1 and drafts.is_contiguous()
    num_reqs, K = len(idx_mapping), drafts.shape[1]
    longest = min(texts.shape[1], max_searched)
    block = min(SCAN_BLOCK, max(16, triton.next_power_of_2(longest)))
    num_blocks = triton.cdiv(longest, block)
    best = drafts.new_empty(num_reqs, num_blocks, dtype=torch.int32)
    found = drafts.new_empty(num_reqs, 3, dtype=torch.int32)
    requests = texts, texts.stride(0), num_tokens, idx_mapping, num_sampled
    sizes = {"MAX_MATCH": max_match, "MAX_SEARCHED": max_searched}
    _scan_kernel[num_reqs, num_blocks](best, *requests, num_blocks, **sizes, BLOCK=block, num_warps=4)
    _finish_kernel[(num_reqs,)](
        found,
        drafts,
        best,
        *requests,
        num_blocks,
        K,
        MAX_SEARCHED=max_searched,
        K_PADDED=triton.next_power_of_2(K),
        BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return found


def put_ngrams(
    drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    taken: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
) -> None:
    """Make n-gram drafts the drafts of the rows that take them; see `reference.ngram`."""
    assert draft_tokens.stride(1) == 1 and drafts.is_contiguous()
    num_reqs, K = draft_tokens.shape
    vocab_size, strides, lowest = 1, (0, 0), 0.0
    if draft_logits is not None:
        assert draft_logits.stride(2) == 1
        vocab_size, strides = draft_logits.shape[2], draft_logits.stride()[:2]
        lowest = torch.finfo(draft_logits.dtype).min
    _put_kernel[num_reqs, K, triton.cdiv(vocab_size, VOCAB_BLOCK)](
        draft_tokens,
        draft_tokens.stride(0),
        draft_logits,
        *strides,
        drafts,
        idx_mapping,
        taken,
        vocab_size,
        K,
        LOWEST=lowest,
        BLOCK=VOCAB_BLOCK,
        num_warps=4,
    )
