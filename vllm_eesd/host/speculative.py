"""The config object that carries EESD through vLLM; what must be refused is refused here, before an engine starts."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from vllm_eesd.config import EESDConfig
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, read_tensors
from vllm_eesd.host.compat import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm_eesd.policy import BetaPosterior, build_policy

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
PROPOSER = "vllm_eesd.host.v1.EarlyExitProposer"


class EESDSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative config with method `custom_class` (which selects Model Runner V1) and EESD's own settings.

    Attributes:
        eesd: what the user set.
        exit_head: which head drafts.
        head_directory: where its weights are; None when headless.
    """

    eesd: EESDConfig
    exit_head: ExitHeadConfig
    head_directory: str | None

    @classmethod
    def build(cls, spec: Any, target: ModelConfig, parallel: ParallelConfig) -> EESDSpeculativeConfig:
        """Return the validated config.

        Args:
            spec: "eesd" or the user's mapping.
        Raises:
            ValueError: one line: the field, its value, what is allowed.
        """
        if not isinstance(spec, str):
            spec = {key.replace("-", "_"): value for key, value in spec.items()}
        eesd = EESDConfig.parse(spec)
        check_target_model(target, parallel)
        exit_head, head_directory = resolve_exit_head(eesd, target)
        build_policy(eesd.policy, BetaPosterior(1), eesd.seed, eesd.policy_args)
        config = cls(
            method="custom_class",
            model=PROPOSER,
            num_speculative_tokens=eesd.num_speculative_tokens,
            target_model_config=target,
            target_parallel_config=parallel,
        )
        config.eesd, config.exit_head, config.head_directory = eesd, exit_head, head_directory
        # vLLM drafts for nobody once one row comes within K of the drafter's max_model_len; EESD limits each row.
        config.draft_model_config = copy.copy(target)
        config.draft_model_config.max_model_len = target.max_model_len + eesd.num_speculative_tokens + 1
        return config

    def compute_hash(self) -> str:
        """Return a hash with all that changes the target's compiled graph: where the exit layer's KV fill sits."""
        return f"{super().compute_hash()}-eesd-{self.exit_head.head_type}-{self.exit_head.exit_layer}"

    def __repr__(self) -> str:
        return (
            f"EESDSpeculativeConfig(exit_layer={self.exit_head.exit_layer}, head_type={self.exit_head.head_type!r}, "
            f"head={self.head_directory!r}, num_speculative_tokens={self.num_speculative_tokens}, "
            f"policy={self.eesd.policy!r})"
        )


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
        cause = str(error).splitlines()[0]
        raise ValueError(
            f"eesd: model={name!r} is neither a directory nor an available Hub repository: {cause}"
        ) from None
