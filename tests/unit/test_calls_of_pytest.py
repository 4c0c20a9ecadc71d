"""`.ci/test`: every test is run by one of its calls, with Triton's interpreter or without; `make test` calls it."""

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


@pytest.fixture
def runner(monkeypatch):
    """`.ci/test` on a machine without a GPU; its `commands` lists what it would run: (call, arguments, paths)."""
    loader = SourceFileLoader("ci_test", str(ROOT / ".ci" / "test"))
    module = module_from_spec(spec_from_loader("ci_test", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    module.commands, module.statuses = [], {}

    def run(call, arguments, paths):
        module.commands.append((call.name, arguments, paths))
        return module.statuses.get(call.name, 0)

    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(module, "run", run)
    return module


def test_every_file_belongs_to_one_call(runner):
    for file in (ROOT / "tests").rglob("test_*.py"):
        path = str(file.relative_to(ROOT))
        calls = [call for call in (runner.PLAIN, *runner.INTERPRETED) if runner.paths_of(call, [path])]
        assert len(calls) == 1 and runner.paths_of(calls[0], [path]) == [path]
        assert calls[0].name == {"engine_v2": "engine_v2", "interpreted": "kernels"}.get(file.parent.name, "plain")


@pytest.mark.parametrize(
    ("paths", "run"),
    [
        ([], [("plain", []), ("kernels", []), ("engine_v2", [])]),
        (["tests/unit/test_cli.py::test_a"], [("plain", ["tests/unit/test_cli.py::test_a"])]),
        (["tests/engine_v2/test_lossless.py"], [("engine_v2", ["tests/engine_v2/test_lossless.py"])]),
        (["tests/kernels"], [("plain", ["tests/kernels"]), ("kernels", ["tests/kernels/interpreted"])]),
    ],
)
def test_paths_go_to_the_call_they_belong_to(runner, paths, run):
    assert runner.main(["-n", "2", *paths]) == 0
    assert runner.commands == [(name, ["-n", "2"], chosen) for name, chosen in run]


@pytest.mark.parametrize(
    ("arguments", "statuses", "expected"),
    [
        ([], {}, 0),
        ([], {"engine_v2": 1}, 1),
        (["-n", "2"], {"engine_v2": 5}, 5),  # all tests were asked for, and there were none: somebody lost them
        (["-k", "policy"], {"engine_v2": 5}, 0),
        (["-k", "policy"], {"plain": 1, "engine_v2": 5}, 1),
        (["-k", "nothing"], {"plain": 5, "kernels": 5, "engine_v2": 5}, 5),
        (["--lf"], {"plain": 5, "kernels": 0, "engine_v2": 5}, 0),
    ],
)
def test_a_call_without_tests_passes_only_where_arguments_chose(runner, arguments, statuses, expected):
    runner.statuses.update(statuses)
    assert runner.main(arguments) == expected
    assert len(runner.commands) == 3  # a failure does not keep the others from running


def test_on_a_gpu_there_is_one_call_of_everything(runner, monkeypatch):
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    assert runner.main(["tests/engine_v2", "tests/unit"]) == 0
    assert runner.commands == [("plain", [], ["tests/engine_v2", "tests/unit"])]


def test_every_kernel_has_its_tests():
    files = {path.name for path in (ROOT / "tests" / "kernels" / "interpreted").glob("test_*.py")}
    assert {f"test_{name}.py" for name in ("exit_head", "rejection", "kv_fill", "noise")} <= files


def test_engines_here_do_not_see_the_interpreter():
    """Model Runner V1's tests are about a CPU as users have it: without Triton."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("on a GPU nothing is interpreted")
    probe = "from vllm.triton_utils import HAS_TRITON; assert not HAS_TRITON"
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, timeout=TIMEOUT_S)


def pytest_here(*arguments, **environment):
    """Run pytest from the repository's root, with this environment and no more."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONSAFEPATH": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_tests_in_the_wrong_process_are_refused():
    done = pytest_here("--collect-only", "tests/kernels/interpreted/test_noise.py")
    assert done.returncode == 4 and "wants another process" in done.stderr, done.stdout + done.stderr
    done = pytest_here("--collect-only", "tests/unit/test_cli.py", TRITON_INTERPRET="1")
    assert done.returncode == 4 and "wants another process" in done.stderr, done.stdout + done.stderr


def test_a_skip_under_the_interpreter_is_a_failure(tmp_path):
    folder = tmp_path / "tests" / "kernels" / "interpreted"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(
        "import pytest\n\ndef test_skips():\n    pytest.skip('nothing here')\n\n"
        "@pytest.mark.xfail\ndef test_is_known():\n    assert False\n"
    )
    done = pytest_here("--rootdir", str(tmp_path), "-c", "/dev/null", str(folder), TRITON_INTERPRET="1")
    assert "1 failed, 1 xfailed" in done.stdout and "nothing here" in done.stdout, done.stdout + done.stderr
