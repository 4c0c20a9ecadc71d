"""What Triton's interpreter lacks for vLLM's kernels: masks computed as integers, and libdevice's log1p."""

import functools


@functools.cache
def mend():
    """Add both, once. vLLM calls it in each of its processes, as a plugin: looking for backends is too early."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_bool(mask):
        return handle(mask.data.astype(bool), tl.int1)

    def log1p(x):
        return tl.tensor(handle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, as_bool(mask), *rest)
    builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(self, ptrs, value, as_bool(mask), *rest)
    libdevice.log1p = log1p
