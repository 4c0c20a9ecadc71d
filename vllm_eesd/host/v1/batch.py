"""What EESD reads of a step of Model Runner V1, and the slots of its requests, which move between batch rows.

Nothing else reads attributes of the runner's batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.v1.shared_noise import knows, processed_rows
from vllm_eesd.host.v1.thinking import count_by_request
from vllm_eesd.round.requests import NewRequest
from vllm_eesd.round.slots import RequestSlots

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class V1Step:
    """The step of the target that has just run, after vLLM's bookkeeping.

    Args:
        runner: vLLM's GPUModelRunner (CPUModelRunner on a CPU).
        scheduler_output: of the step.
        emitted: per batch row the tokens emitted; empty for a prompt chunk.
    Source: vllm/v1/worker/gpu_input_batch.py, vllm/v1/core/sched/output.py.
    """

    def __init__(self, runner: GPUModelRunner, scheduler_output: SchedulerOutput, emitted: list[list[int]]) -> None:
        self.runner, self.emitted = runner, emitted
        self._batch, self._scheduled = runner.input_batch, scheduler_output
        #: Of the rows, in batch order; vLLM's own list, not to be kept.
        self.req_ids: list[str] = runner.input_batch.req_ids
        #: Requests that ended since the last step, and tokens of the step's forward.
        self.finished: set[str] = scheduler_output.finished_req_ids
        #: Requests preempted since: they come back without the drafts they had.
        self.preempted: set[str] = scheduler_output.preempted_req_ids or set()
        self.num_scheduled_tokens: int = scheduler_output.total_num_scheduled_tokens

    def __len__(self) -> int:
        return len(self.emitted)

    def only_decoded(self) -> bool:
        """Return whether every row ran one token and emitted one, and no request has ended since."""
        return not self.finished and self.num_scheduled_tokens == len(self) and all(self.emitted)

    def decoded(self) -> np.ndarray:
        """Return which rows ran the last token of their output, drafts aside, and emitted some, [num_reqs] bool.

        A prompt does not, nor does one that a preempted request runs again, output and all.
        """
        scheduled, drafts = self._scheduled.num_scheduled_tokens, self._scheduled.scheduled_spec_decode_tokens
        ran_one = [scheduled[name] == 1 + len(drafts.get(name, ())) for name in self.req_ids]
        num_emitted = np.array([len(tokens) for tokens in self.emitted])
        had_output = self.num_tokens() - self.num_prompt_tokens() > num_emitted
        return np.array(ran_one, dtype=bool) & (num_emitted > 0) & had_output

    def num_tokens(self) -> np.ndarray:
        """Return the length of each row's text, prompt and output, [num_reqs] int64."""
        return self._batch.num_tokens_no_spec[: len(self)].astype(np.int64)

    def num_prompt_tokens(self) -> np.ndarray:
        """Return the length of each row's prompt, [num_reqs]."""
        return self._batch.num_prompt_tokens[: len(self)]

    def prompt(self, row: int) -> list[int]:
        """Return a row's prompt, token ids."""
        return self._batch.token_ids_cpu[row, : self._batch.num_prompt_tokens[row]].tolist()

    def texts(self) -> np.ndarray:
        """Return the text of every row, prompt and output, [at least num_reqs, longest text] int32."""
        return self._batch.token_ids_cpu

    def judged_drafts(self) -> list[list[int]]:
        """Return per row the draft tokens that the target judged.

        vLLM marks placeholders, and drafts that a grammar cut, with -1: those were not judged.
        """
        scheduled = self._scheduled.scheduled_spec_decode_tokens
        return [[token for token in scheduled.get(name, ()) if token >= 0] for name in self.req_ids]

    def input_token_ids(self) -> np.ndarray:
        """Return the last token each row emitted, [num_reqs] int64; 0 where it emitted none."""
        return np.array([tokens[-1] if tokens else 0 for tokens in self.emitted], dtype=np.int64)

    def input_hidden_rows(self) -> torch.Tensor:
        """Return which row of the step's hidden states each row's input token was sampled from, [num_reqs] int64.

        The hidden states hold one for every scheduled draft of a row, placeholders included, and one more.
        """
        scheduled = self._scheduled.scheduled_spec_decode_tokens
        num_judged = np.array([len(scheduled.get(name, ())) + 1 for name in self.req_ids])
        num_emitted = np.array([len(tokens) for tokens in self.emitted])
        return torch.from_numpy(num_judged.cumsum() - num_judged + (num_emitted - 1).clip(min=0))

    def has_adapter(self) -> np.ndarray:
        """Return which rows' requests have a LoRA adapter, [num_reqs] bool."""
        if not self.runner.lora_config:
            return np.zeros(len(self), dtype=bool)
        return self._batch.request_lora_mapping[: len(self)] != 0

    def temperatures(self) -> np.ndarray:
        """Return each row's temperature, [num_reqs] float32; 0 is greedy."""
        return self._batch.temperature_cpu[: len(self.req_ids)]

    def top_k_and_top_p(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return each row's top-k and top-p, [num_reqs], the vocabulary's size and 1 where it has none; None: none has.

        They are those of the last batch sampled: it has these rows.
        """
        batch, num_reqs = self._batch, len(self.req_ids)
        top_k = None if batch.no_top_k else batch.top_k_cpu_tensor[:num_reqs]
        return top_k, None if batch.no_top_p else batch.top_p_cpu_tensor[:num_reqs]

    def generators(self) -> dict[int, torch.Generator]:
        """Return the generators of the rows whose requests have one of their own, as those with a seed do."""
        return self._batch.generators

    def noise_sampler(self) -> Callable[..., tuple[torch.Tensor, object]]:
        """Return what makes tokens of logits at their temperatures, generators by row, and top-k and top-p."""
        return self.runner.sampler.topk_topp_sampler

    def has_grammar(self) -> np.ndarray:
        """Return which rows' requests have a grammar, [num_reqs] bool."""
        params = (self.requests[request_id].sampling_params for request_id in self.req_ids)
        return np.array([p.structured_outputs is not None for p in params], dtype=bool)

    @property
    def requests(self) -> dict[str, CachedRequestState]:
        """vLLM's CachedRequestState of every request of the engine, by id."""
        return self.runner.requests

    @property
    def max_model_len(self) -> int:
        """The longest text, in tokens."""
        return self.runner.max_model_len


class BatchSlots:
    """The slot of every running request, which moves between batch rows.

    Args:
        max_num_reqs: slots.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._max_num_reqs = max_num_reqs
        self.forget()

    def forget(self) -> None:
        """Give every slot back, as if no request had been seen."""
        self._slots = RequestSlots(self._max_num_reqs)
        #: The batch of the last step and its slots.
        self._last: tuple[list[str], np.ndarray] = [], np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def in_use(self) -> np.ndarray:
        """Return the slots that requests have, [num_requests] int64."""
        return self._slots.in_use()

    def of(self, step: V1Step, admit: Callable[[np.ndarray, list[NewRequest], int], None]) -> np.ndarray:
        """Return the slot of each row of a step's batch, [num_reqs] int64; not to be written to.

        Args:
            admit: called with the slots of the requests that are new, what they ask for, and the longest text.
        """
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
            admit(slots[new], requests, step.max_model_len)
        self._last = list(request_ids), slots
        return slots


def block_table_of(runner: GPUModelRunner, group_id: int) -> BlockTable:
    """Return the batch's block table of a KV-cache group."""
    return runner.input_batch.block_table[group_id]


def sampling_of(runner: GPUModelRunner) -> tuple[SamplingMetadata, list[str]]:
    """Return what the rows of the batch are sampled with, and their requests."""
    return runner.input_batch.sampling_metadata, runner.input_batch.req_ids


def has_unknown_processors(runner: GPUModelRunner) -> bool:
    """Return whether the engine has logits processors that are not vLLM's: what they do is known of no draft."""
    return not knows(runner.input_batch.logitsprocs.all)


def processed_rows_of(runner: GPUModelRunner) -> set[int]:
    """Return `processed_rows` of the batch."""
    batch = runner.input_batch
    return processed_rows(batch.logitsprocs.all, batch.thinking_budget_state_holder, len(batch.req_ids))


def count_thoughts_by_request(runner: GPUModelRunner) -> None:
    """See `count_by_request`; called before a batch is sampled."""
    batch = runner.input_batch
    holder = batch.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        params = (runner.requests[request_id].sampling_params for request_id in batch.req_ids)
        count_by_request(holder, [p is not None and p.thinking_token_budget is not None for p in params])


@contextlib.contextmanager
def sampled_with(runner: GPUModelRunner, sampling: SamplingMetadata) -> Iterator[None]:
    """Have the batch sampled with other metadata than its own."""
    batch = runner.input_batch
    own, batch.sampling_metadata = batch.sampling_metadata, sampling
    try:
        yield
    finally:
        batch.sampling_metadata = own


def seed_requests(runner: GPUModelRunner, every: bool) -> None:
    """Give requests that sample without a seed a generator of their own, seeded by the process's.

    Args:
        every: all of them; otherwise those that can be verified by shared noise only, see `processed_rows`.
    """
    input_batch = runner.input_batch
    if len(input_batch.generators) == len(input_batch.random_reqs):
        return
    processed = () if every else processed_rows_of(runner)
    for row, request_id in enumerate(input_batch.req_ids):
        if not every and row not in processed:
            continue
        if request_id in input_batch.random_reqs and row not in input_batch.generators:
            generator = torch.Generator()
            generator.manual_seed(int(torch.randint(2**63 - 1, ())))
            input_batch.generators[row] = runner.requests[request_id].generator = generator


@contextlib.contextmanager
def discarded_rows_draw_nothing(runner: GPUModelRunner) -> Iterator[None]:
    """Within this context, rows whose sampled token is discarded, those of prompt chunks, have no generator.

    vLLM sets such a generator back by its offset, which a CPU's has not: plain vLLM 0.32 ends there.
    """
    input_batch = runner.input_batch
    discarded = runner.discard_request_mask.np[: input_batch.num_reqs]
    kept = {row: generator for row, generator in input_batch.generators.items() if discarded[row]}
    for row in kept:
        del input_batch.generators[row]
    try:
        yield
    finally:
        input_batch.generators.update(kept)


def _describe(request: CachedRequestState) -> NewRequest:
    lora = request.lora_request
    return NewRequest(request.sampling_params, request.num_prompt_tokens, "" if lora is None else lora.lora_name)
