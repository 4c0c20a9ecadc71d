"""What every test may rely on: the environment of a CPU engine, the `gpu` marker, the embedded model."""

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the repository root there, where kernels/ would hide Hugging Face's `kernels` package.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPOSITORY]

# vLLM reads these when it is imported; `make test` sets the same, a bare pytest relies on this.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Engine processes must not find the folder kernels/ in place of Hugging Face's `kernels` package.
os.environ.setdefault("PYTHONSAFEPATH", "1")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded target; its exit head is in `eesd/` beneath."""
    directory = REPOSITORY / "models" / "eesd-code-10m"
    for name in ("config.json", "model.safetensors", "eesd/config.json"):
        assert (directory / name).is_file(), f"{directory / name} is missing: check out models/ again"
    return directory
