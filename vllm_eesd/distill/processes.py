"""Several processes that distill one head together, as torch's launcher (`torchrun`) starts them."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

LONGEST_WAIT = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """This process among those that train together; alone, every method does nothing.

    Attributes:
        rank: of this process, from 0.
        count: of processes.
        sharded: whether each holds only its share of the target, so that no one can run it alone.
    """

    rank: int = 0
    count: int = 1
    sharded: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and prints."""
        return self.rank == 0

    @property
    def runs_target(self) -> bool:
        """Whether this one takes part when the target is run for the first one: to write text, or to measure."""
        return self.is_first or self.sharded

    def check_batch(self, batch: int, accumulate: int) -> None:
        """Refuse a batch that cannot be shared out evenly.

        Raises:
            ValueError: it is no multiple of processes times parts.
        """
        if batch % (self.count * accumulate):
            raise ValueError(
                f"batch is {batch}, must be a multiple of {self.count * accumulate} "
                f"({self.count} processes x accumulate {accumulate})"
            )

    def share_of(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch that every process has."""
        return batch[self.rank :: self.count]

    def average(self, loss: float, parameters: Iterable[nn.Parameter]) -> float:
        """Replace the gradients by their mean over the processes and return the mean loss."""
        if self.count == 1:
            return loss
        gradients = [parameter.grad for parameter in parameters]
        flat = torch.cat([gradients[0].new_tensor([loss])] + [gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        parts = flat[1:].split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return flat[0].item()

    def agree(self, value: float | str) -> float | str:
        """Return the first process's value, in all of them."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()


ALONE = Processes()


@contextlib.contextmanager
def launched_processes(device: str, sharded: bool = False) -> Iterator[Processes]:
    """Join the processes this one was launched with, by the environment variables of torch's launchers; else ALONE.

    Args:
        device: "cuda" gives each process of a machine its own GPU.
        sharded: whether they are to share one copy of the target.
    Raises:
        ValueError: there is no other process to share it with.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and sharded:
        raise ValueError("shard_target is set, but this is one process; start several with torchrun, or leave it out")
    if count == 1:
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The others wait while the first one writes the target's own text, for hours if need be.
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=LONGEST_WAIT)
    try:
        yield Processes(dist.get_rank(), count, sharded)
    finally:
        dist.destroy_process_group()
