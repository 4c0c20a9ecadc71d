"""Several processes that distill one head together, as torch's launcher (`torchrun`) starts them; one alone is the
first of one, and everything here does nothing for it."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vllm_eesd.distill.target import Target

LONGEST_WAIT = datetime.timedelta(days=7)


@contextlib.contextmanager
def launched_processes(device: str, sharded: bool = False) -> Iterator[None]:
    """Join the processes this one was launched with, by the environment variables of torch's launchers.

    Args:
        device: "cuda" gives each process of a machine its own GPU.
        sharded: whether they are to share one copy of the target.
    Raises:
        ValueError: there is no other process to share it with.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if sharded:
            raise ValueError(
                "shard_target is set, but this is one process; start several with torchrun, or leave it out"
            )
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The others wait while the first one writes the target's own text, for hours if need be.
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=LONGEST_WAIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Return which of the processes this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return how many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def agree(value: Any) -> Any:
    """Return the first process's value, in all of them."""
    values = [value]
    if count() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def wait() -> None:
    """Wait until all processes are here."""
    if count() > 1:
        dist.barrier()


def check_batch(batch: int, accumulate: int, num_processes: int) -> None:
    """Refuse a batch that cannot be shared out evenly.

    Raises:
        ValueError: it is no multiple of processes times parts.
    """
    if batch % (num_processes * accumulate):
        raise ValueError(
            f"batch is {batch}, must be a multiple of {num_processes * accumulate} "
            f"({num_processes} processes x accumulate {accumulate})"
        )


def average(loss: float, parameters: Iterable[nn.Parameter]) -> float:
    """Replace the gradients by their mean over the processes and return the mean loss."""
    if count() == 1:
        return loss
    gradients = [parameter.grad for parameter in parameters]
    losses = gradients[0].new_tensor([loss])
    for values in (losses, *gradients):
        dist.all_reduce(values)
        values /= count()
    return losses.item()


def shard_layers(target: Target, device: str) -> tuple[int, int]:
    """Leave each process its share of the target's decoder layers and return (parameters it holds, all of them).

    All processes must call this together. From then on a forward gathers a layer while it runs, so every process must
    run the same forwards. Embeddings, final norm and LM head stay whole: losses read the LM head's weight itself.

    Args:
        target: whole, on the CPU, the same in all processes.
        device: "cpu" or "cuda".
    """
    mesh = init_device_mesh(device, (count(),))
    for layer in target.model.model.layers:
        # Said aloud: each layer is called by itself and so is a root, and a root would stay gathered.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    parameters = list(target.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    return held, sum(p.numel() for p in parameters)
