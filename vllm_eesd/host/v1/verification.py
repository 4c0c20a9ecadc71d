"""Verification on Model Runner V1: which drafts of a step the target keeps, and its own token after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.compat import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SamplerOutput,
    SpecDecodeMetadata,
    apply_top_k_top_p,
)
from vllm_eesd.host.v1 import shared_noise
from vllm_eesd.host.v1.batch import processed_rows_of, sampled_with, sampling_of
from vllm_eesd.host.v1.block_verification import Proposals, verify_blocks
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.kernels.reference.row_reductions import row_argmax

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: vLLM's own logits processors, and where each keeps what requests asked of it: empty, it changes nothing.
PROCESSOR_STATE = {
    LogitBiasLogitsProcessor: "biases",
    MinPLogitsProcessor: "min_p_count",
    MinTokensLogitsProcessor: "min_toks",
}

_NONE = torch.zeros(1, dtype=torch.int32)


def sample(
    runner: GPUModelRunner,
    host_sample: Callable[..., SamplerOutput],
    logits: torch.Tensor,
    metadata: SpecDecodeMetadata,
    draft_sampling: DraftSampling | None,
) -> SamplerOutput:
    """Return the tokens of a step.

    Requests that draw from a generator of their own, as those with a seed do, are verified by shared noise, and those
    that want min_p, logit_bias or a thinking budget; all of them are where no draft was drawn by itself, for that is a
    plain step's sampling and an equality.

    Args:
        runner: vLLM's GPUModelRunner, on a CPU.
        host_sample: its own `_sample`.
        logits: [num_logits, vocab_size], a row for every draft and one more per request; a grammar has masked them.
        metadata: vLLM's SpecDecodeMetadata.
        draft_sampling: knows what drafts were drawn from; None if all are the draft model's most probable tokens.
    Returns:
        vLLM's SamplerOutput; sampled_token_ids [num_reqs, longest draft + 1] int32, -1 after a request's last token.
    """
    if metadata.max_spec_len == 0:
        # Without drafts there is one row per request, as in a plain step: sample them as a plain step does.
        return host_sample(runner, logits, None)
    sampling, request_ids = sampling_of(runner)
    if not shared_noise.knows(sampling.logitsprocs.all):
        return _sample_without_drafts(runner, host_sample, logits, metadata)
    processed = processed_rows_of(runner)
    proposals = None
    if draft_sampling is not None:
        proposals = draft_sampling.proposals(request_ids, metadata.num_draft_tokens, logits.shape[-1])
    if not processed and not sampling.generators:
        return _sample_by_ratio(runner, host_sample, logits, metadata, proposals)
    all_certain = proposals is None or not len(proposals.q)
    requests = range(len(request_ids)) if all_certain else sorted(processed | sampling.generators.keys())
    if not all_certain:
        others = shared_noise.without_them(sampling) if processed else sampling
        with shared_noise.hidden(sampling.generators), sampled_with(runner, others):
            output = _sample_by_ratio(runner, host_sample, logits, metadata, proposals)
    rows = shared_noise.sample_rows(runner.sampler, logits, metadata, sampling, requests)
    sampled = accept_greedy(rows.tokens, rows.drafts)
    rows.set_back(sampled)
    if all_certain:
        return SamplerOutput(torch.from_numpy(sampled), rows.logprobs_of(sampled.shape[1]))
    return shared_noise.replace_rows(output, rows, sampled)


def _sample_without_drafts(
    runner: GPUModelRunner,
    host_sample: Callable[..., SamplerOutput],
    logits: torch.Tensor,
    metadata: SpecDecodeMetadata,
) -> SamplerOutput:
    """Return what a plain step emits, a token a request, whatever was drafted: for what cannot be verified."""
    num_rows = torch.tensor(metadata.num_draft_tokens) + 1
    sampling, _ = sampling_of(runner)
    with sampled_with(runner, replace(sampling, spec_token_ids=None)):
        return host_sample(runner, logits[num_rows.cumsum(0) - num_rows], None)


def _sample_by_ratio(
    runner: GPUModelRunner,
    host_sample: Callable[..., SamplerOutput],
    logits: torch.Tensor,
    metadata: SpecDecodeMetadata,
    proposals: Proposals | None,
) -> SamplerOutput:
    """Return what `sample` does: by vLLM's own sampler where more is wanted than tokens."""
    sampling, request_ids = sampling_of(runner)
    if not wants_only_tokens(sampling):
        if proposals is not None and len(proposals.q):
            runner._draft_probs = proposals.dense(metadata.num_draft_tokens, metadata.draft_token_ids.tolist())
            runner._draft_prob_req_ids = list(request_ids)
        if sampling.logprob_token_ids:
            return _with_named_logprobs(runner, host_sample, logits, metadata, sampling)
        return host_sample(runner, logits, metadata)
    rows = None
    if not only_temperature(sampling):
        rows = shared_noise.sampling_of_step(sampling, metadata)
        logits = runner.sampler.apply_logits_processors(logits.to(torch.float32, copy=True), rows, False)
    if sampling.all_greedy:
        # The argmax a plain step takes, over all rows at once.
        best = runner.sampler.greedy_sample(logits.float()).tolist()
        sampled = accept_greedy(best, metadata)
    else:
        input_token_ids = runner.input_ids.gpu[metadata.logits_indices]
        # The runner has written 0 over placeholders: they were not drafted, so no distribution belongs to them.
        input_token_ids[metadata.target_logits_indices + 1] = metadata.draft_token_ids
        if proposals is None:
            proposals = Proposals.none(len(request_ids), logits.shape[-1])
        sampled = _verify(logits, input_token_ids, metadata, sampling, proposals, rows)
    return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled), logprobs_tensors=None)


