"""The running requests of Model Runner V1, which moves them between batch rows: each keeps a slot of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_eesd.host.v1.batch import V1Step
from vllm_eesd.round.requests import NewRequest, RunningRequests
from vllm_eesd.round.slots import RequestSlots


class BatchRequests(RunningRequests):
    """Running requests by id; see `RunningRequests` for the arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forget()

    def forget(self) -> None:
        """Give every slot back, as if no request had been seen."""
        self._slots = RequestSlots(self.max_num_reqs)
        #: The batch of the last step and its slots.
        self._last: tuple[list[str], np.ndarray] = [], np.zeros(0, dtype=np.int64)

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


def _describe(request: Any) -> NewRequest:
    lora = getattr(request, "lora_request", None)
    return NewRequest(request.sampling_params, request.num_prompt_tokens, "" if lora is None else lora.lora_name)
