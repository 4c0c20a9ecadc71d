"""N-gram drafts: what followed when a text last ended as it does now."""

import torch

__all__ = ["find_ngrams", "put_ngrams"]


def find_ngrams(
    texts: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    max_match: int,
    max_searched: int,
) -> torch.Tensor:
    """Compare each row's last n-gram draft with what was emitted since, and find the next one.

    A draft is the tokens after the longest earlier occurrence of the text's end (of several, the latest); where the
    text ends it goes on with the draft itself. -1 throughout where the last token did not occur before.

    Args:
        texts: [max_num_reqs, longest text] int32, prompt and output of each request state.
        num_tokens: [max_num_reqs] int32, of each text, those of the step included.
        idx_mapping: [num_reqs], the request state of each row; negative for none.
        num_sampled: [num_reqs] int32, tokens the step emitted; a row with none keeps its draft.
        drafts: [max_num_reqs, K] int64, by request state; overwritten.
        max_match: the longest match told apart from longer ones.
        max_searched: tokens at a text's end that are searched.
    Returns:
        [num_reqs, 3] int32: tokens emitted; how many of them, from the first, the last draft had right; and how many
        tokens at the text's end stand before it too, at most `max_match`.
    """
    found = torch.zeros(len(idx_mapping), 3, dtype=torch.int32, device=idx_mapping.device)
    longest = drafts.shape[1]
    for row, (slot, emitted) in enumerate(zip(idx_mapping.tolist(), num_sampled.tolist(), strict=True)):
        found[row, 0] = emitted
        if slot < 0 or emitted == 0:
            continue
        text = texts[slot, : num_tokens[slot]]
        judged = min(emitted, longest)
        right = text[len(text) - emitted :][:judged] == drafts[slot, :judged]
        found[row, 1] = right.int().cumprod(0).sum()
        text = text[-max_searched:]
        matched, follower = _longest_match(text, max_match)
        found[row, 2] = matched
        offsets = follower + torch.arange(longest, device=text.device) % (len(text) - follower)
        drafts[slot] = text[offsets].long() if matched else -1
    return found


def _longest_match(text: torch.Tensor, max_match: int) -> tuple[int, int]:
    """Return how many tokens at the text's end stand somewhere before, at most `max_match`, and what follows them."""
    last = len(text) - 1
    matched = torch.zeros(last, dtype=torch.int64, device=text.device)
    alive = torch.ones(last, dtype=torch.bool, device=text.device)
    for j in range(min(max_match, last)):
        alive[j:] &= text[: last - j] == text[last - j]
        alive[:j] = False
        matched += alive
    longest = int(matched.max()) if last else 0
    return (longest, int(torch.nonzero(matched == longest).max()) + 1) if longest else (0, 0)


def put_ngrams(
    drafts: torch.Tensor,
    idx_mapping: torch.Tensor,
    taken: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
) -> None:
    """Make n-gram drafts the drafts of the rows that take them.

    A row that takes a draft and has none keeps the tokens it had, 0 for those that are negative. Either way all K are
    verified as one-hot: the logits of an earlier draft in that row say nothing of them.

    Args:
        drafts: [max_num_reqs, K] int64, of `find_ngrams`.
        idx_mapping: [num_reqs], the request state of each row; negative for none.
        taken: [num_reqs] bool.
        draft_tokens: [num_reqs, K] int64; written.
        draft_logits: [max_num_reqs, K, vocab_size], by request state, where drafts are drawn; written.
    """
    for row, (slot, takes) in enumerate(zip(idx_mapping.tolist(), taken.tolist(), strict=True)):
        if slot < 0 or not takes:
            continue
        draft_tokens[row] = torch.where(drafts[slot] >= 0, drafts[slot], draft_tokens[row].clamp(min=0))
        if draft_logits is not None:
            draft_logits[slot] = torch.finfo(draft_logits.dtype).min
            draft_logits[slot].scatter_(1, draft_tokens[row][:, None], 0.0)
