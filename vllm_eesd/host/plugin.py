"""The entry point of group `vllm.general_plugins`: checks every seam, then installs them, or says why it does not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_eesd.host import seams
from vllm_eesd.host.seams import Seam, SeamStatus

#: What a worker sends instead of drafts where no request has any.
NO_DRAFTS = ()
#: Releases the adapters were written and tested against.
SUPPORTED_VLLM = ("0.32",)


def is_eesd(spec: Any) -> bool:
    """Return whether a `speculative_config` asks for EESD: the bare word or a mapping with `method` "eesd"."""
    return spec == "eesd" or (isinstance(spec, Mapping) and spec.get("method") == "eesd")


def _wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(self, target_model_config, target_parallel_config):
        if not is_eesd(self.speculative_config):
            return original(self, target_model_config, target_parallel_config)
        from vllm_eesd.host.speculative import EESDSpeculativeConfig, check_kv_connector

        check_kv_connector(self.kv_transfer_config, self.kv_offloading_size)
        return EESDSpeculativeConfig.build(
            self.speculative_config, target_model_config, target_parallel_config, bool(self.enable_lora)
        )

    return create_speculative_config


def _or_bare_word(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type that takes the bare word `eesd` and reads everything else as before."""

    def read_or_word(text: str) -> Any:
        try:
            return text if text == "eesd" else read(text)
        except RecursionError:  # argparse makes one line of a ValueError only
            raise ValueError(f"{text!r:.80} is not valid, its JSON is nested too deeply") from None

    return read_or_word


def _wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser):
        parser = original(parser)
        for action in parser._actions:
            if action.dest == "speculative_config":
                action.type = _or_bare_word(action.type)
        return parser

    return add_cli_args


def _wrap_num_lookahead_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def num_lookahead_tokens(self):
        if self.speculative_config is None:  # a plain engine loads none of EESD's code
            return original(self)
        from vllm_eesd.host.speculative import EESDSpeculativeConfig

        if isinstance(self.speculative_config, EESDSpeculativeConfig):
            return self.speculative_config.num_speculative_tokens
        return original(self)

    return num_lookahead_tokens


def _wrap_propose_draft_token_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    def propose_draft_token_ids(
        self,
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        *args,
        **kwargs,
    ):
        from vllm_eesd.host.v1 import EarlyExitProposer

        if isinstance(self.drafter, EarlyExitProposer):
            return self.drafter.propose_round(self, scheduler_output, sampled_token_ids, sample_hidden_states)
        given = scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states
        return original(self, *given, *args, **kwargs)

    return propose_draft_token_ids


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    def _sample(self, logits, spec_decode_metadata):
        from vllm_eesd.host.v1 import EarlyExitProposer

        if spec_decode_metadata is None or not isinstance(self.drafter, EarlyExitProposer):
            return original(self, logits, spec_decode_metadata)
        return self.drafter.sample(self, original, logits, spec_decode_metadata)

    return _sample


def _wrap_calc_spec_decode_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    def _calc_spec_decode_metadata(self, num_draft_tokens, cu_num_scheduled_tokens):
        from vllm_eesd.host.v1 import EarlyExitProposer

        # Every pipeline rank prepares inputs, the last one alone has a drafter.
        drafter = getattr(self, "drafter", None)
        if num_draft_tokens.any() or not isinstance(drafter, EarlyExitProposer):
            return original(self, num_draft_tokens, cu_num_scheduled_tokens)
        from vllm_eesd.host.verification import nothing_to_verify

        return nothing_to_verify(cu_num_scheduled_tokens)

    return _calc_spec_decode_metadata


def _wrap_expand_batch_to_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        if not x.is_cpu:
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        per_request = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(per_request, output_size=num_tokens)

    return expand_batch_to_tokens


def _wrap_rejection_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    def rejection_sample(draft_token_ids, *args, **kwargs):
        if not draft_token_ids.is_cpu:
            return original(draft_token_ids, *args, **kwargs)
        from vllm_eesd.host.placeholders import reject_placeholders

        return reject_placeholders(original, draft_token_ids, *args, **kwargs)

    return rejection_sample


def _wrap_worker_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self, *args, **kwargs):
        from vllm_eesd.host.v1 import EarlyExitProposer

        output = original(self, *args, **kwargs)
        if isinstance(getattr(self.model_runner, "drafter", None), EarlyExitProposer) and output is not None:
            drafts = self.model_runner.take_draft_token_ids()
            # Nobody's drafts need not travel: the scheduler empties a request's when it schedules them.
            output.eesd_drafts = drafts if drafts is None or any(drafts.draft_token_ids) else NO_DRAFTS
        return output

    return sample_tokens


