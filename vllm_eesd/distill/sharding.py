"""The frozen target's layers, spread over the processes that train together: each keeps a share of every layer."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vllm_eesd.distill.model import Target


def shard_layers(target: Target, device: str) -> tuple[int, int]:
    """Leave each process its share of the target's decoder layers and return (parameters it holds, all of them).

    All processes must call this together. From then on a forward gathers a layer while it runs, so every process must
    run the same forwards. Embeddings, final norm and LM head stay whole: losses read the LM head's weight itself.

    Args:
        target: whole, on the CPU, the same in all processes.
        device: "cpu" or "cuda".
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in target.model.model.layers:
        # Said aloud: each layer is called by itself and so is a root, and a root would stay gathered.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    parameters = list(target.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return held, sum(p.numel() for p in parameters)
