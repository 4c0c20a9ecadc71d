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
_V2 = "vllm.v1.worker.gpu.spec_decode"
#: Where the functions are that Model Runner V2 imports by name, and the classes that EESD's take the place of.
IMPORTED = (_V2, f"{_V2}.adaptive_verification", f"{_V2}.speculator")


@pytest.fixture
def make_wheel(tmp_path):
    """Return make(edit): a wheel with the installed modules that seams are in, each source changed by `edit`."""

    def make(edit):
        path = tmp_path / "vllm-0.0.0-py3-none-any.whl"
        package = Path(importlib.util.find_spec("vllm").origin).parent
        with zipfile.ZipFile(path, "w") as wheel:
            names = {seam.target.partition(":")[0] for seam in SEAMS} | set(IMPORTED) | imported_by_name()
            for name in names:
                file = package.parent.joinpath(*name.split("."))
                file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
                wheel.writestr(str(file.relative_to(package.parent)), edit(file.read_text()))
        return path

    return make


def imported_by_name():
    """The modules of vLLM that EESD imports from."""
    files = Path(plugin.__file__).parent.glob("*compat.py")
    nodes = (node for path in files for node in ast.parse(path.read_text()).body)
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


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
        )

    done = run(make_wheel(edit))
    assert done.returncode == 1
    assert "GPUModelRunner.take_draft_token_ids: CHANGED" in done.stdout and "(self, wait)" in done.stdout
    assert "GPUModelRunner.add_requests: GONE" in done.stdout
    assert "AdaptiveVerificationManager.compact_batch: CHANGED, now (self, now," in done.stdout
    assert "linear:ReplicatedLinear: GONE, compat.py imports it" in done.stdout
