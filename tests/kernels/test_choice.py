"""One implementation per device, of the same names and signatures; the CPU's shelf knows nothing of Triton."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from vllm_eesd import kernels

# What only the CPU takes: on a GPU the noise is counted by seed and position.
CPU_ONLY = {"rejection": {"uniforms"}}


def parameters(shelf, name):
    function = getattr(import_module(f"vllm_eesd.kernels.{shelf}.{kernels.FILE_OF[name]}"), name)
    return {p.name: (p.kind, p.default) for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize("name", sorted(kernels.FILE_OF))
def test_both_shelves_have_the_same_signatures(name):
    pytest.importorskip("triton")
    cpu, gpu = parameters("cpu", name), parameters("gpu", name)
    assert set(cpu) - set(gpu) == CPU_ONLY.get(name, set())
    assert list(gpu.items()) == [item for item in cpu.items() if item[0] in gpu]


@pytest.mark.parametrize("name", sorted(kernels.FILE_OF))
def test_the_package_has_the_function_for_this_machine(name):
    shelf = "gpu" if torch.cuda.is_available() else "cpu"
    assert getattr(kernels, name).__module__.startswith(f"vllm_eesd.kernels.{shelf}.")


def test_another_name_is_no_kernel():
    with pytest.raises(AttributeError, match="no_such_kernel"):
        kernels.no_such_kernel  # noqa: B018


def test_the_cpus_kernels_import_no_triton():
    program = (
        "import pkgutil, sys, torch; before = set(sys.modules);"
        "from importlib import import_module; from vllm_eesd.kernels import cpu;"
        "names = [name for _, name, _ in pkgutil.iter_modules(cpu.__path__)]; assert len(names) > 3;"
        "[import_module(f'vllm_eesd.kernels.cpu.{name}') for name in names];"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
