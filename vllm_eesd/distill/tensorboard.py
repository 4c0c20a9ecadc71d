"""TensorBoard, where it is asked for and installed."""

from __future__ import annotations

from typing import Any


class _Nowhere:
    def add_scalar(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def open_tensorboard(directory: str | None) -> Any:
    """Return a SummaryWriter for `directory`; None gives one that writes nothing.

    Raises:
        ValueError: tensorboard is not installed.
    """
    if directory is None:
        return _Nowhere()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard: the package is not installed; `pip install tensorboard`") from None
    return SummaryWriter(directory)
