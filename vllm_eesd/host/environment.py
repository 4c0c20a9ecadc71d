"""What the installed vLLM would run on: its version, platform and model runner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """What vLLM says of itself.

    Attributes:
        version: of the module `vllm`.
        platform: "cpu", "cuda", ...
        runner: "V1" or "V2", the model runner of a plain engine.
        runner_reason: why vLLM takes that one.
        forced_runner: value of VLLM_USE_V2_MODEL_RUNNER, None where it is not set.
        graph_mode: the CUDA graph mode vLLM takes by itself on a GPU, None where it does not say.
    """

    version: str
    platform: str
    runner: str
    runner_reason: str
    forced_runner: bool | None
    graph_mode: str | None = None


def read_environment() -> Environment:
    """Ask the installed vLLM; whatever its import raises passes through."""
    import vllm
    import vllm.envs as envs

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    return Environment(vllm.__version__, read_platform(), *read_runner(), forced, _graph_mode())


def read_platform() -> str:
    """Return the platform vLLM has taken: "cpu", "cuda", ..."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def read_runner() -> tuple[str, str]:
    """Return the model runner of a plain engine, "V1" or "V2", and why vLLM takes that one."""
    import vllm.envs as envs
    from vllm.triton_utils import HAS_TRITON

    forced = envs.VLLM_USE_V2_MODEL_RUNNER
    if forced is not None:
        return ("V2" if forced else "V1"), f"VLLM_USE_V2_MODEL_RUNNER={int(forced)}"
    if HAS_TRITON:
        return "V2", "Triton works here"
    return "V1", "V2 needs Triton, which does not work here"


def _graph_mode() -> str | None:
    """A release that keeps its defaults elsewhere is no reason to refuse it: the seams are."""
    try:
        from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG, VllmConfig

        defaults = OPTIMIZATION_LEVEL_TO_CONFIG[VllmConfig.optimization_level]
        return defaults["compilation_config"]["cudagraph_mode"].name
    except (ImportError, AttributeError, KeyError):
        return None
