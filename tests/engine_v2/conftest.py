"""Engines on Model Runner V2, in this process: on a GPU, or where Triton's interpreter is Triton's cpu backend."""

import collections
import contextlib
import gc
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

# The targets, heads and engines of the host's tests, whose conftest pytest reads for its own folder only.
_path = Path(__file__).parents[1] / "engine_v1" / "conftest.py"
_spec = importlib.util.spec_from_file_location("host_fixtures", _path)
host = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host)
random_target, eight_token_target, cloned_head = host.random_target, host.eight_token_target, host.cloned_head
random_target_with_tokenizer = host.random_target_with_tokenizer
greedy, preemptions, adapter, plain_answers = host.greedy, host.preemptions, host.adapter, host.plain_answers
head_of_two_layers = host.head_of_two_layers
host_engine, no_faults_but_planted_ones = host.engine, host.no_faults_but_planted_ones

# It would outdo `kv_cache_memory_bytes` below.
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

#: Every kernel launch costs the same under the interpreter: few rows, and little memory.
SMALL = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
if torch.cuda.is_available():  # vLLM wants that much to be free, whatever the cache's size; workers share the GPU
    SMALL["gpu_memory_utilization"] = 0.02


@pytest.fixture(scope="session")
def engine(host_engine):
    """As the host's `engine`, small, on V2; `async_scheduling=True` is honoured, which vLLM turns off on a CPU."""
    from vllm.platforms import current_platform

    @contextlib.contextmanager
    def open_engine(target, spec=None, async_scheduling=False, **options):
        check_and_update_config = type(current_platform).check_and_update_config

        def keep_asynchronous(vllm_config):
            check_and_update_config(vllm_config)
            vllm_config.scheduler_config.async_scheduling = async_scheduling

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(current_platform), "check_and_update_config", staticmethod(keep_asynchronous))
            with host_engine(target, spec, **(SMALL | options)) as llm:
                yield llm

    return open_engine


@pytest.fixture(scope="session")
def runner_of():
    """Return a function that gives the model runner of an in-process LLM."""

    def runner(llm):
        return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    return runner


def columns_of_a_block(kv_cache):
    """vLLM's CPU cache as `kv_fill` sees one: of blocks of 32 slots, keys lie element by element.

    Args:
        kv_cache: [num_blocks, num_kv_heads, 32, 2 * head_size].
    """
    num_blocks, num_heads, block_size, both = kv_cache.shape
    assert block_size == 32, "the CPU backend packs keys 32 at a time: use block_size=32"
    keys, values = kv_cache.view(num_blocks, num_heads, 2 * block_size, both // 2).chunk(2, dim=2)
    size = num_blocks, block_size, num_heads, both // 2
    return keys.as_strided(size, (keys.stride(0), 1, keys.stride(1), block_size)), values.transpose(1, 2)


@pytest.fixture
def force_kernels():
    """Return force(patch, exit_head_rows=None): engines opened from then on use `exit_head` and `kv_fill`.

    They do as if the kernels had won, `exit_head` up to a number of rows, if given. The calls are counted in what is
    returned.
    """

    def force(patch, exit_head_rows=None):
        if not torch.cuda.is_available():
            import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
        from vllm_eesd.host.v2 import kernel_choice
        from vllm_eesd.host.v2 import kernel_ops as v2_kernels
        from vllm_eesd.host.v2 import kv_fill as v2_kv_fill

        calls = collections.Counter()

        def counted(module, name):
            original = getattr(module, name)

            def call(*args, **kwargs):
                calls[name] += 1
                return original(*args, **kwargs)

            patch.setattr(module, name, call)

        def kernel_wins(kernel, fallback):
            kernel()  # what it is timed with must run
            calls.clear()
            return 0.0, 1.0

        if exit_head_rows is not None:
            patch.setattr("vllm_eesd.host.v2.speculator.exit_head_rows", lambda *args: exit_head_rows)
        counted(v2_kernels.exit_head_kernel, "exit_head")
        counted(v2_kernels.choose_tokens_kernel, "choose_tokens")
        counted(v2_kv_fill.kv_fill_kernel, "kv_fill")
        patch.setattr(v2_kv_fill, "FILL_TOKENS", (1, 16))
        patch.setattr(kernel_choice, "timer_for", lambda device, in_graphs: kernel_wins)
        patch.setitem(v2_kv_fill.LAYOUTS, "CPU_ATTN", columns_of_a_block)
        return calls

    return force


@pytest.fixture
def forced_kernels(force_kernels, monkeypatch):
    """`force_kernels` for one test: its Counter."""
    return force_kernels(monkeypatch)


@pytest.fixture
def corrupted_drafts(monkeypatch):
    """Make every fourth draft token wrong, so that rejections happen at every position."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    generator, right = np.random.default_rng(3), EarlyExitSpeculator._draft

    def draft(self, num_reqs, *args, **kwargs):
        column = int(self._inputs.columns[0])
        right(self, num_reqs, *args, **kwargs)
        wrong = torch.from_numpy(generator.random(num_reqs) < 0.25).to(self.device)
        tokens = self.draft_tokens[:num_reqs, column]
        tokens.copy_(torch.where(wrong, (tokens + 1) % host.VOCAB_SIZE, tokens))
        self.input_buffers.input_ids[:num_reqs] = tokens.int()

    monkeypatch.setattr(EarlyExitSpeculator, "_draft", draft)


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """vLLM collects garbage often while an engine starts, each time looking at all that was imported."""
    import vllm.v1.engine.llm_engine  # noqa: F401

    gc.freeze()
