"""Run the Triton kernels' tests under Triton's interpreter, where there is no GPU to run them on.

Each file gets a process of its own: the interpreter is chosen before Triton is imported and for good, and engines of
other tests in this process must not find it on.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
TIMEOUT_S = 900

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the tests in interpreted/ run in place"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process under the interpreter"),
]


@pytest.mark.parametrize("name", FILES)
def test_kernels_pass(name):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(FOLDER / name), "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]


def test_every_kernel_has_its_tests():
    assert {f"test_{name}.py" for name in ("exit_head", "rejection", "kv_fill", "noise")} <= set(FILES)
