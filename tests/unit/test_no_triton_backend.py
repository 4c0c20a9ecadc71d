"""Run Model Runner V2's tests on a CPU: under Triton's interpreter, in a process that has it as its backend."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TIMEOUT_S = 1800

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the tests in interpreted/ run in place"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process under the interpreter"),
]


@pytest.mark.feature("Model Runner V2 (on a CPU, its kernels interpreted)", "the same answers")
@pytest.mark.feature("asynchronous scheduling (Model Runner V2)", "the same answers")
def test_v2_on_a_cpu():
    environment = os.environ | {"PYTHONPATH": str(HERE / "triton_cpu_backend"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted"), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]


def test_other_tests_do_not_see_the_backend():
    """Model Runner V1's tests are about a CPU as users have it: without Triton."""
    probe = "from vllm.triton_utils import HAS_TRITON; assert not HAS_TRITON"
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, timeout=TIMEOUT_S)
