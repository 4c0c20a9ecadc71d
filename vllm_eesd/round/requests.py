"""What the runners know of each running request: what it asked for, and what bounds its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_eesd.policy import GREEDY, DraftLengthPolicy
from vllm_eesd.request_options import RequestOptions
from vllm_eesd.round.second_drafter import DraftChances


class NewRequest(NamedTuple):
    """What a runner knows of a request that starts: its sampling parameters, prompt length and LoRA adapter, if any."""

    params: Any
    num_prompt_tokens: int
    lora_name: str


class RunningRequests:
    """What the request in each slot asked for, read once, as it is admitted.

    Args:
        max_num_reqs: slots, the most requests the engine runs at once.
        num_speculative_tokens: the engine's longest draft.
        policy: told when a slot changes hands.
        ngrams: so is it; None where there are no n-gram drafts.
        kind_of: returns the kind of a request's drafts, of its sampling parameters; None: all are greedy.
    Attributes:
        updates_shared_prior: [max_num_reqs] bool, whether a slot's outcomes may teach what other requests use.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        policy: DraftLengthPolicy,
        ngrams: DraftChances | None = None,
        kind_of: Callable[[Any], int] | None = None,
    ) -> None:
        self.max_num_reqs, self.num_speculative_tokens = max_num_reqs, num_speculative_tokens
        self._policy, self._ngrams, self._kind_of = policy, ngrams, kind_of
        self._token_budget = np.zeros(max_num_reqs, dtype=np.int64)
        self._longest_draft = np.zeros(max_num_reqs, dtype=np.int64)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_reqs
        self.updates_shared_prior = np.ones(max_num_reqs, dtype=bool)

    def admit(self, slots: np.ndarray, requests: Sequence[NewRequest], max_model_len: int) -> None:
        """Read what new requests ask for, and start their policies afresh.

        Args:
            slots: [num_requests] int64, distinct: where the requests now live.
            requests: num_requests of them.
        """
        keys, kinds = [], []
        for (params, num_prompt_tokens, lora_name), slot in zip(requests, slots.tolist(), strict=True):
            options = RequestOptions.parse(params.extra_args)
            allowed = options.max_draft_tokens if options.enabled else 0
            self._longest_draft[slot] = min(allowed, self.num_speculative_tokens)
            budget = max_model_len if params.max_tokens is None else params.max_tokens + num_prompt_tokens
            self._token_budget[slot] = min(budget, max_model_len)
            self._stop_token_ids[slot] = _ending_token_ids(params)
            self.updates_shared_prior[slot] = not _alters_distribution(params)
            keys.append(lora_name)
            kinds.append(GREEDY if self._kind_of is None else self._kind_of(params))
        self._policy.reset(slots, keys, kinds)
        if self._ngrams is not None:
            self._ngrams.reset(slots)

    def longest_drafts(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Return how many draft tokens, and one more, still fit each request's budget, [num_rows] int64.

        Args:
            slots: [num_rows] int64.
            num_tokens: [num_rows] int64, prompt and output so far.
        """
        left = self._token_budget[slots] - num_tokens - 1
        return np.maximum(np.minimum(self._longest_draft[slots], left), 0)

    def draft_limits(self, slots: np.ndarray, num_tokens: np.ndarray, emitted: list[list[int]]) -> np.ndarray:
        """Return the longest draft each row may have, [num_rows] int64.

        A round emits up to k + 1 tokens, which must fit the request's budget; a row that emitted nothing (a prompt
        chunk) or its last token drafts nothing.

        Args:
            slots: [num_rows] int64.
            num_tokens: [num_rows] int64, prompt and output so far.
            emitted: num_rows lists, of the step just run.
        """
        limits = self.longest_drafts(slots, num_tokens)
        for row, (slot, tokens) in enumerate(zip(slots.tolist(), emitted, strict=True)):
            if not tokens or tokens[-1] in self._stop_token_ids[slot]:
                limits[row] = 0
        return limits


def _ending_token_ids(params: Any) -> frozenset[int]:
    """Return the tokens that end the request; `all_stop_token_ids` would hold an EOS that it ignores, too."""
    ending = set(params.stop_token_ids or ())
    if not params.ignore_eos and params.eos_token_id is not None:
        ending.add(params.eos_token_id)
    return frozenset(ending)


def _alters_distribution(params: Any) -> bool:
    """Return whether the request samples from something else than the model's own distribution.

    Its acceptance says little about other requests' (vLLM issue 57533 is a case of that leak).
    """
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
        or params.structured_outputs is not None
    )
