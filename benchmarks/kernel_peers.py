"""What `bench_kernels.py` compares with: vLLM 0.32's own kernels and samplers, and FlashInfer's, where installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch


def rejection(device: str, sampled: bool, num_drafts: int, batch: int) -> dict[str, Callable]:
    """Return the peers of verification by name; each takes one set of inputs of the benchmark.

    Args:
        device: "cuda" or "cpu".
        sampled: at temperature 0.7 instead of greedily.
        num_drafts: of every request.
        batch: requests.
    """
    if find_spec("vllm") is None:
        return {}
    if device == "cuda":
        found = {"vllm v2": partial(_v2, sampled=sampled, num_drafts=num_drafts)}
        if sampled and find_spec("flashinfer") is not None:
            found["flashinfer"] = partial(_flashinfer, num_drafts=num_drafts)
        return found
    return _v1(sampled, num_drafts, batch)


def _v2(inputs, *, sampled: bool, num_drafts: int):
    """V2's temperature kernel and rejection sampler."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    batch, device = len(inputs.temperature), inputs.target_logits.device
    requests = torch.arange(batch, device=device, dtype=torch.int32)
    rows = requests.repeat_interleave(num_drafts + 1)
    steps = torch.arange(num_drafts + 1, device=device, dtype=torch.int32).repeat(batch)
    temperature = inputs.temperature if sampled else torch.zeros_like(inputs.temperature)
    logits = inputs.target_logits.to(torch.float32, copy=True)
    apply_temperature(logits, rows, temperature)
    return rejection_sample(
        logits,
        None,
        inputs.draft_sampled,
        inputs.cu_num_logits,
        inputs.positions,
        requests,
        rows,
        steps,
        temperature,
        inputs.seeds,
        num_drafts,
    )


def _flashinfer(inputs, *, num_drafts: int):
    """FlashInfer's chain sampling, with the softmax and the one-hot draft distribution that it asks for."""
    from flashinfer.sampling import chain_speculative_sampling

    shape = (len(inputs.temperature), num_drafts + 1)
    p = (inputs.target_logits.float() / 0.7).softmax(-1).unflatten(0, shape)
    drafts = inputs.draft_sampled.view(shape)[:, 1:].int()
    q = torch.zeros_like(p[:, 1:]).scatter_(2, drafts[:, :, None].long(), 1.0)
    return chain_speculative_sampling(q, drafts, p)


def _v1(sampled: bool, num_drafts: int, batch: int) -> dict[str, Callable]:
    """vLLM's rejection path on a CPU, and its plain sampler over the same number of rows."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler

    if not hasattr(rejection_sampler.expand_kernel, "_impl"):
        current_platform.register_triton_kernel_overrides()
    sampler = Sampler()
    rejection = rejection_sampler.RejectionSampler(sampler)
    drafts = _v1_drafts(num_drafts, batch)
    per_request, per_row = _v1_sampling(batch, sampled), _v1_sampling(batch * (num_drafts + 1), sampled)

    def verify(inputs):
        drafts.draft_token_ids = inputs.draft_sampled[drafts.target_logits_indices + 1].int()
        return rejection(drafts, None, inputs.target_logits, per_request)

    def plain(inputs):
        # A sampler may work in place; the runner gives it logits of its own.
        return sampler(inputs.target_logits.clone(), per_row)

    return {"vllm v1": verify, "vllm plain sampler, same rows": plain}


def eesd_v1(sampled: bool, num_drafts: int, batch: int) -> Callable:
    """Return EESD's own path through Model Runner V1's sampling step on a CPU; takes one set of inputs."""
    from vllm.v1.sample.sampler import Sampler

    from vllm_eesd.host.v1 import verification

    drafts = _v1_drafts(num_drafts, batch)
    rows = SimpleNamespace(sampling_metadata=_v1_sampling(batch, sampled), req_ids=list(map(str, range(batch))))
    runner = SimpleNamespace(input_batch=rows, sampler=Sampler(), input_ids=SimpleNamespace())

    def verify(inputs):
        runner.input_ids.gpu = inputs.draft_sampled
        drafts.draft_token_ids = inputs.draft_sampled[drafts.target_logits_indices + 1]
        return verification.sample(runner, None, inputs.target_logits, drafts, None)

    return verify


def _v1_drafts(num_drafts: int, batch: int) -> Any:
    """What the runner says of a step in which every request has `num_drafts`."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    rows = torch.arange(batch * (num_drafts + 1)).view(batch, num_drafts + 1)
    drafts = SpecDecodeMetadata.make_dummy([[0] * num_drafts] * batch, torch.device("cpu"))
    drafts.logits_indices = rows.flatten()
    drafts.target_logits_indices = rows[:, :-1].flatten().int()
    drafts.bonus_logits_indices = rows[:, -1].int()
    return drafts


def _v1_sampling(num_rows: int, sampled: bool) -> Any:
    """The sampling parameters of a batch: greedy, or temperature 0.7 and nothing else."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.zeros(num_rows)
    return SamplingMetadata(
        temperature=torch.full((num_rows,), 0.7) if sampled else None,
        all_greedy=not sampled,
        all_random=sampled,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(num_rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
