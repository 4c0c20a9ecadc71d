"""The places where Model Runner V2 is wrapped. Installed in a worker that is about to build that runner."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_eesd.host.seams import Seam, seam

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestState

_RUNNER = "vllm.v1.worker.gpu.model_runner"
SEAMS: list[Seam] = []
_signature = functools.cache(inspect.signature)


def _speculator_of(req_states: RequestState | None) -> Any:
    """Return the speculator of a runner's request states; None without EESD, or where there are no such states."""
    reference = getattr(req_states, "eesd_speculator", None)
    return None if reference is None else reference()


@seam(
    SEAMS,
    target=f"{_RUNNER}:init_speculator",
    digests=("0157d01f67a9521c", "be5ae4530ae0d2d5"),
    why="vLLM's factory of speculators knows a closed list of methods",
    retired_by="a registry of speculators that plugins can add to",
    upstream="vllm#36219",
)
def init_speculator(original, vllm_config, device, req_states):
    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    if not isinstance(vllm_config.speculative_config, EESDSpeculativeConfig):
        return original(vllm_config, device, req_states)
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    speculator = EarlyExitSpeculator(vllm_config, device, req_states)
    # The factory of the verification manager is given the request states, and nothing else of the runner. Weak: the
    # runner drops its speculator at its shutdown, and may outlive that with its request states.
    req_states.eesd_speculator = weakref.ref(speculator)
    return speculator


@seam(
    SEAMS,
    target=f"{_RUNNER}:maybe_create_adaptive_verification_manager",
    digests=("cc90eebbc5014914", "b80e765f96012a5f"),
    why="drafts have a length per request; asynchronous scheduling plans the longest for everybody",
    retired_by="a speculator saying how many of its drafts are to be verified",
    upstream="vllm#47808, vllm#48202",
)
def maybe_create_adaptive_verification_manager(original, *args, **kwargs):
    given = _signature(original).bind(*args, **kwargs).arguments
    speculator = _speculator_of(given["req_states"])
    if speculator is None:
        return original(*args, **kwargs)
    names = ("query_start_loc", "attn_groups", "target_layer_names")
    return speculator.ragged_verification(*(given.get(name) for name in names))


@seam(
    SEAMS,
    target=f"{_RUNNER}:resolve_adaptive_cudagraph_mode",
    digests=("a95d680437ab3670",),
    why="vLLM's own trimming demands full CUDA graphs; EESD's works without any",
    retired_by="a speculator saying how many of its drafts are to be verified",
    upstream="vllm#47808",
)
def resolve_adaptive_cudagraph_mode(original, mode, *, piecewise_capture_available):
    if mode.has_full_cudagraphs():
        return original(mode, piecewise_capture_available=piecewise_capture_available)
    return mode if piecewise_capture_available else type(mode).NONE


@seam(
    SEAMS,
    target=f"{_RUNNER}:GPUModelRunner.add_requests",
    digests=("eca5a1d4a7ccb623",),
    why="what a request asks for (its limits, its `eesd_*` options) is needed to choose its draft lengths",
    retired_by="speculators being told of new requests",
)
def add_requests(original, self, scheduler_output):
    original(self, scheduler_output)
    if (speculator := _speculator_of(self.req_states)) is not None:
        speculator.admit(scheduler_output.scheduled_new_reqs)


@seam(
    SEAMS,
    target=f"{_RUNNER}:GPUModelRunner.take_draft_token_ids",
    digests=("c3b43a4182d74b6c",),
    why="under synchronous scheduling the scheduler plans what was drafted, not the longest draft",
    retired_by="DraftTokensHandler keeping a length per request",
    upstream="vllm#48202, vllm#48204",
)
def take_draft_token_ids(original, self):
    drafts = original(self)
    speculator = _speculator_of(self.req_states)
    if drafts is None or speculator is None:
        return drafts
    lengths = speculator.draft_lengths(drafts.req_ids)
    drafts.draft_token_ids = [ids[:k] for ids, k in zip(drafts.draft_token_ids, lengths, strict=True)]
    return drafts


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
    digests=("99b80e0119dd3836", "0f120715b6e5140a"),
    why="with temperatures alone one kernel reads the logits once, instead of a float32 copy of them several times. "
    "And requests with a seed are verified by the noise of a plain step, so that their text is plain vLLM's",
    retired_by="vLLM's rejection kernels taking the temperature themselves, and knowing a test by shared noise",
)
def _verify(original, self, *args, **kwargs):
    speculator = _speculator_of(self.sampler.req_states)
    if speculator is None:
        return original(self, *args, **kwargs)
    given = _signature(original).bind(self, *args, **kwargs).arguments
    return speculator.verification.judge(self, functools.partial(original, self, *args, **kwargs), given)


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    digests=("d592d786aa2c38b1", "e391caa5569708f3"),
    why="draft lengths follow from what steps cost; they are timed once the CUDA graphs are captured",
    retired_by="the worker telling a speculator that it is warmed up",
)
def compile_or_warm_up_model(original, self):
    # A worker of V1's in the same process has no request states.
    speculator = _speculator_of(getattr(self.model_runner, "req_states", None))
    if speculator is None:
        return original(self)
    speculator.warm_up(self.model_runner)  # at its end the original arms a monitor of what is compiled
    times = original(self)  # it captures the CUDA graphs that serving replays, so timing comes after it
    speculator.profile_costs(self.model_runner)
    return times


@seam(
    SEAMS,
    target="vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
    digests=("5e31d695fd9cc69e",),
    why="it maps one row of logits a request to an adapter; a request with a draft has several",
    retired_by="vLLM counting the rows",
)
def make_lora_inputs(original, self, req_ids, idx_mapping, num_scheduled_tokens):
    of_requests, of_tokens, adapters = original(self, req_ids, idx_mapping, num_scheduled_tokens)
    ragged = getattr(self, "eesd_ragged", None)
    if ragged is not None:
        of_requests = tuple(np.repeat(of_requests, ragged.take_num_logits(len(of_requests))))
    return of_requests, of_tokens, adapters
