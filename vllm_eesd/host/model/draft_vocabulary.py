"""The rows of the target's LM head that a pruned head drafts from, gathered while the model loads."""

from __future__ import annotations

import torch
from torch import nn

from vllm_eesd.host.compat import (
    LogitsProcessor,
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    get_tp_group,
)


class DraftVocabulary(nn.Module):
    """An LM head over some of the target's tokens; with tensor parallelism each rank holds its share of them.

    Must be made inside `set_current_vllm_config`, on the target's device and with its dtype as the default.

    Args:
        target: loaded.
        token_ids: [draft_vocab_size] int64, the target's ids in ascending order.
    Raises:
        ValueError: the target's LM head is no plain matrix.
    """

    def __init__(self, target: nn.Module, token_ids: torch.Tensor) -> None:
        super().__init__()
        whole, processor = target.lm_head, target.logits_processor
        method = whole.quant_method
        plain = isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)) and whole.bias is None
        # A linear method on a CPU has packed the matrix away, and left an empty one.
        if not plain or whole.weight.ndim != 2:
            raise ValueError(
                f"eesd: the head has a draft vocabulary, which needs an LM head that is one unquantised matrix; the "
                f"target's is run by {type(method).__name__}: distill a head with --draft-vocab all"
            )
        #: [draft_vocab_size] int64; a tuple, because it is the head's checkpoint's, not a weight of this module.
        self._token_ids = (token_ids.to(whole.weight.device),)
        self._vocab_size = whole.org_vocab_size
        self.lm_head = ParallelLMHead(len(token_ids), whole.embedding_dim, prefix="eesd_exit.lm_head")
        self._gather(whole)
        self._processor = LogitsProcessor(len(token_ids), scale=processor.scale, soft_cap=processor.soft_cap)

    def target_changed(self, target: nn.Module) -> None:
        """Gather the rows again: the target's weights are others than while the model was loaded."""
        self._gather(target.lm_head)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)

    def _gather(self, whole: nn.Module) -> None:
        self.lm_head.weight_loader(self.lm_head.weight, _rows(whole, self._token_ids[0]))

    @property
    def token_ids(self) -> torch.Tensor:
        """[draft_vocab_size] int64, the target's ids in ascending order."""
        return self._token_ids[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the draft vocabulary, [num_rows, draft_vocab_size]."""
        return self._processor(self.lm_head, hidden_states)

    def token_ids_of(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids, [num_rows] int64; where the largest of NaNs was, an id that exists."""
        (token_ids,) = self._token_ids
        return token_ids[draft_ids.clamp(0, len(token_ids) - 1)]

    def whole(self, values: torch.Tensor, elsewhere: float) -> torch.Tensor:
        """Return values of the target's vocabulary, [num_rows, vocab_size]: `elsewhere` for what is never drafted.

        Args:
            values: [num_rows, draft_vocab_size], logits or probabilities.
        """
        scattered = values.new_full((len(values), self._vocab_size), elsewhere)
        return scattered.index_copy_(1, self._token_ids[0], values)


def _rows(lm_head: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Return these rows of an LM head whose rows are spread over the ranks, [draft_vocab_size, hidden_size]."""
    first, end = lm_head.shard_indices.org_vocab_start_index, lm_head.shard_indices.org_vocab_end_index
    here = (token_ids >= first) & (token_ids < end)
    weight = lm_head.weight.data
    rows = weight.new_zeros(len(token_ids), lm_head.embedding_dim)
    rows[here] = weight[token_ids[here] - first]
    # Every row is on one rank and zero on the others, so the sum is exact.
    return get_tp_group().all_reduce(rows) if get_tp_group().world_size > 1 else rows
