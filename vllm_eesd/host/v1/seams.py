"""The places where Model Runner V1 is wrapped. Installed in a worker that is about to build it for EESD."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vllm_eesd.host.engine_seams import drafter_of, is_eesd_config
from vllm_eesd.host.seams import Seam, seam

if TYPE_CHECKING:
    from vllm_eesd.host.v1.proposer import EarlyExitProposer

SEAMS: list[Seam] = []
#: Faults of vLLM 0.32's own sampled verification on CPUs, which EESD mends for itself.
PATCHED = tuple(f"vllm.v1.sample.rejection_sampler:{name}" for name in ("expand_batch_to_tokens", "rejection_sample"))


def _drafter_of(runner: object) -> EarlyExitProposer | None:
    """Return EESD's drafter; None where it is one of vLLM's own, or where a pipeline rank has none."""
    return drafter_of(runner, "propose_round")


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    digests=("023963a7816b535d", "75d21dfa620c0bec"),
    why="a custom_class proposer is given token ids only; drafting needs the block table and the requests",
    retired_by="the runner passing itself to custom proposers",
    upstream="vllm#36219, vllm#39487",
    platform="cpu",
)
def propose_draft_token_ids(original, self, *args, **kwargs):
    drafter = _drafter_of(self)
    if drafter is None:
        return original(self, *args, **kwargs)
    scheduler_output, sampled_token_ids, _, _, sample_hidden_states, *_ = args
    return drafter.propose_round(self, scheduler_output, sampled_token_ids, sample_hidden_states)


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    digests=("0e5d07b1a03ebda7",),
    why="the rejection sampler costs several plain samplers on a CPU; without drafts (it fails with top-k) or with "
    "a temperature alone EESD samples",
    retired_by="the rejection sampler costing little more than the sampler, and left out when a step has no drafts",
    platform="cpu",
)
def _sample(original, self, logits, spec_decode_metadata):
    drafter = _drafter_of(self)
    if spec_decode_metadata is None or drafter is None:
        return original(self, logits, spec_decode_metadata)
    from vllm_eesd.host.v1.verification import sample

    return sample(self, original, logits, spec_decode_metadata, drafter.sampling)


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata",
    digests=("57820ad4a011ede9",),
    why="a step without drafts shall cost what a plain one costs: there is nothing to work out for it",
    retired_by="the runner leaving the metadata out when a step has no drafts",
    platform="cpu",
)
def _calc_spec_decode_metadata(original, self, num_draft_tokens, cu_num_scheduled_tokens):
    if num_draft_tokens.any() or _drafter_of(self) is None:
        return original(self, num_draft_tokens, cu_num_scheduled_tokens)
    from vllm_eesd.host.v1.verification import nothing_to_verify

    return nothing_to_verify(cu_num_scheduled_tokens)


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu_model_runner:build_logitsprocs",
    digests=("4d4868c70d80be01",),
    why="under speculation vLLM makes only the processor of min_tokens; EESD's verification knows those of min_p and "
    "logit_bias, and drafts nothing where there are others",
    retired_by="the rejection sampler applying all of a request's logits processors",
    platform="cpu",
)
def build_logitsprocs(original, vllm_config, *args, **kwargs):
    if is_eesd_config(vllm_config.speculative_config):
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
    return original(vllm_config, *args, **kwargs)


@seam(
    SEAMS,
    target="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch",
    digests=("5fac3d47cd7064c7",),
    why="a row with top-p is sorted whole, for every token verified: 3 ms each where the vocabulary is 49,152; its "
    "largest logits show where to cut",
    retired_by="vLLM finding the cut on CPUs without sorting",
    platform="cpu",
)
def apply_top_k_top_p_pytorch(original, logits, k, p, *args, **kwargs):
    from vllm_eesd.host.v1.truncation import apply_top_k_top_p

    def by_sorting(*of_rows):
        return original(*of_rows, *args, **kwargs)

    return apply_top_k_top_p(by_sorting, logits, k, p)


@seam(
    SEAMS,
    target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    digests=("8fcf791699dae7a4",),
    why="on a CPU 0.32 writes temperature, top-k and top-p of drafted rows into a copy: sampling uses stray memory",
    retired_by="_expand_kernel_impl in vllm/utils/cpu_triton_utils.py copying its result back",
    platform="cpu",
)
def expand_batch_to_tokens(original, x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    if not x.is_cpu:
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    per_request = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(per_request, output_size=num_tokens)


@seam(
    SEAMS,
    target="vllm.v1.sample.rejection_sampler:rejection_sample",
    digests=("54d0b63f8ee6c0a5", "a317d672313b9107"),
    why="on a CPU 0.32 accepts placeholder drafts (-1) by stray memory: a request joining with one token is biased",
    retired_by="rejection_random_sample_kernel_impl in vLLM's CPU kernels rejecting negative draft tokens",
    platform="cpu",
)
def rejection_sample(original, draft_token_ids, *args, **kwargs):
    if not draft_token_ids.is_cpu:
        return original(draft_token_ids, *args, **kwargs)
    from vllm_eesd.host.v1.verification import reject_placeholders

    return reject_placeholders(original, draft_token_ids, *args, **kwargs)
