"""The driver Triton asks what it runs on."""

import os

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """Active wherever the interpreter is; it launches nothing, since interpreted kernels are Python."""

    @classmethod
    def is_active(cls):
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("interpreted kernels are not compiled")

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_benchmarker(self):
        raise NotImplementedError("times of interpreted kernels mean nothing")
