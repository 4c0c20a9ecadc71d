"""Two ranks choose the same lengths, and emit what one emits without drafting."""

import numpy as np
import pytest
import torch

#: Lengths hang on each rank's own random generator, seeded alike.
SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "beta_ts"}


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs, there is one")
def test_tensor_parallel(greedy, plain_answers, random_target, cloned_head, monkeypatch):
    from vllm import LLM

    generator = np.random.default_rng(5)
    prompts = [generator.integers(0, 512, n).tolist() for n in (20, 3, 40)]
    (plain,) = plain_answers(random_target, (prompts, 16), max_model_len=128)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20, "max_model_len": 128, "enforce_eager": True}
    options |= {"speculative_config": SPEC | {"model": cloned_head(random_target, 5, 5)}}  # layers 6, 7 are left out
    options |= {"worker_extension_cls": "vllm_eesd.host.worker.WorkerExtension", "skip_tokenizer_init": True}
    llm = LLM(random_target, dtype="float32", tensor_parallel_size=2, seed=0, **options)
    try:
        # Sums over ranks are taken in another order: the last bits differ, and on this target no token.
        assert greedy(llm, prompts, max_tokens=16) == plain
        stats = llm.collective_rpc("eesd_stats")
    finally:
        llm.llm_engine.engine_core.shutdown()
    lengths = [rank["draft_length_histogram"] for rank in stats]
    assert lengths[0] == lengths[1]
    assert stats[0]["drafted"] > stats[0]["accepted"] > 0
    assert np.count_nonzero(lengths[0]) >= 2
