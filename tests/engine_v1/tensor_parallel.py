"""Run as a program by test_tensor_parallel.py: two ranks serve, perhaps with new weights, then one cannot draft."""

import json
import sys

from vllm_eesd.host.worker import WorkerExtension

PROMPTS = [list(range(start, start + 24)) for start in (7, 90, 200, 401)]


class BreakableWorker(WorkerExtension):
    def break_rank(self, rank):
        """Make every later round fail on this rank only, before its first collective."""

        def broken(*_):
            raise RuntimeError("injected")

        if self.rank == rank:
            self.model_runner.drafter.policy.begin = broken


def main(model, head, new_model=None):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=256,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        speculative_config={"method": "eesd", "model": head, "num_speculative_tokens": 4, "policy": "fixed"},
        worker_extension_cls="tensor_parallel.BreakableWorker",
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def answers():
        return [list(map(int, o.outputs[0].token_ids)) for o in llm.generate(inputs, params, use_tqdm=False)]

    llm.collective_rpc("eesd_take_rounds")  # from here on they are recorded
    outputs = answers()
    print("SERVED " + json.dumps([outputs, llm.collective_rpc("eesd_stats")]), flush=True)
    print("ROUNDS " + json.dumps(llm.collective_rpc("eesd_take_rounds")), flush=True)
    if new_model is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": new_model})
        llm.reset_prefix_cache()
        print("RELOADED " + json.dumps([answers(), llm.collective_rpc("eesd_take_rounds")]), flush=True)
    llm.collective_rpc("break_rank", args=(1,))
    try:
        llm.generate(inputs, params, use_tqdm=False)
        print("BROKEN served", flush=True)
    except Exception as error:
        print(f"BROKEN {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
