"""What an engine's shutdown gives back, while somebody still holds the engine and its model."""

import gc
import weakref

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "fixed"}


@pytest.mark.parametrize("with_head", [True, False], ids=["a head with its own cache", "headless"])
def test_the_kv_cache_is_freed_and_the_speculator_with_it(
    engine, greedy, random_target, cloned_head, runner_of, with_head
):
    """One allocation holds the cache of all layers: a single layer's view, the exit layer's, would keep all of it."""
    head = {"model": cloned_head(random_target, 7, 7)} if with_head else {"exit_layer": 4}
    with engine(random_target, SPEC | head, max_model_len=64) as llm:
        greedy(llm, [[1, 2, 3]], max_tokens=6)
        runner = runner_of(llm)
        model, req_states = runner.model, runner.req_states
        storages = {name: StorageWeakRef(layer.kv_cache.untyped_storage()) for name, layer in layers_of(runner).items()}
        assert any("eesd" in name for name in storages) == with_head
        speculator = weakref.ref(runner.speculator)
        assert not any(storage.expired() for storage in storages.values())
        del runner
        llm.llm_engine.engine_core.shutdown()
        gc.unfreeze()  # vLLM exempts what there is once an engine has started
        gc.collect()
        assert all(storage.expired() for storage in storages.values())
        assert speculator() is None
        assert model is not None and req_states is not None


def layers_of(runner):
    """The attention layers by name."""
    context = runner.vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "kv_cache")}
