"""CUDA graphs without CUDA: a capture records operators and kernel launches, and a replay runs these and nothing else.

As in a CUDA graph, what Python did while capturing is not done again: a number that was a Python number then is that
number for ever, and a tensor is the memory it had then. Tensors that an operator made keep their memory too: a
replay writes into it. What a graph does not forgive is refused while capturing: reading a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

#: Operators written in Python: a graph holds what they launch.
IN_PYTHON = ("vllm", "eesd")
#: Operators that only reserve memory.
RESERVING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
#: Operators whose result the host must know, which it cannot while it captures.
READING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`.

    Attributes:
        calls: what a replay does.
        num_replays: how often it was done.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.num_replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()


class Capture(TorchDispatchMode):
    """Stands in for `torch.cuda.graph`: a context in which everything runs, and is recorded in the graph."""

    #: The capture under way.
    current: ClassVar[Capture | None] = None

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None) -> None:
        super().__init__()
        self.graph, self._outer = graph, []

    def __enter__(self) -> Capture:
        self._outer.append(Capture.current)
        Capture.current = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        Capture.current = self._outer.pop()
        super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        if function.namespace in IN_PYTHON:
            with self:
                return function._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        by_mask = name == "index" and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if name in READING or by_mask:
            raise RuntimeError(f"{function} reads the device's values on the host while a graph is captured")
        result = function(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        # `to` and `reshape` say that they may give a view: what they gave decides.
        results = [_storage(tensor) for tensor in _tensors(result)]
        is_view = bool(results) and given.issuperset(results) and not function._schema.is_mutable
        if not is_view and name not in RESERVING:
            self.graph.calls.append(_again(function, args, kwargs, result))
        return result


def launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a kernel that is no operator; a capture records the launch with its arguments."""
    capture = Capture.current
    if capture is None:
        return kernel(*args, **kwargs)
    with _disable_current_modes():
        capture.graph.calls.append(_again(kernel, args, kwargs, None))
        return kernel(*args, **kwargs)


def _again(function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    """Return a call of the function on the same memory, results included."""
    args, kwargs = tree_map_only(torch.Tensor, _memory, (args, kwargs))
    given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
    made = [None if _storage(tensor) in given else _memory(tensor) for tensor in _tensors(result)]

    def call() -> None:
        values = _tensors(function(*args, **kwargs))
        for memory, value in zip(made, values[: len(made)], strict=True):
            if memory is not None:
                memory.copy_(value)

    return call


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, which stays where it is whatever becomes of the one given."""
    return torch.ops.aten.alias(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def install(patch: Any) -> list[Graph]:
    """Put the stand-ins in torch's place, and have launches of interpreted Triton kernels recorded.

    Returns:
        The graphs captured from then on.
    """
    from triton.runtime.interpreter import InterpretedFunction

    graphs, run = [], InterpretedFunction.run

    def graph():
        graphs.append(Graph())
        return graphs[-1]

    patch.setattr(torch.cuda, "CUDAGraph", graph)
    patch.setattr(torch.cuda, "graph", Capture)
    patch.setattr(InterpretedFunction, "run", lambda self, *args, **kwargs: launch(run, self, *args, **kwargs))
    return graphs
