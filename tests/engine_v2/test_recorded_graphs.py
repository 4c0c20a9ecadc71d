"""The stand-in for CUDA graphs itself: it repeats what was recorded, on the memory of then, and nothing else."""

import pytest
import torch
from recorded_graphs import Capture, Graph, install, launch


def captured(function, *args):
    """(graph, what the function returned while captured)."""
    graph = Graph()
    with torch.inference_mode(), Capture(graph):
        return graph, function(*args)


def test_operators_run_again_on_the_same_memory():
    x, total = torch.arange(4.0), torch.zeros(4)

    def step():
        total.add_(x)  # in place
        x[1:3].mul_(2)  # through a view
        return (x + total).clamp(max=9), x.view(2, 2)

    graph, (result, view) = captured(step)
    assert (total.tolist(), x.tolist(), result.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 3], [0, 3, 6, 6])
    address = result.data_ptr()
    x.fill_(1)
    graph.replay()
    assert (total.tolist(), x.tolist()) == ([1, 2, 3, 4], [1, 2, 2, 1])
    assert result.tolist() == [2, 4, 5, 5] and result.data_ptr() == address
    assert view.flatten().tolist() == x.tolist()
    x.fill_(0)
    graph.replay()
    assert result.tolist() == [1, 2, 3, 4]  # nothing but the memory's contents counts


def test_python_does_not_run_again():
    x, calls, factor = torch.ones(2), [], [3]

    def step():
        calls.append(1)
        return x * factor[0]

    graph, result = captured(step)
    factor[0] = 5
    x.fill_(2)
    graph.replay()
    assert result.tolist() == [6, 6] and calls == [1]


def test_results_of_several_tensors_and_given_memory():
    x, values = torch.tensor([[1.0, 5.0], [7.0, 2.0]]), torch.zeros(2)

    def step():
        torch.sum(x, dim=1, out=values)
        best = x.max(dim=1)
        return best.values, best.indices

    graph, results = captured(step)
    x.copy_(x.flip(1))
    graph.replay()
    assert [r.tolist() for r in results] == [[5, 7], [0, 1]] and values.tolist() == [6, 9]


def test_what_may_be_a_view_or_a_copy():
    x, ids = torch.arange(4.0).view(2, 2), torch.zeros(4, dtype=torch.int32)

    def step():
        ids[:] = x.t().reshape(4).int()  # a copy, and another one
        return x.reshape(4), x.float(), x.t().contiguous(), x.long()

    graph, results = captured(step)
    x.add_(4)
    graph.replay()
    assert ids.tolist() == [4, 6, 5, 7]
    assert [r.flatten().tolist() for r in results] == [[4, 5, 6, 7], [4, 5, 6, 7], [4, 6, 5, 7], [4, 5, 6, 7]]
    assert len(graph.calls) == 5


def test_a_buffer_that_moves_is_not_followed():
    holder = {"x": torch.ones(2)}
    graph, result = captured(lambda: holder["x"] + 1)
    holder["x"] = torch.full((2,), 5.0)
    graph.replay()
    assert result.tolist() == [2, 2]
    x = torch.ones(2)
    graph, result = captured(lambda: x + 1)
    x.set_(torch.full((2,), 5.0))
    graph.replay()
    assert result.tolist() == [2, 2]


@pytest.mark.parametrize(
    "read", [lambda x: x[0].item(), lambda x: int(x[0]), lambda x: bool(x[0] > 0), lambda x: x[x > 0], torch.nonzero]
)
def test_reading_a_value_is_refused(read):
    with pytest.raises(RuntimeError, match="reads the device's values"):
        captured(read, torch.ones(3))
    assert Capture.current is None
    torch.ones(3)[0].item()


def test_kernels_are_launched_again(monkeypatch):
    import triton
    import triton.language as tl

    @triton.jit
    def _add_kernel(x_ptr, y_ptr, by, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets) + by)

    graphs = install(monkeypatch)
    x, y, by = torch.arange(4.0), torch.zeros(4), [1]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), None, stream=None):
        _add_kernel[(2,)](x * 1, y, by[0], BLOCK=2)
        z = y + 0
    assert y.tolist() == [1, 2, 3, 4]
    by[0] = 7
    x.fill_(9)
    graphs[0].replay()
    assert y.tolist() == z.tolist() == [10] * 4
    assert len(graphs[0].calls) == 3
    _add_kernel[(2,)](x, y, by[0], BLOCK=2)
    assert y.tolist() == [16] * 4 and len(graphs[0].calls) == 3


def test_an_operator_written_in_python_is_recorded_as_what_it_does():
    """vLLM's attention is one: it looks up its layer's metadata, which a graph does not do again."""
    library = torch.library.Library("eesd", "FRAGMENT")
    library.define("recorded_graphs_test(Tensor(a!) x) -> Tensor")
    metadata = [2]

    def body(x):
        launch(torch.Tensor.mul_, x, metadata[0])
        return x.add_(1) * 10

    library.impl("recorded_graphs_test", body, "CPU")
    x = torch.ones(2)
    graph, result = captured(torch.ops.eesd.recorded_graphs_test, x)
    metadata[0] = 100
    graph.replay()
    assert x.tolist() == [7, 7] and result.tolist() == [70, 70]
