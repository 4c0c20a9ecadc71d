"""KV connectors: those that bring the exit head's KV along with the target's, and what is refused.

The head's layers stand in the target's own KV-cache group, so what moves whole blocks of that group's layers moves
theirs. What moves a layer's KV when its attention has run is told of theirs by the KV fill, `host/model/kv_fill.py`.
Nothing could fill them afterwards: of a prefix that was computed elsewhere there are no hidden states.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.config import KVTransferConfig

from vllm_eesd.exit_head.config import ExitHeadConfig
from vllm_eesd.host.environment import Environment

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

EXAMPLE, OFFLOADING = "ExampleConnector", "OffloadingConnector"
#: Those that were seen to bring the head's KV along: tests/engine_v1/test_kv_connectors.py.
SUPPORTED = (EXAMPLE, OFFLOADING)
#: Where vLLM offloads no KV: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs".
NO_OFFLOADING = ("cpu",)
#: What `OffloadingConnector` keeps blocks in if nothing is said; others keep them for other engines too.
OFFLOADING_SPEC = "CPUOffloadingSpec"
#: ExampleConnector's folder of all that it has stored.
STORAGE_PATH, DEFAULT_STORAGE = "shared_storage_path", "/tmp"
LEAVE_OUT = "leave it out or serve this model without eesd"


def transfer_config_of(args: EngineArgs) -> KVTransferConfig | None:
    """Return the user's, read from a mapping if need be: vLLM does that later."""
    given = args.kv_transfer_config
    return KVTransferConfig(**given) if isinstance(given, Mapping) else given


def connector_of(args: EngineArgs) -> tuple[str | None, str]:
    """Return the connector that vLLM will take, None for none, and the option that says so.

    Source: vllm/config/vllm.py, VllmConfig._post_init_kv_transfer_config.
    """
    if args.kv_offloading_size is None:
        transfer = transfer_config_of(args)
        name = None if transfer is None else transfer.kv_connector
        return name, f"kv_connector={name!r}"
    if args.kv_offloading_backend == "lmcache":
        return "LMCacheMPConnector", "kv_offloading_backend='lmcache'"
    if envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
        return "SimpleCPUOffloadConnector", "VLLM_USE_SIMPLE_KV_OFFLOAD=1"
    return OFFLOADING, f"kv_offloading_size={args.kv_offloading_size!r}"


def check_kv_connector(args: EngineArgs, environment: Environment) -> None:
    """Refuse connectors that would not move the head's KV, or were not seen to.

    Raises:
        ValueError: such a connector is asked for, or one that cannot work here.
    """
    name, option = connector_of(args)
    if name is None:
        return
    transfer = transfer_config_of(args)
    if transfer is not None and transfer.kv_connector_module_path is not None:
        name, option = None, f"kv_connector_module_path={transfer.kv_connector_module_path!r:.200}"
    if name not in SUPPORTED:
        raise ValueError(
            f"eesd: {option} is not supported (whether its KV connector moves the exit head's KV with the target's was "
            f"not tested); supported: {', '.join(SUPPORTED)}; {LEAVE_OUT}"
        )
    if name == OFFLOADING:
        _check_offloading(transfer, option, environment)
    elif environment.platform != "cpu" and not args.enforce_eager:
        raise ValueError(
            f"eesd: {option} is not supported with CUDA graphs (it stores a layer's KV from Python, which a replayed "
            "graph does not run); set enforce_eager=True"
        )


def _check_offloading(transfer: KVTransferConfig | None, option: str, environment: Environment) -> None:
    """Refuse to offload where vLLM does not, or to what other engines read.

    Raises:
        ValueError: one of the two.
    """
    if environment.platform in NO_OFFLOADING:
        raise ValueError(
            f"eesd: {option} is not supported here (vLLM says: CPU Offloading is currently only supported on "
            "CUDA-alike and XPU GPUs); leave it out"
        )
    spec = OFFLOADING_SPEC if transfer is None else transfer.get_from_extra_config("spec_name", OFFLOADING_SPEC)
    if spec != OFFLOADING_SPEC:
        raise ValueError(
            f"eesd: spec_name={spec!r:.200} of {OFFLOADING} is not supported (another engine's exit head could read "
            f"what this one's wrote); supported: {OFFLOADING_SPEC}; {LEAVE_OUT}"
        )


def with_own_storage(args: EngineArgs, head: ExitHeadConfig, head_directory: str | None) -> KVTransferConfig | None:
    """Return the KV transfer config, ExampleConnector's with a folder of its own for this exit head.

    The connector finds a prefix by its tokens alone and then reads a file for every layer: stored by an engine without
    this head it would lack the head's, which ends the engine, or hold another's.

    Args:
        head: the exit head.
        head_directory: of its files; None for a head without any, which has no KV either.
    """
    transfer = transfer_config_of(args)
    if transfer is None or transfer.kv_connector != EXAMPLE or head_directory is None:
        return transfer
    digest = hashlib.sha256(f"{head.exit_layer} {head.aux_layers}".encode())
    for path in sorted(Path(head_directory).glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    folder = Path(transfer.get_from_extra_config(STORAGE_PATH, DEFAULT_STORAGE))
    own = f"eesd-{digest.hexdigest()[:16]}"
    if folder.name == own:  # an engine's arguments may be read twice
        return transfer
    transfer = copy.copy(transfer)
    transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | {STORAGE_PATH: str(folder / own)}
    return transfer
