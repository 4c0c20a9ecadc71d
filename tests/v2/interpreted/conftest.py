"""Engines on Model Runner V2, in this process: on a GPU, or where Triton's interpreter is Triton's cpu backend."""

import contextlib
import gc
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = importlib.util.find_spec("triton_cpu_interpreter") is not None
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]

# The targets, heads and engines of the host's tests, whose conftest pytest reads for its own folder only.
_path = Path(__file__).parents[2] / "host" / "conftest.py"
_spec = importlib.util.spec_from_file_location("host_fixtures", _path)
host = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(host)
random_target, cloned_head, greedy = host.random_target, host.cloned_head, host.greedy
preemptions = host.preemptions
host_engine = host.engine

if not collect_ignore_glob:
    # It would outdo `kv_cache_memory_bytes` below. The process that only collects keeps it: its engines need it.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

#: Every kernel launch costs the same under the interpreter: few rows, and little memory.
SMALL = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="session")
def engine(host_engine):
    """As the host's `engine`, small, on V2; `async_scheduling=True` is honoured, which vLLM turns off on a CPU."""
    from vllm.platforms import current_platform

    check_and_update_config = type(current_platform).check_and_update_config

    @contextlib.contextmanager
    def open_engine(target, spec=None, async_scheduling=False, **options):
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


@pytest.fixture
def corrupted_drafts(monkeypatch):
    """Make every fourth draft token wrong, so that rejections happen at every position."""
    from vllm_eesd.host.v2 import EarlyExitSpeculator

    generator, right = np.random.default_rng(3), EarlyExitSpeculator._draft

    def draft(self, num_reqs, *args, **kwargs):
        column = int(self._column)
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
