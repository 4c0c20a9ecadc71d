"""Verification on Model Runner V2: EESD's kernels where temperatures alone stand between logits and tokens.

vLLM's sampler copies every row to float32, scales it, and runs its rejection kernels over the copy; `rejection` reads
the logits as they are, once. Both count the same noise by seed and position, so they emit the same tokens.

A request with a seed is verified by shared noise (arXiv 2408.07978): the target's token at every position is the one
that a plain step's noise chooses there, and a draft is accepted if it is that. So its text is plain vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_eesd.host.adapters import without_adapters
from vllm_eesd.host.v2.batch import RequestStates
from vllm_eesd.host.v2.compat import (
    PROCESSED_LOGPROBS_MODES,
    BadWordsState,
    LogitBiasState,
    PenaltiesState,
    SamplingParams,
    async_tensor_h2d,
    gather_draft_sampled,
    gumbel_sample,
)
from vllm_eesd.kernels.gpu.keep_equal import keep_equal
from vllm_eesd.kernels.gpu.rejection import rejection

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

#: Fields of SamplingParams that leave the logits alone, or are the temperature and its noise. A field that is not
#: known here counts as one that changes them, so that a new vLLM's are vLLM's to apply. A watermark is the engine's:
#: `can_verify` asks for it.
HARMLESS = frozenset(
    """n watermarking temperature seed stop stop_token_ids ignore_eos max_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length extra_args skip_reading_prefix_cache repetition_detection routed_experts_prompt_start
    _eos_token_id _all_stop_token_ids _bad_words_token_ids _watermarking_skipped""".split()
)
#: vLLM's own, which do nothing for a request whose other fields have their defaults.
KNOWN_PROCESSORS = (BadWordsState, LogitBiasState, PenaltiesState)
_DEFAULTS = SamplingParams()


def only_temperature(params: SamplingParams) -> bool:
    """Return whether a request's tokens follow from its logits, temperature and seed alone."""
    fields = (name for name in params.__struct_fields__ if name not in HARMLESS and name != "top_k")
    no_top_k = params.top_k <= 0  # 0 and -1 both mean all tokens
    return no_top_k and all(getattr(params, name) == getattr(_DEFAULTS, name, None) for name in fields)


def emits_the_targets_tokens(rejection_sampler: RejectionSampler) -> bool:
    """Return whether this engine emits what the target chooses by the noise of a plain step, and nothing else."""
    return (
        rejection_sampler.watermark_key is None
        and rejection_sampler.synthetic_conditional_rates is None
        # Until vLLM 0.33: no such attribute. It is of FLy, a lossy verification.
        and not getattr(rejection_sampler, "fly_window_size", 0)
        and rejection_sampler.sampler.trace_replay_state is None
    )


def can_verify(rejection_sampler: RejectionSampler) -> bool:
    """Return whether this engine's verification may be the kernel's at all; requests are asked one by one."""
    sampler = rejection_sampler.sampler
    return (
        emits_the_targets_tokens(rejection_sampler)
        and not sampler.use_fp64_gumbel
        and not sampler.return_sampling_mask
        and sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES
        and all(type(processor) in KNOWN_PROCESSORS for processor in sampler.logits_processors)
    )


