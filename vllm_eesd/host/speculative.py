"""The config object that carries EESD through vLLM; what must be refused is refused here, before an engine starts."""

from __future__ import annotations

import copy
import os
from pathlib import Path

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_eesd.config import LONGEST_COPY, LONGEST_DRAFT, EESDConfig
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, read_tensors
from vllm_eesd.host.environment import Environment, read_environment
from vllm_eesd.host.metrics import make_metrics_directory
from vllm_eesd.host.vllm_source import find, installed_source
from vllm_eesd.policy_args import read_policy_args

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
#: Checkpoints trained with layer dropout and early-exit loss, drafting headless.
#: Source: the benchmark table of Hugging Face's LayerSkip article (data set ariG23498/layer-skip-assets).
LAYERSKIP_EXIT_LAYERS = {"facebook/layerskip-llama2-7B": 4}
PROPOSER = "vllm_eesd.host.v1.proposer.EarlyExitProposer"


class RequestRefused(VLLMValidationError, ValueError):
    """A request asks for something that EESD does not know: status 400 with its message.

    Of a `ValueError` that is not vLLM's own the server keeps the message to itself, and answers 500.
    """


class EESDSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative config with EESD's own settings.

    Its `method` selects the model runner: `custom_class` is V1's, and synchronous; `draft_model` runs on V2 with
    asynchronous scheduling. Who is meant is told by this class, not by the method.

    Attributes:
        eesd: what the user set.
        exit_head: which head drafts.
        head_directory: where its weights are; None when headless.
        metrics_directory: where workers publish their counters for /metrics.
        runner: "V1" or "V2", the model runner this was built for: the one vLLM would take by itself.
        graph_kernels: kernels that were chosen for the target's compiled graph while the model was loaded.
    """

    eesd: EESDConfig
    exit_head: ExitHeadConfig
    head_directory: str | None
    metrics_directory: str
    runner: str
    graph_kernels = ""

    @classmethod
    def build(cls, spec: object, target: ModelConfig, parallel: ParallelConfig) -> EESDSpeculativeConfig:
        """Return the validated config.

        Args:
            spec: "eesd" or the user's mapping.
        Raises:
            ValueError: one line: the field, its value, what is allowed.
        """
        eesd = EESDConfig.parse(spec)
        check_target_model(target, parallel)
        exit_head, head_directory = resolve_exit_head(eesd, target)
        policy_args = read_policy_args(eesd.policy, eesd.policy_args)
        environment = read_environment()
        check_runner(environment, target, parallel)
        check_batch_sizes(eesd, environment)
        longest = eesd.num_speculative_tokens
        if longest is None:
            # V2's scheduler books the longest draft for every request, whatever is drafted.
            longest = LONGEST_COPY if policy_args.uses_ngrams and environment.runner == "V1" else LONGEST_DRAFT
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

    Otherwise it tests a position behind the accepted drafts with the same number again in the next round, and some
    outputs are too frequent: two to three percent of them (`tests/kernels/test_several_rounds.py`).
    """
    # Until vLLM 0.33 it does.
    return find(installed_source, "vllm.v1.worker.gpu.sample.gumbel", "spec_step_seed") is not None


def check_target_model(target: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse what EESD would get wrong.

    Raises:
        ValueError: the target or the parallel layout is not supported.
    """
    architecture = (target.architectures or ["unknown"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"eesd: target architecture {architecture!r} is not supported (its vLLM class must have SupportsEagle3 and "
            f"be tested with EESD); supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
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
    if target.logits_processors:
        # vLLM would refuse too, but in the worker, whose message only its log shows.
        raise ValueError(
            f"eesd: logits_processors={target.logits_processors!r:.200} are not supported (vLLM knows none under "
            "speculation); leave them out or serve this model without eesd"
        )


def check_kv_connector(kv_transfer_config: object, kv_offloading_size: float | None) -> None:
    """Refuse to move KV between engines or memories: connectors see a layer's cache when its attention runs.

    The exit layer's attention does not run in the target's forward, which fills its cache all the same.

    Raises:
        ValueError: one of the two is set.
    """
    for field, value in (("kv_transfer_config", kv_transfer_config), ("kv_offloading_size", kv_offloading_size)):
        if value is not None:
            raise ValueError(
                f"eesd: {field}={value!r:.200} is not supported (a KV connector would leave the exit layer's cache "
                "behind); leave it out or serve this model without eesd"
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
    if parallel.data_parallel_size > 1 and target.is_moe:
        raise ValueError(
            f"eesd: data_parallel_size={parallel.data_parallel_size} is not supported with a mixture of experts (its "
            "ranks would draft different lengths); use tensor_parallel_size instead"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("eesd: context parallelism is not supported; use tensor_parallel_size instead")


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


def resolve_exit_head(eesd: EESDConfig, target: ModelConfig) -> tuple[ExitHeadConfig, str | None]:
    """Return the head to draft with and the directory of its weights (None when headless).

    In order: `model`, `exit_layer` alone (headless), `<target>/eesd/`, the LayerSkip table.

    Raises:
        ValueError: no head was found, or it does not fit the target.
    """
    text_config = target.hf_text_config
    shipped = Path(target.model) / "eesd"
    directory = eesd.model
    if directory is None and eesd.exit_layer is None and shipped.is_dir():
        directory = str(shipped)
    if directory is not None:
        directory = local_directory(directory)
        head = ExitHeadConfig.load(directory)
        head.check_target(text_config)
        if eesd.exit_layer not in (None, head.exit_layer):
            raise ValueError(
                f"eesd: exit_layer={eesd.exit_layer} is not the head's ({head.exit_layer} in {directory}); "
                "leave exit_layer out or distill a head for it"
            )
        read_tensors(directory)  # a damaged file is refused here, before anything starts
        return head, None if head.head_type == "headless" else directory
    exit_layer = eesd.exit_layer if eesd.exit_layer is not None else LAYERSKIP_EXIT_LAYERS.get(target.model)
    if exit_layer is None:
        raise ValueError(
            f"eesd: no exit head: {shipped} does not exist. Give 'model' (a directory made by `eesd distill`), or "
            "'exit_layer' to draft headless from that layer"
        )
    num_layers = text_config.num_hidden_layers
    if not 0 < exit_layer <= num_layers:
        raise ValueError(
            f"eesd: exit_layer={exit_layer} is out of range; the target has {num_layers} layers: 1..{num_layers - 1}"
        )
    verifier = Verifier(
        name_or_path=str(target.model),
        architecture=target.architectures[0],
        hidden_size=text_config.hidden_size,
        num_hidden_layers=num_layers,
        vocab_size=text_config.vocab_size,
    )
    return ExitHeadConfig(exit_layer=exit_layer, head_type="headless", verifier=verifier), None


def local_directory(name: str) -> str:
    """Return the directory `name` is, or the local snapshot of the Hub repository it names.

    Raises:
        ValueError: it is neither.
    """
    if os.path.isdir(name) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return os.path.expanduser(name)
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"])
    except Exception as error:  # the Hub client's own hierarchy, network errors included
        cause = " ".join(str(error).split())
        raise ValueError(
            f"eesd: model={name!r:.200} is neither a directory nor an available Hub repository: {cause:.200}"
        ) from None
