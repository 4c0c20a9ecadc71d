"""The places wrapped for both model runners alike: in every process, where plain engines pass through; in a worker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from vllm_eesd.host.seams import Seam, seam

#: Why asking for EESD is an error in this process; "" where it is not.
refusal = ""
SEAMS: list[Seam] = []
#: Wrapped in a worker that is about to build its model runner for EESD.
WORKER_SEAMS: list[Seam] = []


def is_eesd(spec: object) -> bool:
    """Return whether a `speculative_config` asks for EESD: the bare word or a mapping with `method` "eesd"."""
    return spec == "eesd" or (isinstance(spec, Mapping) and spec.get("method") == "eesd")


def is_eesd_config(config: object) -> bool:
    """Return whether vLLM's speculative config is EESD's; a plain engine, which has None, loads no code for it."""
    if config is None:
        return False
    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    return isinstance(config, EESDSpeculativeConfig)


def _or_bare_word(read: Callable[[str], object]) -> Callable[[str], object]:
    """Return an argparse type that takes the bare word `eesd` and reads everything else as before."""

    def read_or_word(text: str) -> object:
        try:
            return text if text == "eesd" else read(text)
        except RecursionError:  # argparse makes one line of a ValueError only
            raise ValueError(f"{text!r:.80} is not valid, its JSON is nested too deeply") from None

    return read_or_word


@seam(
    SEAMS,
    target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    digests=("8b18a8b8e3f00ab6",),
    why="vLLM's SpeculativeConfig knows a closed list of methods",
    retired_by="a registry of speculative methods that plugins can add to",
    upstream="vllm#39487",
)
def create_speculative_config(original, self, target_model_config, target_parallel_config):
    if not is_eesd(self.speculative_config):
        return original(self, target_model_config, target_parallel_config)
    if refusal:
        raise ValueError(refusal)
    from vllm_eesd.host.speculative import EESDSpeculativeConfig, check_kv_connector

    check_kv_connector(self.kv_transfer_config, self.kv_offloading_size)
    return EESDSpeculativeConfig.build(self.speculative_config, target_model_config, target_parallel_config)


@seam(
    SEAMS,
    target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
    digests=("e859de623879c599", "6b1f72da07fe0b2e"),
    why="`--speculative-config eesd`: the option takes JSON only",
    retired_by="the option accepting a bare method name",
)
def add_cli_args(original, parser):
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "speculative_config":
            action.type = _or_bare_word(action.type)
    return parser


@seam(
    SEAMS,
    target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
    digests=("38130aa4a06dbd56",),
    why="drafting writes the target's KV past the scheduled tokens; the scheduler must reserve those slots",
    retired_by="the property asking the speculative config instead of listing methods",
)
def num_lookahead_tokens(original, self):
    config = self.speculative_config
    return config.num_speculative_tokens if is_eesd_config(config) else original(self)


@seam(
    SEAMS,
    target="vllm.v1.engine.input_processor:InputProcessor._validate_params",
    digests=("1533e2351fe8e310",),
    why="a request's own `eesd_*` options are refused before they reach the engine",
    retired_by="the speculative config taking part in SamplingParams.verify",
)
def _validate_params(original, self, params, *args, **kwargs):
    validated = original(self, params, *args, **kwargs)
    extra_args = getattr(params, "extra_args", None)
    if extra_args and is_eesd_config(self.speculative_config):
        from vllm_eesd.host.speculative import RequestRefused
        from vllm_eesd.request_options import RequestOptions

        try:
            RequestOptions.parse(extra_args)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
    return validated


@seam(
    SEAMS,
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens",
    digests=("f2014902518764ba",),
    why="the same: keeps the drafts that came with the output",
    retired_by="the same",
    platform="cpu",
)
def sample_tokens(original, self, *args, **kwargs):
    output = original(self, *args, **kwargs)
    self.eesd_drafts = getattr(output, "eesd_drafts", None)
    return output


@seam(
    SEAMS,
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids",
    digests=("e7087c6bef25baaa",),
    why="the same: hands out the drafts that came with the output, and asks the worker if none did",
    retired_by="the same",
    platform="cpu",
)
def take_draft_token_ids(original, self):
    drafts, self.eesd_drafts = getattr(self, "eesd_drafts", None), None
    return original(self) if drafts is None else drafts or None


@seam(
    SEAMS,
    target="vllm.triton_utils.dispatcher:_rebind_kernels",
    digests=("69650cc6627a1bf3",),
    why="0.32's scan of all modules as a CPU worker starts fails where numba was used, as by the policies of an "
    "earlier engine of the process",
    retired_by="the scan reading instance dicts with object.__getattribute__",
    platform="cpu",
)
def _rebind_kernels(original, overrides):
    llvmlite = sys.modules.get("llvmlite.binding.ffi")
    if llvmlite is not None:
        # Its library object makes a function of whatever attribute it is asked for; this one it shall have.
        llvmlite.lib._fntab.setdefault("__dict__", {})
    return original(overrides)


@seam(
    WORKER_SEAMS,
    target="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
    digests=("a69f3d323356ee82", "7ae60223a4c8c28c"),
    why="draft lengths follow from what steps cost; they are timed once the model is compiled",
    retired_by="the worker warming up custom_class proposers",
    platform="cpu",
)
def compile_or_warm_up_model(original, self):
    drafter = getattr(self.model_runner, "drafter", None)
    if hasattr(drafter, "profile_costs"):  # V1's; vLLM's own have no such method
        drafter.profile_costs(self.model_runner)
    times = original(self)  # which resets the random seed
    # V2's, where that runs on a CPU. A vLLM that warms it up with requests of its own making does so in there:
    # nothing may be learned from them, and learning begins with this call.
    speculator = getattr(self.model_runner, "speculator", None)
    if hasattr(speculator, "profile_costs"):
        speculator.profile_costs(self.model_runner)
    return times
