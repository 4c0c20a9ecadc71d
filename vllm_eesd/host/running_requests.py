"""What the adapter knows of each running request: its policy slot, and what bounds its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_eesd.host.v1_batch import V1Step
from vllm_eesd.policy import DraftLengthPolicy
from vllm_eesd.request_options import RequestOptions
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.round.slots import RequestSlots


class NewRequest(NamedTuple):
    """What a runner knows of a request that starts: its sampling parameters, prompt length and LoRA adapter, if any."""

    params: Any
    num_prompt_tokens: int
    lora_name: str


class RunningRequests:
    """Slots of the running requests; what a request asked for is read once, at its first round.

    Args:
        max_num_reqs: the most the engine runs at once.
        num_speculative_tokens: the engine's longest draft.
        policy: told when a slot changes hands.
        ngrams: so is it; None where there are no n-gram drafts.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        policy: DraftLengthPolicy,
        ngrams: NgramDrafter | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._policy, self._ngrams = policy, ngrams
        self._max_num_reqs = max_num_reqs
        self._slots = RequestSlots(max_num_reqs)
        self._token_budget = np.zeros(max_num_reqs, dtype=np.int64)
        self._longest_draft = np.zeros(max_num_reqs, dtype=np.int64)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_reqs
        #: The batch of the last step and its slots.
        self._last: tuple[list[str], np.ndarray] = [], np.zeros(0, dtype=np.int64)
        #: [max_num_reqs] bool: whether a slot's outcomes may teach what other requests use.
        self.updates_shared_prior = np.ones(max_num_reqs, dtype=bool)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> np.ndarray:
        """Slots in use, [num_requests] int64."""
        return self._slots.in_use()

    @property
    def last_slots(self) -> np.ndarray:
        """Slots of the batch of the last step decided on, [num_reqs] int64."""
        return self._last[1]

    def forget(self) -> None:
        """Give every slot back, as if no request had been seen."""
        self._slots = RequestSlots(self._max_num_reqs)
        self._last = [], np.zeros(0, dtype=np.int64)

    def slots_of(self, step: V1Step) -> np.ndarray:
        """Return the slot of each row of a step's batch, [num_reqs] int64; not to be written to."""
        last_ids, slots = self._last
        request_ids = step.req_ids
        if not step.finished and request_ids == last_ids:
            return slots
        self._slots.release(step.finished)
        # A finish announced in a step that scheduled no tokens is seen by no round; release such requests here.
        self._slots.release([name for name in self._slots.request_ids() if name not in step.requests])
        slots, new = self._slots.assign(request_ids)
        if new.any():
            requests = [_describe(step.requests[request_ids[row]]) for row in np.flatnonzero(new)]
            self.admit(slots[new], requests, step.max_model_len)
        self._last = list(request_ids), slots
        return slots

    def admit(self, slots: np.ndarray, requests: Sequence[NewRequest], max_model_len: int) -> None:
        """Read what new requests ask for, and start their policies afresh.

        Args:
            slots: [num_requests] int64, distinct: where the requests now live.
            requests: num_requests of them.
        """
        keys = []
        for (params, num_prompt_tokens, lora_name), slot in zip(requests, slots.tolist(), strict=True):
            options = RequestOptions.parse(params.extra_args)
            allowed = options.max_draft_tokens if options.enabled else 0
            self._longest_draft[slot] = min(allowed, self.num_speculative_tokens)
            budget = max_model_len if params.max_tokens is None else params.max_tokens + num_prompt_tokens
            self._token_budget[slot] = min(budget, max_model_len)
            self._stop_token_ids[slot] = frozenset(params.all_stop_token_ids)
            self.updates_shared_prior[slot] = not _alters_distribution(params)
            keys.append(lora_name)
        self._policy.reset(slots, keys)
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


def _describe(request: Any) -> NewRequest:
    lora = getattr(request, "lora_request", None)
    return NewRequest(request.sampling_params, request.num_prompt_tokens, "" if lora is None else lora.lora_name)


def _alters_distribution(params: Any) -> bool:
    """Return whether the request samples from something else than the model's own distribution.

    Its acceptance says little about other requests' (vLLM issue 57533 is a case of that leak).
    """
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.allowed_token_ids
        or params.structured_outputs is not None
    )
