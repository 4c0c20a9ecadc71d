"""These tests run Triton kernels: on a GPU in place, else under Triton's interpreter in a process of their own.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, and the choice holds for the process; vLLM's
engines in this repository's other tests must not see it. `test_under_the_interpreter.py` starts those processes.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


def multiply_bfloat16():
    """Mend the interpreter's tl.dot, which multiplies the bits of bfloat16 as if they were integers (Triton 3.9)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for x in (a, b)
            )
        return plain(self, a, b, d, *options)

    interpreter.InterpreterBuilder.create_dot = create_dot


if INTERPRETED:
    multiply_bfloat16()


@pytest.fixture(scope="session")
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN and the largest integers, so that an output left unwritten is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
