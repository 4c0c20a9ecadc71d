"""The config object that carries EESD through vLLM; what must be refused is refused here, before an engine starts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_eesd.config import LONGEST_DRAFT, LONGEST_NGRAM_DRAFT, EESDConfig, check_state_file, check_trace_file
from vllm_eesd.exit_head.config import ExitHeadConfig
from vllm_eesd.host.environment import Environment, read_environment
from vllm_eesd.host.head_choice import resolve_exit_head
from vllm_eesd.host.kv_connectors import check_kv_connector
from vllm_eesd.host.longest_draft import fitting
from vllm_eesd.host.metrics import make_metrics_directory
from vllm_eesd.host.vllm_source import find, installed_source
from vllm_eesd.policy_args import read_policy_args

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

#: Targets whose layers the drafter may call in place: SupportsEagle3 in vLLM, and tested end to end. gpt-oss is not
#: among them: every other layer of it attends through a sliding window.
SUPPORTED_ARCHITECTURES = (
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
PROPOSER = "vllm_eesd.host.v1.proposer.EarlyExitProposer"


class RequestRefused(VLLMValidationError, ValueError):
    """A request asks for something that EESD does not know: status 400 with its message.

    Of a `ValueError` that is not vLLM's own the server keeps the message to itself, and answers 500.
    """


class EESDSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative config with EESD's own settings.

    Its `method` selects the model runner: `custom_class` is V1's, and synchronous; `draft_model` runs on V2 with
    asynchronous scheduling. EESD is recognised by this class; `method` only
    selects the runner.

    Attributes:
        eesd: what the user set.
        exit_head: which head drafts.
        head_directory: where its weights are; None when headless.
        metrics_directory: where workers publish their counters for /metrics.
        runner: "V1" or "V2", the model runner this was built for: the one vLLM would take by itself.
        engine_index: of several engines that serve in parallel, which one this is; set in its worker.
        graph_kernels: kernels that were chosen for the target's compiled graph while the model was loaded.
    """

    eesd: EESDConfig
    exit_head: ExitHeadConfig
    head_directory: str | None
    metrics_directory: str
    runner: str
    engine_index = 0
    graph_kernels = ""

    @classmethod
    def build(
        cls, spec: object, target: ModelConfig, parallel: ParallelConfig, args: EngineArgs | None = None
    ) -> EESDSpeculativeConfig:
        """Return the validated config.

        Args:
            spec: "eesd" or the user's mapping.
            args: the engine's other options; None: they leave room for any draft.
        Raises:
            ValueError: one line: the field, its value, what is allowed.
        """
        eesd = EESDConfig.parse(spec)
        check_target_model(target, parallel)
        exit_head, head_directory = resolve_exit_head(eesd, target)
        policy_args = read_policy_args(eesd.policy, eesd.policy_args)
        check_state_file(eesd.state_file)
        check_trace_file(eesd.trace_file)
        environment = read_environment()
        check_runner(environment, target, parallel)
        check_batch_sizes(eesd, environment)
        # V2's scheduler books the longest draft for every request, whatever is drafted.
        default = LONGEST_NGRAM_DRAFT if policy_args.uses_ngrams and environment.runner == "V1" else LONGEST_DRAFT
        longest = default if eesd.num_speculative_tokens is None else eesd.num_speculative_tokens
        if args is not None:
            check_kv_connector(args, environment)
            check_scheduling(environment, args)
            check_sampling(environment, args)
            longest = fitting(longest, eesd, args, target, parallel)
        config = cls(
            method="custom_class",
            model=PROPOSER,
            num_speculative_tokens=longest,
            target_model_config=target,
            target_parallel_config=parallel,
        )
        config.eesd, config.exit_head, config.head_directory = eesd, exit_head, head_directory
        config.metrics_directory = make_metrics_directory()
        config.runner = environment.runner
        if config.runner == "V2":
            # Set afterwards: building it as a draft model would load a second model's config.
            config.method, config.model = "draft_model", target.model
            config.draft_sample_method = "probabilistic" if eesd.draws_drafts else "greedy"
            config.rejection_sample_method = "block" if eesd.draws_drafts and blocks_are_exact() else "standard"
            config.num_speculative_tokens_per_batch_size = eesd.num_speculative_tokens_per_batch_size
            return config
        # vLLM drafts for no row once one comes within K of the drafter's max_model_len; EESD limits each row.
        config.draft_model_config = copy.copy(target)
        config.draft_model_config.max_model_len = target.max_model_len + longest + 1
        return config

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Return 0: a step's drafting reads no token that the target does not read."""
        return 0

    def compute_hash(self) -> str:
        """Return a hash with all that changes a compiled graph: what the KV fill reads, how large the LM head is."""
        head = self.exit_head
        shape = head.head_type, head.exit_layer, head.head_layers, head.draft_vocab_size, *head.aux_layers
        return f"{super().compute_hash()}-eesd-{'-'.join(map(str, shape))}-{self.graph_kernels}"

    def __repr__(self) -> str:
        return (
            f"EESDSpeculativeConfig(exit_layer={self.exit_head.exit_layer}, head_type={self.exit_head.head_type!r}, "
            f"head={self.head_directory!r}, num_speculative_tokens={self.num_speculative_tokens}, "
            f"policy={self.eesd.policy!r})"
        )


