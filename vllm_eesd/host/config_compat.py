"""The names of vLLM's that a front end needs: apart from `compat`, which imports modules that only a worker does."""

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

__all__ = [
    "ModelConfig",
    "ParallelConfig",
    "SpeculativeConfig",
    "VLLMValidationError",
    "get_tp_group",
    "init_logger",
]
