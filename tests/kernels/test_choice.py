"""One implementation per device, of the same names and signatures; the CPU's knows nothing of Triton."""

import inspect
import subprocess
import sys

import pytest

from vllm_eesd import kernels


def test_both_devices_offer_the_same_signatures():
    pytest.importorskip("triton")
    cpu, gpu = kernels.for_device("cpu"), kernels.for_device("cuda")
    assert set(vars(cpu)) == set(vars(gpu)) == set(kernels.NAMES)
    for name in kernels.NAMES:
        ours, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(side, name)).parameters.values()]
            for side in (cpu, gpu)
        )
        assert ours == theirs, name


def test_the_cpus_kernels_import_no_triton():
    program = (
        "import sys, torch; before = set(sys.modules); from vllm_eesd import kernels; kernels.for_device('cpu');"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
