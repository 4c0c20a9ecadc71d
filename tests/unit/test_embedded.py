"""Where the embedded model is found: in a clone, in what the wheel holds, and nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_eesd import embedded

ROOT = Path(__file__).resolve().parents[2]


def test_in_a_clone():
    assert Path(embedded.embedded_model()) == ROOT / "models" / embedded.MODEL
    assert embedded.find_shipped("none") is None


def test_where_it_is_not_the_flag_is_told_that_names_another(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "vllm_eesd" / "embedded.py"))
    with pytest.raises(ValueError, match=r"model: models/eesd-code-10m is not here; .* --model"):
        embedded.embedded_model()


def test_the_wheel_holds_it(tmp_path):
    """What setuptools would pack is built here, without the repository, and asked."""
    pytest.importorskip("setuptools", reason="builds the wheel's content")
    built = tmp_path / "wheel"
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", built]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    code = f"import sys; sys.path.insert(0, {str(built)!r}); from vllm_eesd import cli; cli.main(['embedded'])"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    model = Path(done.stdout.strip())
    assert model == built / "vllm_eesd" / "models" / embedded.MODEL
    for name in ("config.json", "model.safetensors", "tokenizer.json", "eesd/model.safetensors", "eesd/config.json"):
        assert (model / name).is_file(), name
    assert (model.parent / embedded.PROMPTS).is_file()
    assert not (model / "peers").exists() and not (model.parent / "traces").exists()
