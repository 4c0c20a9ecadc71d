"""N-gram drafts on Model Runner V2: the device finds them in its own copy of every text, and no value comes back.

The host decides whether a row takes one from how far its text matched `READBACK_DELAY` steps ago
(`round/ngram.py:NgramRates`); the tokens are those of the text as it stands.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_eesd.host.v2.batch import RequestStates, TargetStep
from vllm_eesd.host.v2.compat import async_tensor_h2d
from vllm_eesd.kernels.gpu.ngram import find_ngrams, put_ngrams
from vllm_eesd.round.ngram import MAX_MATCH, MAX_SEARCHED


class DeviceNgrams:
    """The n-gram draft of the text in every request state.

    Args:
        states: the runner's, whose texts are searched.
    Source: vllm/v1/worker/gpu/spec_decode/ngram/speculator.py searches the same texts.
    """

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        #: [max_num_reqs, K] int64.
        self._drafts = torch.full_like(states.draft_tokens, -1)
        self._no_drafts = torch.full_like(states.draft_tokens, -1)

    def find(self, step: TargetStep) -> torch.Tensor:
        """Judge each row's last draft by what the step emitted, and find the next.

        Returns:
            [num_reqs, 3] int32, see `kernels/reference/ngram.py:find_ngrams`.
        """
        return self._find(step.idx_mapping, step.num_sampled)

    def _find(self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
        return find_ngrams(*self._states.texts(), idx_mapping, num_sampled, self._drafts, MAX_MATCH, MAX_SEARCHED)

    def put(
        self,
        taken: np.ndarray,
        idx_mapping: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor | None,
    ) -> None:
        """Make the drafts found those of the rows that take them, certain under drawn drafts.

        Args:
            taken: [num_reqs] bool.
            idx_mapping: [num_reqs], request states.
            draft_tokens: [num_reqs, K] int64; written.
            draft_logits: [max_num_reqs, K, vocab_size], if the speculator keeps any; written.
        """
        on_device = async_tensor_h2d(taken, device=draft_tokens.device)
        put_ngrams(self._drafts, idx_mapping, on_device, draft_tokens, draft_logits)

    def make_certain(
        self, rows: np.ndarray, idx_mapping: torch.Tensor, draft_tokens: torch.Tensor, draft_logits: torch.Tensor
    ) -> None:
        """Have the drafts of these rows, [num_reqs] bool, verified as one-hot; the rest as for `put`."""
        on_device = async_tensor_h2d(rows, device=draft_tokens.device)
        put_ngrams(self._no_drafts, idx_mapping, on_device, draft_tokens, draft_logits)

    def warm_up(self, draft_tokens: torch.Tensor, draft_logits: torch.Tensor | None) -> None:
        """Have the kernels compiled: for no request, with arguments as serving passes them."""
        device = draft_tokens.device
        idx_mapping = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._find(idx_mapping, torch.zeros(1, dtype=torch.int32, device=device))
        self.put(np.zeros(1, dtype=bool), idx_mapping, draft_tokens[:1], draft_logits)
