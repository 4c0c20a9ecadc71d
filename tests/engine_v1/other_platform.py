"""A process on a platform that is not here: what EESD leaves of torch and vLLM there (run by test_other_platform).

Prints one JSON object: for every stage, which of the objects that vLLM's CPU worker replaces are others than at the
start, and which modules of that worker are imported.
"""

import json
import sys
import traceback
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import triton.language
import vllm.platforms
from vllm.platforms.interface import Platform, PlatformEnum


class StubPlatform(Platform):
    """Says that it is CUDA; whatever wants a GPU fails."""

    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"
    dispatch_key = "CUDA"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    @classmethod
    def import_kernels(cls):
        """Not `vllm._C`: in a CPU build that is for AVX-512, and a CPU without it ends the process there."""


vllm.platforms._current_platform = StubPlatform()
# What a CPU build of vLLM has no compiled code for, and its modules ask for while they are imported on CUDA.
sys.modules["vllm.vllm_flash_attn"] = MagicMock(__spec__=None)
torch.ops._C.cutlass_scaled_mm_supports_block_fp8 = lambda capability: False

import vllm.utils.torch_utils  # noqa: E402
import vllm.v1.worker.gpu.buffer_utils  # noqa: E402

HOLDERS = {
    "torch.Event": (torch, "Event"),
    "torch.cuda.Event": (torch.cuda, "Event"),
    "torch.cuda.Stream": (torch.cuda, "Stream"),
    "torch.cuda.stream": (torch.cuda, "stream"),
    "torch.cuda.set_stream": (torch.cuda, "set_stream"),
    "torch.cuda.current_stream": (torch.cuda, "current_stream"),
    "torch.accelerator.synchronize": (torch.accelerator, "synchronize"),
    "torch.accelerator.empty_cache": (torch.accelerator, "empty_cache"),
    "torch.accelerator.get_memory_info": (torch.accelerator, "get_memory_info"),
    "torch.Tensor.pin_memory": (torch.Tensor, "pin_memory"),
    "torch.Tensor.record_stream": (torch.Tensor, "record_stream"),
    "async_tensor_h2d": (vllm.utils.torch_utils, "async_tensor_h2d"),
    "UvaBuffer": (vllm.v1.worker.gpu.buffer_utils, "UvaBuffer"),
    "triton.language.debug_barrier": (triton.language, "debug_barrier"),
}
ORIGINALS = {name: getattr(*place) for name, place in HOLDERS.items()}


def register():
    from vllm_eesd.host import plugin

    plugin.register()
    plugin.register()


def import_engine():
    import vllm.engine.arg_utils
    import vllm.v1.engine.input_processor

    return vllm.engine.arg_utils, vllm.v1.engine.input_processor


def doctor():
    from vllm_eesd import doctor

    doctor.run(SimpleNamespace(model=None, json=None))


def config():
    from vllm.config import ModelConfig, ParallelConfig

    from vllm_eesd.host.speculative import EESDSpeculativeConfig

    target = ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
    built = EESDSpeculativeConfig.build({"method": "eesd", "exit_layer": 2}, target, ParallelConfig())
    assert built.runner == "V2"


def worker_seams():
    from vllm_eesd.host import plugin

    plugin.prepare_worker("V2", "V2")


def main():
    report = {}
    for stage in (register, import_engine, doctor, config, worker_seams):
        error = ""
        try:
            stage()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            traceback.print_exc()
        report[stage.__name__] = {
            "error": error,
            "replaced": [name for name, place in HOLDERS.items() if getattr(*place) is not ORIGINALS[name]],
            "modules": sorted(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")),
        }
    from vllm.triton_utils import HAS_TRITON

    print("\n" + json.dumps(report | {"triton": HAS_TRITON}))


if __name__ == "__main__":
    main()