def _with_named_logprobs(
    runner: GPUModelRunner,
    host_sample: Callable[..., SamplerOutput],
    logits: torch.Tensor,
    metadata: SpecDecodeMetadata,
    sampling: SamplingMetadata,
) -> SamplerOutput:
    """Return what vLLM's rejection sampler does, with the logprobs of the token ids that requests name.

    It takes what its sampler gathers of them for the logprobs of all tokens and raises (vLLM issue 42592). So the
    sampler is asked for these only where the rejection sampler has those of every token emitted.
    """
    sampler, num_rows = runner.sampler, metadata.max_spec_len + 1
    named = {
        request * num_rows + row: token_ids
        for request, token_ids in sampling.logprob_token_ids.items()
        for row in range(num_rows)
    }

    def gather_named(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        return sampler.gather_specific_token_logprobs(logprobs, named, token_ids)

    unnamed = replace(sampling, logprob_token_ids=None, max_num_logprobs=sampling.max_num_logprobs or 0)
    sampler.gather_logprobs = gather_named
    try:
        with sampled_with(runner, unnamed):
            return host_sample(runner, logits, metadata)
    finally:
        del sampler.gather_logprobs


def nothing_to_verify(cu_num_scheduled_tokens: np.ndarray) -> SpecDecodeMetadata:
    """Return the metadata of a step without drafts: every request is sampled at its last token, as in a plain step.

    Args:
        cu_num_scheduled_tokens: [num_reqs] int32, tokens of the requests up to and with each.
    """
    num_reqs = len(cu_num_scheduled_tokens)
    counted = torch.arange(num_reqs + 1, dtype=torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=_NONE[:0],
        num_draft_tokens=[0] * num_reqs,
        cu_num_draft_tokens=_NONE.expand(num_reqs),
        cu_num_sampled_tokens=counted[1:],
        target_logits_indices=_NONE[:0],
        bonus_logits_indices=counted[:-1],
        logits_indices=torch.from_numpy(cu_num_scheduled_tokens - 1),
    )


def wants_only_tokens(sampling: SamplingMetadata) -> bool:
    """Return whether no request of the batch wants logprobs.

    Args:
        sampling: vLLM's SamplingMetadata.
    """
    return sampling.max_num_logprobs is None and not sampling.logprob_token_ids


def only_temperature(sampling: SamplingMetadata) -> bool:
    """Return whether nothing changes the logits of the batch but a temperature.

    Args:
        sampling: vLLM's SamplingMetadata.
    """
    return (
        sampling.no_penalties
        and sampling.top_k is None
        and sampling.top_p is None
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and all(_is_idle(processor) for processor in sampling.logitsprocs.all)
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    """Return whether no request asked for it; one that is not known may do anything."""
    state = PROCESSOR_STATE.get(type(processor))
    return state is not None and not getattr(processor, state)


def accept_greedy(best: list[int], metadata: SpecDecodeMetadata | shared_noise.JudgedDrafts) -> np.ndarray:
    """Return the target's own tokens up to the first that is not the draft's, per request.

    What is accepted is what the target would have said: so its own tokens are the output, one more than were accepted.
    In Python, which is done before an array operation is dispatched: there are a few dozen tokens.

    Args:
        best: num_logits token ids, the target's after each input token.
        metadata: vLLM's SpecDecodeMetadata; a draft of -1 is a placeholder.
    Returns:
        [num_reqs, longest draft + 1] int32, -1 after a request's last token.
    """
    drafted = metadata.draft_token_ids.tolist()
    kept = np.full((len(metadata.num_draft_tokens), metadata.max_spec_len + 1), -1, dtype=np.int32)
    row = draft = 0
    for request, num_drafts in enumerate(metadata.num_draft_tokens):
        accepted = 0
        while accepted < num_drafts and best[row + accepted] == drafted[draft + accepted]:
            accepted += 1
        kept[request, : accepted + 1] = best[row : row + accepted + 1]
        row, draft = row + num_drafts + 1, draft + num_drafts
    return kept


def _verify(
    logits: torch.Tensor,
    input_token_ids: torch.Tensor,
    metadata: SpecDecodeMetadata,
    sampling: SamplingMetadata,
    proposals: Proposals,
    rows: SamplingMetadata | None,
) -> np.ndarray:
    """Return what greedy and sampled requests emit, [num_reqs, longest draft + 1] int32, see `verify_blocks`.

    Args:
        rows: as which requests of a plain step the rows of logits are sampled; None where by a temperature alone.
    """
    cu_num_logits = np.zeros(len(proposals.first_q) + 1, dtype=np.int64)
    cu_num_logits[1:] = metadata.cu_num_sampled_tokens
    temperature = sampling.temperature.numpy()
    greedy = temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1.0), temperature).repeat(np.diff(cu_num_logits)))
    # float64, because float32 draws are exactly 0 once in 16 million times, and 0 refuses nothing that is possible.
    uniforms = torch.rand(len(logits), 2, dtype=torch.float64)
    if len(proposals.q):  # a target's vocabulary may be padded further than its draft's
        logits = logits[:, : proposals.q.shape[1]]
    best = np.full(len(logits), -1)
    if greedy.any():
        best = np.where(greedy.repeat(np.diff(cu_num_logits)), row_argmax(logits).numpy(), -1)
    scaled = logits.float() / scale[:, None]
    if rows is not None:
        for processor in rows.logitsprocs.argmax_invariant:
            scaled = processor.apply(scaled)
        scaled = apply_top_k_top_p(scaled, rows.top_k, rows.top_p)
    p = scaled.softmax(dim=-1).numpy()
    sampled = np.empty((len(greedy), metadata.max_spec_len + 1), dtype=np.int32)
    ids = input_token_ids.numpy().astype(np.int64)
    verify_blocks(p, proposals, ids, cu_num_logits, best, uniforms.numpy(), sampled)
    return sampled


