"""The installed distribution: version, entry points, and the kernels under their installed name."""

import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import vllm_eesd

REPOSITORY = Path(__file__).resolve().parents[2]


def test_installed_version_is_the_package_version():
    assert metadata.version("vllm-eesd") == vllm_eesd.__version__


@pytest.mark.parametrize(
    ("group", "value"),
    [("vllm.general_plugins", "vllm_eesd.host.plugin:register"), ("console_scripts", "vllm_eesd.cli:main")],
)
def test_entry_points_name_callables(group, value):
    (entry,) = metadata.entry_points(group=group, name="eesd")
    assert entry.value == value
    assert callable(entry.load())


def test_kernels_are_part_of_the_package():
    import vllm_eesd.kernels

    assert Path(vllm_eesd.kernels.__file__).parent.name == "kernels"
    for name in ("reference.rejection", "gpu.rejection"):
        assert importlib.util.find_spec(f"vllm_eesd.kernels.{name}") is not None


def test_source_folder_does_not_hide_the_kernels_package():
    """With the repository root on sys.path, `import kernels` would be ours and break transformers."""
    found = importlib.util.find_spec("kernels")
    assert found is None or REPOSITORY / "kernels" not in Path(found.origin).parents


def test_importing_the_package_stays_cheap():
    """vLLM loads plugins in every process, so neither the package nor its plugin module may import anything heavy."""
    heavy = "torch", "vllm", "transformers", "pydantic", "rich"
    code = f"import sys, vllm_eesd, vllm_eesd.host.plugin; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve():
    assert vllm_eesd.EESDConfig.__module__ == "vllm_eesd.config"
    with pytest.raises(AttributeError, match="no_such_name"):
        vllm_eesd.no_such_name  # noqa: B018


def test_every_package_is_packed():
    """A folder that setup.py does not list works in an editable install and is missing from the wheel."""
    pytest.importorskip("setuptools")
    listing = "import setuptools; from distutils.core import run_setup; print(*run_setup('setup.py', stop_after='init')"
    command = [sys.executable, "-W", "ignore", "-c", f"{listing}.packages)"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    expected = {"vllm_eesd.models"}
    for folder, name in ((REPOSITORY / "vllm_eesd", "vllm_eesd"), (REPOSITORY / "kernels", "vllm_eesd.kernels")):
        for path in folder.rglob("*.py"):
            expected.add(".".join((name, *path.parent.relative_to(folder).parts)))
    assert set(done.stdout.split()) == expected


def test_no_page_holds_what_a_merge_left_behind():
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    assert len(pages) > 5
    marked = [p.name for p in pages if any(line[:8] in ("<<<<<<< ", ">>>>>>> ") for line in p.read_text().splitlines())]
    assert not marked
