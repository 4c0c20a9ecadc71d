"""Verification on Model Runner V1: which drafts of a step the target keeps, and its own token after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.compat import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SamplerOutput,
    SpecDecodeMetadata,
)
from vllm_eesd.host.v1.batch import sampling_of
from vllm_eesd.host.v1.block_verification import Proposals, verify_blocks
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.kernels.cpu.row_reductions import row_argmax

if TYPE_CHECKING:
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
    """Return the tokens of a step: by vLLM's own sampler where something else than a temperature changes the logits.

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
    proposals = None
    if draft_sampling is not None:
        proposals = draft_sampling.proposals(request_ids, metadata.num_draft_tokens, logits.shape[-1])
    if not only_temperature(sampling):
        if proposals is not None and len(proposals.q):
            runner._draft_probs = proposals.dense(metadata.num_draft_tokens, metadata.draft_token_ids.tolist())
            runner._draft_prob_req_ids = list(request_ids)
        return host_sample(runner, logits, metadata)
    if sampling.all_greedy:
        # The argmax a plain step takes, over all rows at once.
        best = runner.sampler.greedy_sample(logits.float()).tolist()
        sampled = keep_while_equal(best, metadata)
    else:
        input_token_ids = runner.input_ids.gpu[metadata.logits_indices]
        # The runner has written 0 over placeholders: they were not drafted, so no distribution belongs to them.
        input_token_ids[metadata.target_logits_indices + 1] = metadata.draft_token_ids
        if proposals is None:
            proposals = Proposals.none(len(request_ids), logits.shape[-1])
        sampled = _verify(logits, input_token_ids, metadata, sampling, proposals)
    return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled), logprobs_tensors=None)


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


def only_temperature(sampling: SamplingMetadata) -> bool:
    """Return whether no request of the batch wants more than a temperature: no other change of logits, no logprobs.

    Args:
        sampling: vLLM's SamplingMetadata.
    """
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.no_penalties
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and sampling.top_k is None
        and sampling.top_p is None
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and not (holder is not None and holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in sampling.logitsprocs.all)
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    """Return whether no request asked for it; one that is not known may do anything."""
    state = PROCESSOR_STATE.get(type(processor))
    return state is not None and not getattr(processor, state)


def keep_while_equal(best: list[int], metadata: SpecDecodeMetadata) -> np.ndarray:
    """Return the target's own tokens up to the first that is not the draft's, per request.

    What is accepted is what the target would have said: so its own tokens are the output, one more than were accepted.
    In Python, which is done before an array operation is dispatched: there are a few dozen tokens.

    Args:
        best: num_logits token ids, the target's most probable one after each input token.
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
) -> np.ndarray:
    """Return what greedy and sampled requests emit, [num_reqs, longest draft + 1] int32, see `verify_blocks`."""
    cu_num_logits = np.zeros(len(proposals.first_q) + 1, dtype=np.int64)
    cu_num_logits[1:] = metadata.cu_num_sampled_tokens
    temperature = sampling.temperature.numpy()
    greedy = temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1.0), temperature).repeat(np.diff(cu_num_logits)))
    # float64, because float32 draws are exactly 0 once in 16 million times, and 0 refuses nothing that is possible.
    uniforms = torch.rand(len(logits), 2, dtype=torch.float64)
    for request, generator in sampling.generators.items():
        uniforms[cu_num_logits[request] : cu_num_logits[request + 1]].uniform_(generator=generator)
    if len(proposals.q):  # a target's vocabulary may be padded further than its draft's
        logits = logits[:, : proposals.q.shape[1]]
    best = np.full(len(logits), -1)
    if greedy.any():
        best = np.where(greedy.repeat(np.diff(cu_num_logits)), row_argmax(logits).numpy(), -1)
    p = (logits.float() / scale[:, None]).softmax(dim=-1).numpy()
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
