"""KV that comes from outside: vLLM's example connector over a folder, and its offloading of KV blocks on a CPU.

Offloading is vLLM's own but for the copy, whose place one between tensors takes: its worker asserts a GPU's.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

BLOCK_SIZE = 32


def example_connector(folder, role):
    """Options with which an engine writes the KV of prompts into a folder, or reads it there."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {"kv_transfer_config": config}


def stored(prompts):
    """Of how many tokens of each prompt ExampleConnector finds the KV again."""
    return [(len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]


def ask(llm, prompts, max_tokens):
    """Return the greedy answers, and of how many tokens of each prompt the KV was there."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = [tuple(map(int, output.outputs[0].token_ids)) for output in outputs]
    return answers, [output.num_cached_tokens for output in outputs]


class CopyingWorker(OffloadingWorker):
    """Keeps blocks in tensors of its own; a transfer is done at once, and told of in the next step."""

    def __init__(self, kv_caches, num_chunks):
        (self._refs,) = kv_caches.group_data_refs
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._host = [tensor.new_zeros(num_chunks, tensor.shape[1]) for tensor in self._device]
        self._finished = []

    def _copy(self, job_id, here, there, source, destination):
        for ref in self._refs:
            destination[ref.tensor_idx][there.block_ids] = source[ref.tensor_idx][here.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, self._device, self._host)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, self._host, self._device)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's, but for its worker."""

    def get_worker(self, kv_caches):
        assert self.blocks_per_chunk == 1
        if self._worker is None:
            self._worker = CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


def offload_on_cpu(monkeypatch):
    """Have OffloadingConnector work on a CPU, and EESD believe it; return a list of the blocks of every load."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    loads, submit_load = [], CopyingWorker.submit_load

    def counting(self, job_id, src_spec, dst_spec):
        loads.append(len(dst_spec.block_ids))
        return submit_load(self, job_id, src_spec, dst_spec)

    monkeypatch.setattr(CopyingWorker, "submit_load", counting)
    monkeypatch.setitem(OffloadingSpecFactory._registry, "CPUOffloadingSpec", lambda: CopyingSpec)
    monkeypatch.setattr("vllm_eesd.host.kv_connectors.NO_OFFLOADING", ())
    return loads


def offloading():
    """Options with which an engine offloads all blocks, those of answers too."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2**26, "offload_prompt_only": False},
    }
    return {"kv_transfer_config": config}
