"""`.ci/check-seams` reads another release's wheel; of the installed release it must say what `check_host` says."""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_eesd.host import plugin

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "check-seams"
SEAMS = [seam for records in plugin.PLACES.values() for seam in records]
#: What is in the wheels: where calls of EESD's are looked for, and what else it wraps or imports.
PACKAGES = ("config", "engine", "triton_utils", "v1")


@pytest.fixture
def make_wheel(tmp_path):
    """Return make(edit): a wheel with all that is compared of the installed vLLM, each source changed by `edit`."""

    def make(edit):
        path = tmp_path / "vllm-0.0.0-py3-none-any.whl"
        package = Path(importlib.util.find_spec("vllm").origin).parent
        files = {file for name in PACKAGES for file in (package / name).rglob("*.py")}
        for module in modules_of_ours():
            file = package.parent.joinpath(*module.split("."))
            files.add(file / "__init__.py" if file.is_dir() else file.with_suffix(".py"))
        with zipfile.ZipFile(path, "w") as wheel:
            for file in sorted(files):
                wheel.writestr(str(file.relative_to(package.parent)), edit(file.read_text()))
        return path

    return make


def modules_of_ours():
    """The modules of vLLM that EESD wraps or imports from."""
    files = Path(plugin.__file__).parent.rglob("*.py")
    nodes = (node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom))
    return {seam.module for seam in SEAMS} | {node.module for node in nodes if node.module.startswith("vllm.")}


def run(wheel):
    return subprocess.run([sys.executable, str(SCRIPT), str(wheel)], capture_output=True, text=True)


def test_the_installed_release_fits(make_wheel):
    done = run(make_wheel(lambda source: source))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": fits\n") == len(SEAMS) == len(done.stdout.splitlines()) - 1


def test_other_arguments_and_vanished_places_are_told(make_wheel):
    def edit(source):
        return (
            source.replace("def take_draft_token_ids(self)", "def take_draft_token_ids(self, wait)")
            .replace("def add_requests(", "def add_all_requests(")
            .replace("def compact_batch(\n        self,", "def compact_batch(\n        self, now,")
            .replace("class ReplicatedLinear(", "class Replicated(")
            .replace("def init_cudagraph_manager(", "def init_graphs(")
            .replace("num_tokens_no_spec", "num_tokens_alone")
            .replace("    idx_mapping_np: np.ndarray\n", "")
        )

    done = run(make_wheel(edit))
    assert done.returncode == 1
    assert "GPUModelRunner.take_draft_token_ids: CHANGED" in done.stdout and "(self, wait)" in done.stdout
    assert "GPUModelRunner.add_requests: GONE" in done.stdout
    assert "AdaptiveVerificationManager.compact_batch: CHANGED, now\n      (self, now," in done.stdout
    assert "BaseSpeculator.init_cudagraph_manager: GONE" in done.stdout
    assert "linear:ReplicatedLinear: GONE, compat.py imports it" in done.stdout
    assert "gpu_input_batch:InputBatch.num_tokens_no_spec: GONE, v1/batch.py reads it" in done.stdout
    assert "gpu.input_batch:InputBatch.idx_mapping_np: GONE, v2/batch.py reads it" in done.stdout


#: A line of vLLM's, what it is changed to, and what is told of that.
CALLS = (
    (
        "adaptive_verification.reallocate_drafts(req_ids, idx_mapping)",
        "adaptive_verification.reallocate_drafts(req_ids, idx_mapping)[:2]",
        "GPUModelRunner.prepare_inputs calls reallocate_drafts: CHANGED, now\n      ",
    ),
    (
        "class CPUWorker(Worker):\n",
        "class CPUWorker(Worker):\n    def warm_up(self):\n        warmup_kernels(self)\n\n",
        "CPUWorker.warm_up calls warmup_kernels: CHANGED, now\n      warmup_kernels(self)\n",
    ),
    ("self.speculator.supports_mm_inputs", "self.speculator.supports_all", "speculator.supports_all: CHANGED, now\n"),
    (
        "draft_tokens = self.speculator.propose(",
        "draft_tokens = self.speculator.propose_nothing(",
        "GPUModelRunner.sample_tokens calls propose: GONE\n",
    ),
    (
        "cudagraph_stats=cudagraph_stats,",
        "cudagraph_stats=None,",
        "GPUModelRunner.execute_model calls ExecuteModelState: CHANGED, now\n      ",
    ),
)


def test_another_call_of_what_eesd_stands_in_for_is_told(make_wheel):
    """Three changes of vLLM 0.33 showed in no signature and no digest, but in how EESD's objects are called."""
    found = set()

    def edit(source):
        for before, after, _ in CALLS:
            found.update([before] if before in source else [])
            source = source.replace(before, after)
        return source

    done = run(make_wheel(edit))
    assert found == {before for before, _, _ in CALLS}, "vLLM has no such line any more"
    assert done.returncode == 1
    assert [told for _, _, told in CALLS if told not in done.stdout] == [], done.stdout
    assert done.stdout.count(": fits\n") == len(SEAMS)
