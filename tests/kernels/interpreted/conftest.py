"""These tests run Triton kernels: on a GPU in place, else under Triton's interpreter in a process of their own.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, and the choice holds for the process; vLLM's
engines in this repository's other tests must not see it. `.ci/test` starts that process.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def mend_small_floats():
    """Give the interpreter a GPU's arithmetic on bfloat16 and float8.

    Triton 3.6 and 3.9 truncate float32 to bfloat16, do not carry when a float8 rounds up, and multiply the bits of
    bfloat16 matrices as if they were integers.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    floats = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    plain_convert, plain_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(values, source, target, rounding_mode):
        if source not in floats or target not in floats:
            return plain_convert(values, source, target, rounding_mode)
        converted = torch.from_numpy(np.ascontiguousarray(values)).view(floats[source]).to(floats[target])
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[converted.element_size()]
        return converted.view(bits).numpy().reshape(values.shape)

    def dot(self, a, b, d, *options):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle(convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)
                for x in (a, b)
            )
        return plain_dot(self, a, b, d, *options)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


if INTERPRETED:
    mend_small_floats()


@pytest.fixture(scope="session")
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN and the largest integers, so that an output left unwritten is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
