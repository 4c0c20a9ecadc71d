"""Verification by shared noise on Model Runner V1: a draft is right exactly if plain vLLM would have drawn it.

Every row of logits goes through vLLM's own sampler, which takes the noise of a request's own generator, a draw a token
in the order of the text. A draft is accepted while it equals what that emits, and the generator is set back to where as
many draws as tokens were emitted have left it. So a seeded request's text is plain vLLM's, token for token, whatever
was drafted. Source: arXiv 2408.07978.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_eesd.host.compat import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    LogprobsTensors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SamplerOutput,
    SpecDecodeMetadata,
)
from vllm_eesd.host.v1.thinking import BudgetsOfRows, rows_with_a_budget

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class JudgedDrafts(NamedTuple):
    """Drafts of some requests of a step, as `accept_greedy` reads them of vLLM's SpecDecodeMetadata.

    Attributes:
        draft_token_ids: [sum of num_draft_tokens] int32, one request's after the other's; -1 is a placeholder.
        num_draft_tokens: of each request.
        max_spec_len: the longest draft of the whole step.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]
    max_spec_len: int


class NotedGenerators(dict):
    """Generators by row of logits; notes the state each row's draw leaves its generator in.

    vLLM's samplers draw for one entry after the other: rows of one request have the same generator, in order.

    Attributes:
        states: by row, after its draw.
    """

    def __init__(self, generators: dict[int, torch.Generator]) -> None:
        super().__init__(generators)
        self.states: dict[int, torch.Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:
        for row, generator in super().items():
            yield row, generator
            self.states[row] = generator.get_state()


class SampledRows(NamedTuple):
    """What plain vLLM would emit at each of some requests' rows of logits.

    Attributes:
        requests: ascending, rows of the batch.
        drafts: theirs.
        tokens: [num_rows] token ids.
        logprobs: vLLM's LogprobsTensors with num_rows rows, if any request of the batch wants some.
        generators: by row; not set back yet.
        budgets: of thinking, by row, nothing kept yet; None if none of the requests has one.
    """

    requests: np.ndarray
    drafts: JudgedDrafts
    tokens: list[int]
    logprobs: LogprobsTensors | None
    generators: NotedGenerators
    budgets: BudgetsOfRows | None = None

    def set_back(self, sampled: np.ndarray) -> None:
        """Leave every generator and thinking budget where plain vLLM would, which draws and counts once for a token.

        Args:
            sampled: [num_requests, longest draft + 1] int32, what is emitted; -1 after a request's last token.
        """
        last = (self._first_rows() + (sampled >= 0).sum(axis=1) - 1).tolist()
        if self.budgets is not None:
            self.budgets.keep(last)
        for row in last:
            if (generator := self.generators.get(row)) is not None:
                generator.set_state(self.generators.states[row])

    def logprobs_of(self, width: int) -> LogprobsTensors | None:
        """Return the log-probabilities as vLLM's rejection sampler lays them out, `width` rows a request."""
        if self.logprobs is None:
            return None
        last = np.array(self.drafts.num_draft_tokens)[:, None]
        rows = torch.from_numpy((self._first_rows()[:, None] + np.minimum(np.arange(width), last)).ravel())
        return LogprobsTensors(*(tensor[rows] for tensor in self.logprobs[:3]))

    def _first_rows(self) -> np.ndarray:
        num_rows = np.array(self.drafts.num_draft_tokens) + 1
        return num_rows.cumsum() - num_rows


def sample_rows(
    sampler: Sampler,
    logits: torch.Tensor,
    metadata: SpecDecodeMetadata,
    sampling: SamplingMetadata,
    requests: Sequence[int],
) -> SampledRows:
    """Return what plain vLLM would emit at every row of these requests.

    Args:
        sampler: vLLM's plain one.
        logits: [num_logits, vocab_size], a row for every draft and one more per request; may be changed.
        metadata: of the step.
        sampling: of its batch.
        requests: ascending, rows of the batch.
    """
    num_drafts = np.array(metadata.num_draft_tokens)
    chosen = np.array(requests)
    num_rows = num_drafts[chosen] + 1
    of_requests = chosen.repeat(num_rows)
    drafts = metadata.draft_token_ids
    if len(chosen) < len(num_drafts):
        is_chosen = np.isin(np.arange(len(num_drafts)), chosen)
        drafts = drafts[torch.from_numpy(is_chosen.repeat(num_drafts))]
        logits = logits[torch.from_numpy(is_chosen.repeat(num_drafts + 1))]
    of_them = JudgedDrafts(drafts, num_drafts[chosen].tolist(), metadata.max_spec_len)
    own = sampling.generators
    generators = NotedGenerators({row: own[i] for row, i in enumerate(of_requests.tolist()) if i in own})
    as_rows = sampling_of_rows(sampling, of_requests, of_them, generators)
    output = sampler(logits, as_rows)
    tokens = output.sampled_token_ids[:, 0].tolist()
    budgets = as_rows.thinking_budget_state_holder
    return SampledRows(chosen, of_them, tokens, output.logprobs_tensors, generators, budgets)


def sampling_of_step(sampling: SamplingMetadata, metadata: SpecDecodeMetadata) -> SamplingMetadata:
    """Return what `sampling_of_rows` does for every row of a step, without generators."""
    num_drafts = metadata.num_draft_tokens
    of_requests = np.arange(len(num_drafts)).repeat(np.array(num_drafts) + 1)
    drafts = JudgedDrafts(metadata.draft_token_ids, num_drafts, metadata.max_spec_len)
    return sampling_of_rows(sampling, of_requests, drafts, {})


def sampling_of_rows(
    sampling: SamplingMetadata, of_requests: np.ndarray, drafts: JudgedDrafts, generators: dict[int, torch.Generator]
) -> SamplingMetadata:
    """Return the metadata with which a row of logits is sampled as if it were a request of a plain step.

    Args:
        sampling: of the batch.
        of_requests: [num_rows], the batch's row of each row of logits.
        drafts: of these requests.
        generators: by row of logits.
    """
    index, rows = torch.from_numpy(of_requests), of_requests.tolist()

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[index]

    penalties = {}
    if not sampling.no_penalties:
        names = "prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties"
        penalties = {name: each(getattr(sampling, name)) for name in names}
    words, wanted = sampling.bad_words_token_ids, sampling.logprob_token_ids
    texts = _texts(sampling.output_token_ids, rows, drafts) if sampling.output_token_ids else []
    holder = sampling.thinking_budget_state_holder
    return dataclasses.replace(
        sampling,
        temperature=each(sampling.temperature),
        all_random=sampling.all_random or len(generators) == len(rows),
        top_p=each(sampling.top_p),
        top_k=each(sampling.top_k),
        generators=generators,
        output_token_ids=texts,
        spec_token_ids=None,
        allowed_token_ids_mask=each(sampling.allowed_token_ids_mask),
        bad_words_token_ids={row: words[request] for row, request in enumerate(rows) if request in words},
        logitsprocs=_processors(sampling.logitsprocs.all, of_requests),
        logprob_token_ids=wanted and {row: wanted[request] for row, request in enumerate(rows) if request in wanted},
        thinking_budget_state_holder=BudgetsOfRows(holder, of_requests) if rows_with_a_budget(holder) else None,
        **penalties,
    )


def _texts(outputs: list[list[int]], of_requests: list[int], drafts: JudgedDrafts) -> list[list[int]]:
    """Return for every row of logits the request's output before it, drafts included.

    In place of a placeholder stands token 0: what comes after one is not emitted.
    """
    texts, tokens, before = [], iter(drafts.draft_token_ids.clamp(min=0).tolist()), None
    for request in of_requests:
        texts.append(texts[-1] + [next(tokens)] if request == before else outputs[request])
        before = request
    return texts


def _processors(processors: Iterator[LogitsProcessor], of_requests: np.ndarray) -> LogitsProcessors:
    """Return vLLM's own logits processors as they are for rows of logits in place of requests."""
    return LogitsProcessors([_OF_ROWS[type(processor)](processor, of_requests) for processor in processors])


def _min_p_of_rows(processor: MinPLogitsProcessor, of_requests: np.ndarray) -> MinPLogitsProcessor:
    if not processor.min_p_count:
        return processor
    of_rows = copy.copy(processor)
    of_rows.min_p = processor.min_p[torch.from_numpy(of_requests)]
    return of_rows


def _logit_bias_of_rows(processor: LogitBiasLogitsProcessor, of_requests: np.ndarray) -> LogitBiasLogitsProcessor:
    if not processor.biases:
        return processor
    of_rows = copy.copy(processor)
    of_rows.biases = {row: processor.biases.get(request, {}) for row, request in enumerate(of_requests.tolist())}
    biases = [(row, *bias) for row, of_row in of_rows.biases.items() for bias in of_row.items()]
    rows, tokens, values = zip(*biases, strict=True) if biases else ((), (), ())
    of_rows.logits_slice = torch.tensor(rows, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
    of_rows.bias_tensor = torch.tensor(values, dtype=torch.float32)
    return of_rows


def _min_tokens_of_rows(processor: MinTokensLogitsProcessor, of_requests: np.ndarray) -> MinTokensLogitsProcessor:
    """vLLM's own way for several rows a request: those of requests that are not here are none."""
    if not processor.min_toks:
        return processor
    of_rows = copy.copy(processor)
    num_rows = np.bincount(of_requests, minlength=max(processor.min_toks) + 1).tolist()
    of_rows.apply = lambda logits: processor.apply_with_spec_decode(logits, num_rows)
    return of_rows


_OF_ROWS = {
    LogitBiasLogitsProcessor: _logit_bias_of_rows,
    MinPLogitsProcessor: _min_p_of_rows,
    MinTokensLogitsProcessor: _min_tokens_of_rows,
}


def knows(processors: Iterable[LogitsProcessor]) -> bool:
    """Return whether all of these are vLLM's own."""
    return all(type(processor) in _OF_ROWS for processor in processors)


def processed_rows(
    processors: Iterable[LogitsProcessor], holder: ThinkingBudgetStateHolder | None, num_reqs: int
) -> set[int]:
    """Return the rows of the batch that want what vLLM's rejection sampler does not know or gets wrong.

    That is min_p, logit_bias, a thinking budget. They are verified here, and draw from a generator of their own where
    they sample.
    """
    rows = rows_with_a_budget(holder)
    for processor in processors:
        if isinstance(processor, LogitBiasLogitsProcessor):
            rows |= processor.biases.keys()
        elif isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            rows.update(np.flatnonzero(processor.min_p_cpu[:num_reqs]).tolist())
    return rows


def without_them(sampling: SamplingMetadata) -> SamplingMetadata:
    """Return the metadata of a batch in which no request wants min_p, logit_bias or a thinking budget."""
    others = (p for p in sampling.logitsprocs.all if isinstance(p, MinTokensLogitsProcessor))
    return dataclasses.replace(sampling, logitsprocs=LogitsProcessors(others), thinking_budget_state_holder=None)


@contextlib.contextmanager
def hidden(generators: dict[int, torch.Generator]) -> Iterator[None]:
    """Within this context no row has a generator of its own, so that none is drawn from."""
    kept = dict(generators)
    generators.clear()
    try:
        yield
    finally:
        generators.update(kept)


def replace_rows(output: SamplerOutput, rows: SampledRows, sampled: np.ndarray) -> SamplerOutput:
    """Return a step's output with what these requests emit in place of what it says of them.

    Args:
        output: [num_reqs, longest draft + 1] tokens; may be changed.
        rows: of the requests.
        sampled: [num_requests, longest draft + 1] int32, what they emit.
    """
    requests = torch.from_numpy(rows.requests)
    output.sampled_token_ids[requests] = torch.from_numpy(sampled)
    logprobs = rows.logprobs_of(sampled.shape[1])
    if output.logprobs_tensors is not None and logprobs is not None:
        width = output.sampled_token_ids.shape[1]
        places = (requests[:, None] * width + torch.arange(width)).flatten()
        # A request that names token ids gets them in place of the likeliest: these may be more or fewer than those.
        columns = max(of.logprobs.shape[1] for of in (output.logprobs_tensors, logprobs))
        output.logprobs_tensors = _widened(output.logprobs_tensors, columns)
        for tensor, theirs in zip(output.logprobs_tensors[:3], _widened(logprobs, columns)[:3], strict=True):
            tensor[places] = theirs.to(tensor.dtype)
    return output


def _widened(logprobs: LogprobsTensors, columns: int) -> LogprobsTensors:
    """Return log-probabilities with so many columns, the new ones as vLLM fills up those of who names fewer tokens."""
    more = columns - logprobs.logprobs.shape[1]
    if not more:
        return logprobs
    pad = torch.nn.functional.pad
    token_ids = pad(logprobs.logprob_token_ids, (0, more))
    return logprobs._replace(logprob_token_ids=token_ids, logprobs=pad(logprobs.logprobs, (0, more), value=-torch.inf))