def reject_placeholders(
    rejection_sample: Callable[..., torch.Tensor],
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """Return what vLLM's `rejection_sample` returns, with every draft of -1 rejected.

    vLLM 0.32 pads a request that joins a decoding batch with one token by K drafts of -1. Its CPU kernel looks up the
    probability of token -1, which is that of the row before's last token, and accepts by it.
    Token 0 stands in for a row's first placeholder: one-hot verification of any token leaves the target's distribution
    as it is. What follows was computed after a token that was not drafted, and is cut.

    Args:
        rejection_sample: vLLM's own; the other arguments are its.
        draft_token_ids: [num_tokens] int32.
        cu_num_draft_tokens: [num_reqs] int32, inclusive.
        draft_probs: [num_tokens, vocab_size] float32; None verifies one-hot.
    Returns:
        [num_reqs, max_spec_len + 1] int32, -1 after the tokens emitted.
    Source: vllm/v1/core/sched/scheduler.py, pad_spec_decode; rejection_random_sample_kernel in
        vllm/v1/sample/rejection_sampler.py.
    """
    placeholder = draft_token_ids < 0
    judged = num_draft_tokens, max_spec_len, cu_num_draft_tokens
    if not placeholder.any():
        return rejection_sample(draft_token_ids, *judged, draft_probs, *args, **kwargs)
    if draft_probs is not None:
        one_hot = (torch.arange(draft_probs.shape[-1]) == 0).to(draft_probs.dtype)
        draft_probs = draft_probs.where(~placeholder[:, None], one_hot)
    output_token_ids = rejection_sample(draft_token_ids.clamp(min=0), *judged, draft_probs, *args, **kwargs)
    num_drafts = torch.tensor(num_draft_tokens)
    rows = torch.arange(len(num_drafts)).repeat_interleave(num_drafts)
    columns = torch.arange(len(rows)) - (num_drafts.cumsum(0) - num_drafts)[rows]
    last = torch.full_like(num_drafts, max_spec_len)
    last.scatter_reduce_(0, rows[placeholder], columns[placeholder], "amin")
    return output_token_ids.masked_fill(torch.arange(max_spec_len + 1) > last[:, None], -1)
