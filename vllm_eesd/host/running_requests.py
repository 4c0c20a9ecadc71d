"""What the adapter knows of each running request: its policy slot, and what bounds its drafts."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_eesd.drafting import RequestSlots
from vllm_eesd.policy import Dispatch
from vllm_eesd.request_options import RequestOptions


class RunningRequests:
    """Slots of the running requests; what a request asked for is read once, at its first round.

    Args:
        max_num_reqs: the most the engine runs at once.
        num_speculative_tokens: the engine's longest draft.
        policy: told when a slot changes hands.
    """

    def __init__(self, max_num_reqs: int, num_speculative_tokens: int, policy: Dispatch) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._policy = policy
        self._slots = RequestSlots(max_num_reqs)
        self._token_budget = np.zeros(max_num_reqs, dtype=np.int64)
        self._longest_draft = np.zeros(max_num_reqs, dtype=np.int64)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_reqs
        #: [max_num_reqs] bool: whether a slot's outcomes may teach what other requests use.
        self.shares = np.ones(max_num_reqs, dtype=bool)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> np.ndarray:
        """Slots in use, [num_requests] int64."""
        return self._slots.in_use()

    def slots_of(self, runner: Any, finished: set[str]) -> np.ndarray:
        """Return the slot of each row of the runner's batch, [num_reqs] int64."""
        self._slots.release(finished)
        request_ids = runner.input_batch.req_ids
        slots, new = self._slots.assign(request_ids)
        if new.any():
            self._admit(runner, [request_ids[row] for row in np.flatnonzero(new)], slots[new])
        return slots

    def _admit(self, runner: Any, request_ids: list[str], slots: np.ndarray) -> None:
        keys, policies = [], []
        for request_id, slot in zip(request_ids, slots.tolist(), strict=True):
            request = runner.requests[request_id]
            params = request.sampling_params
            options = RequestOptions.parse(params.extra_args)
            allowed = options.max_draft_tokens if options.enabled else 0
            self._longest_draft[slot] = min(allowed, self.num_speculative_tokens)
            budget = (
                params.max_tokens + request.num_prompt_tokens if params.max_tokens is not None else runner.max_model_len
            )
            self._token_budget[slot] = min(budget, runner.max_model_len)
            self._stop_token_ids[slot] = frozenset(params.all_stop_token_ids)
            self.shares[slot] = not _alters_distribution(params)
            lora = getattr(request, "lora_request", None)
            keys.append("" if lora is None else lora.lora_name)
            policies.append(options.policy)
        self._policy.choose(slots, policies)
        self._policy.reset(slots, keys)

    def draft_limits(self, slots: np.ndarray, num_tokens: np.ndarray, emitted: list[list[int]]) -> np.ndarray:
        """Return the longest draft each row may have, [num_rows] int64.

        A round emits up to k + 1 tokens, which must fit the request's budget; a row that emitted nothing (a prompt
        chunk) or its last token drafts nothing.

        Args:
            slots: [num_rows] int64.
            num_tokens: [num_rows] int64, prompt and output so far.
            emitted: num_rows lists, of the step just run.
        """
        limits = np.minimum(self._longest_draft[slots], self._token_budget[slots] - num_tokens - 1).clip(min=0)
        for row, tokens in enumerate(emitted):
            if not tokens or tokens[-1] in self._stop_token_ids[slots[row]]:
                limits[row] = 0
        return limits


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