class Verification:
    """Decides for every batch how it is verified, and does.

    Args:
        max_num_reqs: the engine's.
        unseeded_too: whether requests that sample without a seed are verified by shared noise, as those with one are.
    Attributes:
        wants_only_temperature: [max_num_reqs] bool, `only_temperature` of the request in each state; set as requests
            are admitted.
        shares_noise: [max_num_reqs] bool, whether it is verified by shared noise.
        greedy: [max_num_reqs] bool, whether it takes the most probable tokens.
    """

    def __init__(self, max_num_reqs: int, unseeded_too: bool = False) -> None:
        self.wants_only_temperature, self.shares_noise, self.greedy = np.zeros((3, max_num_reqs), dtype=bool)
        self._unseeded_too = unseeded_too
        self._can_verify: bool | None = None
        self._can_share: bool | None = None

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Take in a slot's new request."""
        self.wants_only_temperature[slot] = only_temperature(params)
        self.greedy[slot] = params.temperature == 0
        self.shares_noise[slot] = params.temperature > 0 and (self._unseeded_too or params.seed is not None)

    def judge(
        self, rejection_sampler: RejectionSampler, host_verify: Callable[[], tuple], given: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `RejectionSampler._verify` does: logits to take logprobs from, tokens, and how many of them.

        Args:
            host_verify: vLLM's own.
            given: its arguments by name.
        """
        if self._can_share is None:
            self._can_share = emits_the_targets_tokens(rejection_sampler)
        requests = given["idx_mapping_np"]
        shares = self.shares_noise[requests] & self._can_share
        by_equality = shares | self.greedy[requests]
        if shares.any() and by_equality.all():
            return self.verify_by_noise(rejection_sampler, given)
        if self.is_ours(rejection_sampler, requests):
            names = ("logits", "draft_logits", "verify_draft_sampled", "pos", "cu_num_logits", "idx_mapping")
            verified = self.verify(rejection_sampler, *(given[name] for name in names))
        else:
            verified = host_verify()
        return self.verify_by_noise(rejection_sampler, given, verified, by_equality) if shares.any() else verified

    def verify_by_noise(
        self,
        rejection_sampler: RejectionSampler,
        given: Mapping[str, Any],
        verified: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        by_equality: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `judge` does, of requests that share their noise and greedy ones.

        Args:
            given: of `judge`.
            verified: what became of a batch with other requests in it; None where there are none.
            by_equality: [num_reqs] bool, the requests to overwrite there.
        """
        sampler, states = rejection_sampler.sampler, rejection_sampler.sampler.sampling_states
        logits, cu_num_logits, device = given["logits"], given["cu_num_logits"], given["logits"].device
        of_rows = given["expanded_idx_mapping"], given["idx_mapping"], given["idx_mapping_np"], given["pos"]
        if verified is None or verified[0] is logits:  # which are as the target gave them
            rest = given["draft_sampled"], given["expanded_local_pos"], given["seq_lens_upper_bound_np"]
            processed = sampler.apply_sampling_params(logits, *of_rows, *rest)
        else:
            processed = verified[0]
        tokens = gumbel_sample(
            processed,
            given["expanded_idx_mapping"],
            states.temperature.gpu,
            states.seeds.gpu,
            given["pos"],
            apply_temperature=False,
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )
        if verified is None:
            size = len(cu_num_logits) - 1, rejection_sampler.num_speculative_steps + 1
            sampled = torch.empty(size, dtype=torch.int64, device=device)
            verified = processed, sampled, sampled.new_empty(size[0], dtype=torch.int32)
        chosen = None if by_equality is None else async_tensor_h2d(by_equality, device=device)
        keep_equal(*verified[1:], tokens, given["verify_draft_sampled"], cu_num_logits, chosen)
        return verified

    def is_ours(self, rejection_sampler: RejectionSampler, idx_mapping: np.ndarray) -> bool:
        """Return whether `verify` may judge these requests' drafts.

        Args:
            idx_mapping: [num_reqs], request states.
        """
        if self._can_verify is None:
            self._can_verify = can_verify(rejection_sampler)
        return self._can_verify and bool(self.wants_only_temperature[idx_mapping].all())

    @staticmethod
    def verify(
        rejection_sampler: RejectionSampler,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        positions: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `judge` does, by the kernel.

        Args:
            logits: [num_logits, vocab_size], as the target gave them.
            draft_logits: [max_num_reqs, K, vocab_size], by request state; None where drafts are greedy.
            draft_sampled: [num_logits], -1 for drafts that were not made or that a grammar cut.
            positions: [num_logits] int64.
            cu_num_logits: [num_reqs + 1] int32.
            idx_mapping: [num_reqs] int64, request states.
        """
        states = rejection_sampler.sampler.sampling_states
        verified = rejection(
            logits,
            draft_sampled,
            cu_num_logits,
            rejection_sampler.num_speculative_steps,
            temperature=states.temperature.gpu,
            draft_logits=draft_logits,
            seeds=states.seeds.gpu,
            positions=positions,
            idx_mapping=idx_mapping,
            block_verification=rejection_sampler.use_block_verification,
        )
        return logits, verified.sampled, verified.num_sampled

    @torch.inference_mode()
    def warm_up(self, runner: GPUModelRunner, draft_logits: torch.Tensor | None) -> None:
        """Have the kernels compiled for every kind of argument that serving passes and Triton tells apart.

        Triton compiles a kernel anew for another dtype, and for a number or an address that is or is not divisible by
        16, or equal to 1: of these, batch sizes differ. Logits come from the model itself, which may pad their rows.
        vLLM warms up with requests that want more than a temperature, which its own sampler verifies, and with one
        number of drafts; what gathers them for any sampler is vLLM's.

        Args:
            runner: its model is loaded.
            draft_logits: the speculator's, if it keeps any.
        """
        config, device, buffers = runner.model_config, runner.device, runner.input_buffers
        prefill_lens = RequestStates(runner.req_states).prefill_lens
        kernel_verifies = can_verify(runner.rejection_sampler)
        shares = emits_the_targets_tokens(runner.rejection_sampler)
        width = runner.rejection_sampler.num_speculative_steps + 1
        for num_reqs in (size for size in (1, 2, 16) if size <= runner.max_num_reqs):
            rows = torch.arange(2 * num_reqs, device=device)  # a draft each
            of_rows = rows, torch.zeros_like(rows), torch.zeros_like(rows, dtype=torch.int32)
            gather_draft_sampled(buffers.input_ids, buffers.positions, *of_rows, prefill_lens)
            drafts, starts = torch.zeros_like(rows, dtype=torch.int32), 2 * torch.arange(num_reqs + 1, device=device)
            if shares:
                sampled = torch.empty(num_reqs, width, dtype=torch.int64, device=device)
                for chosen in (None, torch.zeros(num_reqs, dtype=torch.bool, device=device)):
                    num_sampled = sampled.new_empty(num_reqs, dtype=torch.int32)
                    keep_equal(sampled, num_sampled, rows, drafts, starts.int(), chosen)
            if not kernel_verifies:
                continue
            hidden_states = torch.zeros(len(rows), config.get_hidden_size(), dtype=config.dtype, device=device)
            without_adapters(runner, len(rows))
            logits = runner.model.compute_logits(hidden_states)
            self.verify(runner.rejection_sampler, logits, draft_logits, drafts, rows, starts.int(), rows[:num_reqs])