def _wrap_executor_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        self.eesd_drafts = getattr(output, "eesd_drafts", None)
        return output

    return sample_tokens


def _wrap_executor_take_draft_token_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    def take_draft_token_ids(self):
        drafts, self.eesd_drafts = getattr(self, "eesd_drafts", None), None
        return original(self) if drafts is None else drafts or None

    return take_draft_token_ids


def _wrap_compile_or_warm_up_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self):
        # V1's drafter or, where the V2 runner runs on a CPU, its speculator; vLLM's own have no such method.
        drafter = getattr(self.model_runner, "drafter", None) or getattr(self.model_runner, "speculator", None)
        if hasattr(drafter, "profile_costs"):
            drafter.profile_costs(self.model_runner)
        return original(self)  # which resets the random seed

    return compile_or_warm_up_model


def _wrap_rebind_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    def _rebind_kernels(overrides):
        llvmlite = sys.modules.get("llvmlite.binding.ffi")
        if llvmlite is not None:
            # Its library object makes a function of whatever attribute it is asked for; this one it shall have.
            llvmlite.lib._fntab.setdefault("__dict__", {})
        return original(overrides)

    return _rebind_kernels


def _wrap_validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_params(self, params, *args, **kwargs):
        validated = original(self, params, *args, **kwargs)
        if self.speculative_config is not None and (extra_args := getattr(params, "extra_args", None)):
            from vllm_eesd.host.speculative import EESDSpeculativeConfig, RequestRefused
            from vllm_eesd.request_options import RequestOptions

            if isinstance(self.speculative_config, EESDSpeculativeConfig):
                try:
                    RequestOptions.parse(extra_args)
                except ValueError as error:
                    raise RequestRefused(str(error)) from None
        return validated

    return _validate_params


def _wrap_worker_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        config = self.vllm_config.speculative_config
        if config is None:
            return
        from vllm_eesd.host.speculative import EESDSpeculativeConfig

        if isinstance(config, EESDSpeculativeConfig):
            prepare_runner(config.runner, "V2" if self.use_v2_model_runner else "V1")

    return __init__


SEAMS = (
    Seam(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        digests=("8b18a8b8e3f00ab6",),
        wrap=_wrap_create_speculative_config,
        why="vLLM's SpeculativeConfig knows a closed list of methods",
        retired_by="a registry of speculative methods that plugins can add to",
    ),
    Seam(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        digests=("e859de623879c599",),
        wrap=_wrap_add_cli_args,
        why="`--speculative-config eesd`: the option takes JSON only",
        retired_by="the option accepting a bare method name",
    ),
    Seam(
        target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
        digests=("38130aa4a06dbd56",),
        wrap=_wrap_num_lookahead_tokens,
        why="drafting writes the target's KV past the scheduled tokens; the scheduler must reserve those slots",
        retired_by="the property asking the speculative config instead of listing methods",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        digests=("023963a7816b535d",),
        wrap=_wrap_propose_draft_token_ids,
        why="a custom_class proposer is given token ids only; drafting needs the block table and the requests",
        retired_by="the runner passing itself to custom proposers",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        digests=("0e5d07b1a03ebda7",),
        wrap=_wrap_sample,
        why="the rejection sampler costs several plain samplers on a CPU; without drafts (it fails with top-k) or with "
        "a temperature alone EESD samples",
        retired_by="the rejection sampler costing little more than the sampler, and left out when a step has no drafts",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata",
        digests=("57820ad4a011ede9",),
        wrap=_wrap_calc_spec_decode_metadata,
        why="a step without drafts shall cost what a plain one costs: there is nothing to work out for it",
        retired_by="the runner leaving the metadata out when a step has no drafts",
    ),
    Seam(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        digests=("8fcf791699dae7a4",),
        wrap=_wrap_expand_batch_to_tokens,
        why="on a CPU 0.32 writes temperature, top-k and top-p of drafted rows into a copy: sampling uses stray memory",
        retired_by="_expand_kernel_impl in vllm/utils/cpu_triton_utils.py copying its result back",
    ),
    Seam(
        target="vllm.v1.sample.rejection_sampler:rejection_sample",
        digests=("54d0b63f8ee6c0a5",),
        wrap=_wrap_rejection_sample,
        why="on a CPU 0.32 accepts placeholder drafts (-1) by stray memory: a request joining with one token is biased",
        retired_by="rejection_random_sample_kernel_impl in vLLM's CPU kernels rejecting negative draft tokens",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.__init__",
        digests=("c6d617e16f8e2c65",),
        wrap=_wrap_worker_init,
        why="Model Runner V2's seams go in when a worker is about to build that runner, not in every process",
        retired_by="a registry of speculators that plugins can add to",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        digests=("123955ae688517c8",),
        wrap=_wrap_worker_sample_tokens,
        why="drafts travel with the step's output; fetching them is a message more, 5% of a small model's step",
        retired_by="ModelRunnerOutput carrying draft tokens",
    ),
    Seam(
        target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens",
        digests=("f2014902518764ba",),
        wrap=_wrap_executor_sample_tokens,
        why="the same: keeps the drafts that came with the output",
        retired_by="the same",
    ),
    Seam(
        target="vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids",
        digests=("e7087c6bef25baaa",),
        wrap=_wrap_executor_take_draft_token_ids,
        why="the same: hands out the drafts that came with the output, and asks the worker if none did",
        retired_by="the same",
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        digests=("a69f3d323356ee82",),
        wrap=_wrap_compile_or_warm_up_model,
        why="draft lengths follow from what steps cost; they are timed once the model is compiled",
        retired_by="the worker warming up custom_class proposers",
    ),
    Seam(
        target="vllm.triton_utils.dispatcher:_rebind_kernels",
        digests=("69650cc6627a1bf3",),
        wrap=_wrap_rebind_kernels,
        why="0.32's scan of all modules fails where numba was used before a CPU worker starts; policies use numba",
        retired_by="the scan reading instance dicts with object.__getattribute__",
    ),
    Seam(
        target="vllm.v1.engine.input_processor:InputProcessor._validate_params",
        digests=("1533e2351fe8e310",),
        wrap=_wrap_validate_params,
        why="a request's own `eesd_*` options are refused before they reach the engine",
        retired_by="the speculative config taking part in SamplingParams.verify",
    ),
)


