"""An engine that starts as on a GPU, on a CPU: vLLM's own warm-up, memory profile and capture of CUDA graphs.

vLLM's CPU worker leaves all three out. Here it does what `Worker`, its base, does on a GPU, with graphs that
`recorded_graphs` stands in for.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import recorded_graphs


class Seen:
    """What happened while the engine started.

    Attributes:
        graphs: every graph captured, those of the memory profile first.
        graph_memory: what `profile_cudagraph_memory` returned, bytes.
        num_profiled: graphs captured by it.
        warm_up_rounds: rounds of the made-up requests that vLLM's `warmup_kernels` runs.
    """

    graphs: list[recorded_graphs.Graph]
    graph_memory: int | None = None
    num_profiled = warm_up_rounds = 0


@contextlib.contextmanager
def as_on_a_gpu(mode: str, sizes: list[int], updates_in_graphs: bool = False):
    """Engines opened in this context start as on a GPU; gives what the last one did.

    Args:
        mode: the name of a CUDAGraphMode; NONE captures nothing.
        sizes: what graphs are captured for, in tokens.
        updates_in_graphs: as if the attention backend brought its metadata up to date inside a draft step's graph.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_worker, workspace
    from vllm.v1.worker.cpu_worker import CPUWorker

    platform, seen = type(current_platform), Seen()
    update = platform.check_and_update_config

    def keep_graphs(vllm_config):
        update(vllm_config)
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        vllm_config.compilation_config.cudagraph_capture_sizes = sizes
        vllm_config.compilation_config.max_cudagraph_capture_size = max(sizes)

    determine = CPUWorker.determine_available_memory

    def determine_available_memory(self):
        memory = determine(self)
        lanes = gpu_worker._num_workspace_lanes(self.vllm_config, self.use_v2_model_runner)
        workspace.init_workspace_manager(self.device, num_lanes=lanes)  # as `Worker.init_device`
        # As `Worker.determine_available_memory`, the rest of which measures a GPU's memory.
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            seen.graph_memory = self.model_runner.profile_cudagraph_memory()
            seen.num_profiled = len(seen.graphs)
        # Of this worker alone, and now that EESD has compared the class's own with the code it knows.
        self.compile_or_warm_up_model = functools.partial(gpu_start, self)
        return memory

    warm_up = gpu_worker.warmup_kernels

    def warmup_kernels(runner, execute_model, sample_tokens):
        def counted(*args):
            seen.warm_up_rounds += 1
            return sample_tokens(*args)

        warm_up(runner, execute_model, counted)

    def gpu_start(self):
        return gpu_worker.Worker.compile_or_warm_up_model(self)  # EESD's wrapper, which a worker has put there

    with pytest.MonkeyPatch.context() as patch:
        seen.graphs = recorded_graphs.install(patch)
        let_attention_plan_itself(patch)
        patch.setattr(platform, "check_and_update_config", staticmethod(keep_graphs))
        patch.setattr(platform, "graph_pool_handle", lambda self: (0, 0), raising=False)
        patch.setattr(CPUAttentionMetadataBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
        patch.setattr(CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", updates_in_graphs)
        patch.setattr(CPUAttentionMetadataBuilder, "update_draft_decode_metadata", lambda self, metadata: None)
        # Its loop over rows is one that the interpreter runs with Python's numbers, which have no `to`.
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        # It tunes kernels of libraries that are for GPUs only.
        patch.setattr(gpu_worker, "warmup_kernels", warmup_kernels)
        patch.setattr(gpu_worker, "kernel_warmup", lambda worker: None)
        patch.setattr(CPUWorker, "determine_available_memory", determine_available_memory)
        try:
            yield seen
        finally:
            workspace.reset_workspace_manager()


def let_attention_plan_itself(patch: Any) -> None:
    """Make the CPU's attention a kernel that reads lengths when it runs, as a GPU's does.

    It wants a plan of its work, which is made on the host from the lengths of that moment. Instead of the plan it is
    given what the plan is made from.
    """
    from vllm.v1.attention.backends.cpu_attn import ops

    plan, attend = ops.cpu_attn_get_scheduler_metadata, ops.cpu_attention_with_kv_cache

    def planned(*, scheduler_metadata, **kwargs):
        attend(scheduler_metadata=plan(**scheduler_metadata), **kwargs)

    patch.setattr(ops, "cpu_attn_get_scheduler_metadata", lambda **kwargs: kwargs)
    patch.setattr(ops, "cpu_attention_with_kv_cache", lambda **kwargs: recorded_graphs.launch(planned, **kwargs))
