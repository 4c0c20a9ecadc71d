"""The places wrapped for both model runners alike: in every process, where plain engines pass through; in a worker."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_eesd.host.seams import Seam, seam

#: Why asking for EESD is an error in this process; "" where it is not.
refusal = ""
SEAMS: list[Seam] = []
#: Wrapped in a worker that is about to build its model runner for EESD.
WORKER_SEAMS: list[Seam] = []


def is_eesd(spec: object) -> bool:
    """Return whether a `speculative_config` asks for EESD: the bare word or a mapping with `method` "eesd"."""
    return spec == "eesd" or (isinstance(spec, Mapping) and spec.get("method") == "eesd")


def with_flags(spec: object, args: object) -> object:
    """Return a `speculative_config` with what vLLM's flags for its fields say, if the two together ask for EESD.

    Args:
        spec: None, "eesd" or a mapping.
        args: vLLM's EngineArgs.
    Raises:
        ValueError: a field is set by both.
    """
    flags = (("method", "--spec-method"), ("model", "--spec-model"), ("num_speculative_tokens", "--spec-tokens"))
    values = (args.spec_method, args.spec_model, args.spec_tokens)
    given = {field: value for (field, _), value in zip(flags, values, strict=True) if value is not None}
    if not given or not (is_eesd(spec) or (given.get("method") == "eesd" and isinstance(spec, Mapping | None))):
        return spec
    fields = {"method": "eesd"} if spec == "eesd" else {str(key).replace("-", "_"): spec[key] for key in spec or ()}
    for field, flag in flags:
        if field in given and field in fields:
            raise ValueError(f"{flag} and --speculative-config['{field}'] are mutually exclusive")
    return fields | given


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
    spec = with_flags(self.speculative_config, self)
    if not is_eesd(spec):
        return original(self, target_model_config, target_parallel_config)
    if refusal:
        raise ValueError(refusal)
    from vllm_eesd.host.kv_connectors import with_own_storage
    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    config = EESDSpeculativeConfig.build(spec, target_model_config, target_parallel_config, self)
    self.kv_transfer_config = with_own_storage(self, config.exit_head, config.head_directory)
    return config


@seam(
    SEAMS,
    target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
    digests=("e859de623879c599", "6b1f72da07fe0b2e"),
    why="`--speculative-config eesd`: the option takes JSON only; `--spec-method eesd`: it takes vLLM's methods only",
    retired_by="the options accepting a bare method name, and one of a plugin's",
)
def add_cli_args(original, parser):
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "speculative_config":
            action.type = _or_bare_word(action.type)
        elif action.dest == "spec_method" and action.choices is not None:
            action.choices = [*action.choices, "eesd"]
    return parser


@seam(
    SEAMS,
    target="vllm.engine.arg_utils:EngineArgs.create_model_config",
    digests=("59ce430e6e288a24", "6685ab15d59a09bb"),
    why="`vllm serve HEAD`: vLLM then takes the target's name from the head, and says of one that is not here no more",
    retired_by="vLLM naming the speculator when its target cannot be loaded",
)
def create_model_config(original, self):
    try:
        return original(self)
    except (OSError, ValueError) as error:
        if isinstance(self.speculative_config, Mapping) and is_eesd(self.speculative_config):
            from vllm_eesd.host.head_choice import command_for_a_head

            if line := command_for_a_head(self.speculative_config.get("model"), self.model):
                raise ValueError(line) from error
        raise


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
    target="vllm.sampling_params:SamplingParams.verify",
    digests=("d5f1854962558642",),
    why="what a request may not ask for beside drafts, EESD serves (min_p and logit_bias, by a server's own default "
    "too) or refuses at the start: a request is checked as by plain vLLM",
    retired_by="the checks asking the speculative config",
)
def verify(original, self, model_config, speculative_config, *args, **kwargs):
    seen = None if is_eesd_config(speculative_config) else speculative_config
    original(self, model_config, seen, *args, **kwargs)


@seam(
    SEAMS,
    target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens",
    digests=("f2014902518764ba",),
    why="with several ranks: keeps the drafts that came with the output of a step, for the call that fetches them",
    retired_by="ModelRunnerOutput carrying draft tokens",
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
    why="with several ranks: hands out the drafts that came with the output, and asks the worker if none did",
    retired_by="ModelRunnerOutput carrying draft tokens",
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
        # Its library object makes a function of whatever attribute it is asked for, and keeps it: of this one too.
        llvmlite.lib._fntab["__dict__"] = {}
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


def drafter_of(runner: object, method: str) -> Any:
    """Return EESD's side of a model runner; None where that drafts by vLLM's own or not at all."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return drafter if hasattr(drafter, method) else None


@seam(
    WORKER_SEAMS,
    target="vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    digests=("123955ae688517c8",),
    why="V1: drafts travel with the step's output; fetching them is a message more, 5% of a small model's step. And "
    "vLLM sets the generator of a prompt's chunk back by its offset, which a CPU's has not. V2: under asynchronous "
    "scheduling the scheduler knows placeholders only, and would count them as drafts",
    retired_by="ModelRunnerOutput carrying draft tokens and how many were verified; vLLM keeping the generator's state",
)
def sample_tokens_in_worker(original, self, *args, **kwargs):
    drafter, sample = drafter_of(self.model_runner, "sample_tokens"), functools.partial(original, self, *args, **kwargs)
    return sample() if drafter is None else drafter.sample_tokens(sample, self.model_runner)


def _target_changed(worker: object) -> None:
    """Tell EESD's side of the worker's model runner, if it has one, that the target has other weights."""
    drafter = drafter_of(worker.model_runner, "target_changed")
    if drafter is not None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(worker.vllm_config):
            drafter.target_changed()


@seam(
    WORKER_SEAMS,
    target="vllm.v1.worker.gpu_worker:Worker.reload_weights",
    digests=("91979171fcec0214",),
    why="the exit head's KV fill holds ratios of the target's norms, a draft vocabulary rows of its LM head: they must "
    "follow the weights, and what was learned of acceptance is of the old ones",
    retired_by="the worker telling its drafter that the target was reloaded",
)
def reload_weights(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    _target_changed(self)


@seam(
    WORKER_SEAMS,
    target="vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    digests=("2aed891b5dca6c9e", "ea3bfdd5447e4740"),
    why="where a trainer sends the weights, what was derived from the old ones must follow, as after reload_weights",
    retired_by="the worker telling its drafter that the target's weights changed",
)
def finish_weight_update(original, self):
    original(self)
    _target_changed(self)