def check_host() -> list[SeamStatus]:
    """Return the state of every seam that goes in at registration, against the installed vLLM."""
    return [seams.check(seam) for seam in SEAMS]


def prepare_runner(expected: str, actual: str) -> None:
    """Make the worker's model runner ready for EESD.

    Args:
        expected: the runner the config was built for, "V1" or "V2".
        actual: the one vLLM takes after looking at everything else it was asked for.
    Raises:
        ValueError: they differ.
        RuntimeError: a seam into V2 does not fit the installed vLLM.
    """
    if expected != actual:
        raise ValueError(
            f"eesd: vLLM runs this engine on Model Runner {actual}, EESD was set up for {expected}: an option that "
            "vLLM's log names is not supported with eesd"
        )
    if actual == "V2":
        from vllm_eesd.host import v2_seams

        v2_seams.install()


def register() -> None:
    """Install the seams if all of them fit the installed vLLM; otherwise leave vLLM's behaviour alone.

    Called by vLLM in every process. When a seam does not fit, the one thing added is the refusal: asking for EESD
    fails with the seam's name and the versions.
    """
    misfits = [status for status in check_host() if not status.ok]
    if misfits:
        refuse(f"{misfits[0].target} {misfits[0].reason}")
        return
    for seam in SEAMS:
        seams.install(seam)


def refuse(cause: str) -> None:
    """Make asking for EESD an error that names `cause`; everything else goes its usual way."""
    from vllm import __version__

    message = (
        f"vllm-eesd cannot run with vLLM {__version__} (written for {', '.join(SUPPORTED_VLLM)}): {cause}. "
        "Install a supported vLLM or a newer vllm-eesd; `eesd doctor` shows every seam."
    )
    logging.getLogger("vllm.eesd").warning(message)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_speculative_config(self, *args, **kwargs):
            if is_eesd(self.speculative_config):
                raise ValueError(message)
            return original(self, *args, **kwargs)

        return create_speculative_config

    signpost = Seam(SEAMS[0].target, (), wrap, "to say why EESD is refused", "")
    try:
        seams.install(signpost)
    except (ImportError, AttributeError):
        pass  # Not even the place to say so exists: the warning above must do.


def seams_table(records: Sequence[Seam] = SEAMS) -> str:
    """Return a Markdown table of docs/seams.md, made from the records."""
    lines = ["| place in vLLM | why | what would retire it |", "|---|---|---|"]
    lines += [f"| `{seam.target}` | {seam.why} | {seam.retired_by} |" for seam in records]
    return "\n".join(lines) + "\n"