def blocks_are_exact() -> bool:
    """Return whether the installed vLLM's block verification on Model Runner V2 leaves the target's distribution.

    Otherwise it tests a position after the accepted drafts with the same number again in the next round, and some
    outputs are too frequent: two to three percent of them (`tests/kernels/test_several_rounds.py`).
    """
    # Until vLLM 0.33 it does.
    return find(installed_source, "vllm.v1.worker.gpu.sample.gumbel", "spec_step_seed") is not None


def check_target_model(target: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse what EESD would get wrong.

    Raises:
        ValueError: the target or the parallel layout is not supported.
    """
    if target.runner_type != "generate":
        raise ValueError(
            f"eesd: runner={target.runner_type!r} is not supported (a model that embeds, classifies or scores "
            "generates no tokens to draft); serve this model without eesd"
        )
    architecture = (target.architectures or ["unknown"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"eesd: target architecture {architecture!r} is not supported (its vLLM class must have SupportsEagle3 and "
            f"be tested with EESD); supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if target.model_impl not in ("auto", "vllm"):
        raise ValueError(
            f"eesd: model_impl={target.model_impl!r} is not supported (only layers of vLLM's own models can be drafted "
            "with); allowed: 'auto', 'vllm'"
        )
    if target.uses_mrope:
        raise ValueError("eesd: targets with M-RoPE positions are not supported; serve this model without eesd")
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"eesd: pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported (the drafted layers must "
            "be on one rank); use tensor_parallel_size instead"
        )
    if target.get_sliding_window() is not None:
        raise ValueError("eesd: targets with sliding-window attention are not supported; serve this model without eesd")
    if target.enable_sleep_mode:
        raise ValueError(
            "eesd: enable_sleep_mode is not supported (a deep sleep discards the exit head's weights, which nothing "
            "loads again); leave it out or serve this model without eesd"
        )


def check_runner(environment: Environment, target: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse what EESD does not do on the model runner vLLM takes here.

    Raises:
        ValueError: it would not draft, or draft wrongly.
    """
    if environment.runner == "V1" and environment.platform != "cpu":
        raise ValueError(
            f"eesd: Model Runner V1 ({environment.runner_reason}) is supported on a CPU only; on "
            f"{environment.platform} EESD drafts on V2: unset VLLM_USE_V2_MODEL_RUNNER"
        )
    if environment.runner == "V2" and target.logits_processors:
        raise ValueError(
            f"eesd: logits_processors={target.logits_processors!r:.200} are not supported on Model Runner V2 (what "
            "they make of drafted tokens was not tested); leave them out or serve this model without eesd"
        )
    if parallel.data_parallel_size > 1 and target.is_moe:
        raise ValueError(
            f"eesd: data_parallel_size={parallel.data_parallel_size} is not supported with a mixture of experts (its "
            "ranks would draft different lengths); use tensor_parallel_size instead"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("eesd: context parallelism is not supported; use tensor_parallel_size instead")


def check_scheduling(environment: Environment, args: EngineArgs) -> None:
    """Refuse asynchronous scheduling where drafts are not known before the next step is scheduled.

    Raises:
        ValueError: it was asked for on Model Runner V1.
    """
    if environment.runner == "V1" and args.async_scheduling:
        raise ValueError("eesd: async_scheduling=True is not supported on Model Runner V1; leave it out")


def check_sampling(environment: Environment, args: EngineArgs) -> None:
    """Refuse what vLLM does to a plain engine's tokens and to no drafted ones, or to those of its own methods only.

    Raises:
        ValueError: tokens of a replayed trace, or marked ones, were asked for.
    """
    if args.watermark_config is not None:
        raise ValueError(
            "eesd: watermark_config is not supported (vLLM marks the drafts of its own methods only); leave it out or "
            "serve this model without eesd"
        )
    if environment.runner == "V2" and args.enable_trace_replay:
        raise ValueError(
            "eesd: enable_trace_replay is not supported (vLLM replays no trace with drafts); leave it out or serve "
            "this model without eesd"
        )


def check_batch_sizes(eesd: EESDConfig, environment: Environment) -> None:
    """Refuse a schedule of draft lengths that vLLM would refuse in the engine's process, or that nothing reads.

    Raises:
        ValueError: the field, its value and what is allowed.
    """
    name, given = "num_speculative_tokens_per_batch_size", eesd.num_speculative_tokens_per_batch_size
    if given is None:
        return
    if environment.runner == "V1":
        raise ValueError(f"eesd: {name}: Model Runner V1 books only what was drafted; leave it out")
    try:
        validate_and_normalize_dynamic_sd_schedule(given)
    except ValueError as error:
        raise ValueError(f"eesd: {name}={given!r:.200} is not valid: {error}") from None
