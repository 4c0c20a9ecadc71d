"""Which exit head drafts: the one asked for, the one shipped with the target, or none but an exit layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_eesd.config import EESDConfig
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, read_tensors
from vllm_eesd.exit_head.types import HEADLESS

if TYPE_CHECKING:
    from vllm.config import ModelConfig

#: Checkpoints trained with layer dropout and early-exit loss, drafting headless.
#: Source: the benchmark table of Hugging Face's LayerSkip article (data set ariG23498/layer-skip-assets).
LAYERSKIP_EXIT_LAYERS = {"facebook/layerskip-llama2-7B": 4}


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
        return head, directory if head.kind.has_kv else None
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
    return ExitHeadConfig(exit_layer=exit_layer, head_type=HEADLESS.name, verifier=verifier), None


def command_for_a_head(directory: str | None, target: str) -> str:
    """Return what to run where an exit head was given as the model to serve and its target is not here; "" if not so.

    Args:
        directory: the head's.
        target: the model that vLLM looked for.
    """
    try:
        verifier = ExitHeadConfig.load(directory).verifier if directory else None
    except ValueError:
        return ""
    if verifier is None or verifier.name_or_path != target:
        return ""
    above = Path(directory).resolve().parent
    if Path(directory).resolve().name == "eesd" and (above / "config.json").is_file():
        command = f"vllm serve {above} --speculative-config eesd"
    else:
        command = f"""vllm serve TARGET --speculative-config '{{"method": "eesd", "model": "{directory}"}}'"""
    return (
        f"eesd: {directory} is an exit head and no model, and {target!r}, for which it was made, is not here: serve "
        f"its target: {command}"
    )


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
