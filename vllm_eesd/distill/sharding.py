"""The frozen target's layers, spread over the processes that train together: each keeps a share of every layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vllm_eesd.distill.model import Target


def shard_layers(target: Target, device: str) -> None:
    """Leave each process its share of the target's decoder layers, on `device`; all must call this together.

    From then on a forward gathers a layer while it runs, so every process must run the same forwards. Embeddings, final
    norm and LM head stay whole: losses read the LM head's weight, some tokens at a time.

    Args:
        target: whole, on the CPU, the same in all processes.
        device: "cpu" or "cuda".
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in target.model.model.layers:
        # Said aloud: each layer is called by itself and so is a root, and a root would stay gathered.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    target.to(torch.device(device))
