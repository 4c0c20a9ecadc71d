"""Engines that are started, asked and thrown away, each in a process of its own: one that dies or hangs is an outcome.

They are forked from a process that has vLLM imported and has run nothing, which saves most of a start.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from pair_options import MAX_MODEL_LEN, NUM_REQUESTS

#: Of an engine that compiles, on a busy machine.
SECONDS = 240
#: Steps after which a request that is still there waits for ever.
MAX_STEPS = 1000
BASE = {
    "dtype": "float32",
    "distributed_executor_backend": "uni",
    "enforce_eager": True,
    "disable_log_stats": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**23,
    "seed": 0,
}


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        kind: "answered", "aborted", "refused", "not started", "died" or "hung".
        error: class and message of what was raised.
        answers: of each completion, as `request_cases.answers_of` has them.
    """

    kind: str
    error: tuple[str, str] | None = None
    answers: list[dict] | None = None

    @classmethod
    def of(cls, kind: str, error: BaseException) -> Outcome:
        return cls(kind, (type(error).__name__, str(error)))


class Asked(NamedTuple):
    """Outcomes of the requests, in their order, and what an engine counted of its drafts."""

    outcomes: list[Outcome]
    stats: dict[str, Any]


def prepare() -> None:
    """Import what an engine imports, and keep the garbage collector from looking at it again."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import vllm_eesd.host.speculative
    import vllm_eesd.host.v1.proposer  # noqa: F401

    gc.collect()
    gc.freeze()


class Engines:
    """Starts engines of one target."""

    def __init__(self, target: str, adapter: str) -> None:
        self._target, self._adapter = target, adapter

    def __enter__(self) -> Engines:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=prepare)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ask(self, options: dict[str, Any], requests: list[dict]) -> Asked:
        """Return what becomes of requests that share an engine; its end is theirs, or those's who brought it about.

        After an engine that died or hung, halves of the requests that it left are asked of new ones.
        """
        options = BASE | {"model": self._target} | options
        outcomes, stats = self._pool.submit(ask_in_a_child, options, requests, self._adapter).result()
        left = [number for number, outcome in enumerate(outcomes) if outcome.kind in ("died", "hung")]
        if left and len(requests) > 1:
            for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                if half and len(half) < len(requests):
                    again = self.ask(options, [requests[number] for number in half])
                    for number, outcome in zip(half, again.outcomes, strict=True):
                        outcomes[number] = outcome
            if all(outcomes[number].kind not in ("died", "hung") for number in left):
                stats = stats | {"died_together": True}
        return Asked(outcomes, stats)


def ask_in_a_child(options: dict, requests: list[dict], adapter: str) -> Asked:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=start_and_ask, args=(options, requests, adapter, theirs))
    child.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            return ours.recv()
        return Asked([Outcome("hung", ("TimeoutError", f"after {SECONDS} s"))] * len(requests), {})
    except EOFError:
        child.join()
        return Asked([Outcome("died", ("exit", str(child.exitcode)))] * len(requests), {})
    finally:
        child.kill()
        child.join()


def start_and_ask(options: dict, requests: list[dict], adapter: str, connection: Any) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    os.close(2)  # what vLLM prints of errors that are outcomes here
    os.open(os.devnull, os.O_WRONLY)
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**options), UsageContext.LLM_CLASS)
    except Exception as error:
        connection.send(Asked([Outcome.of("not started", error)] * len(requests), {}))
        return
    outcomes = Requests(engine, requests, adapter).outcomes()
    stats = {}
    if "speculative_config" in options:
        (stats,) = engine.collective_rpc("eesd_stats")
    if not any(outcome.kind in ("died", "hung") for outcome in outcomes):
        stats["kv_cache_usage"] = engine.engine_core.engine_core.scheduler.kv_cache_manager.usage
    connection.send(Asked(outcomes, stats))
    connection.close()
    os._exit(0)  # without the seconds that a clean end takes


class Requests:
    """Asks an engine: half of the requests at once, the others while those run."""

    def __init__(self, engine: Any, requests: list[dict], adapter: str) -> None:
        self._engine, self._requests, self._adapter = engine, requests, adapter
        self._outcomes: dict[int, Outcome] = {}
        self._parts: dict[int, dict[int, list]] = {}
        self._prompt_logprobs: dict[int, list | None] = {}

    def outcomes(self) -> list[Outcome]:
        waiting, aborts = list(range(len(self._requests))), {}
        try:
            for step in range(MAX_STEPS):
                while waiting and (waiting[0] < NUM_REQUESTS // 2 or step > waiting[0] - NUM_REQUESTS // 2):
                    number = waiting.pop(0)
                    if self._add(number) and (after := self._requests[number].get("aborted")):
                        aborts[step + after] = number
                if step in aborts and aborts[step] not in self._outcomes:
                    self._engine.abort_request([str(aborts[step])])
                    self._outcomes[aborts[step]] = Outcome("aborted")
                if not waiting and not self._engine.has_unfinished_requests():
                    break
                for output in self._engine.step():
                    self._collect(output)
            ended = Outcome("hung", ("TimeoutError", f"after {MAX_STEPS} steps"))
        except Exception as error:
            ended = Outcome.of("died", error)
        return [self._outcomes.get(number, ended) for number in range(len(self._requests))]

    def _add(self, number: int) -> bool:
        request = self._requests[number]
        try:
            params = params_of(request)
            lora = lora_of(self._adapter) if request.get("lora") else None
            prompt = prompt_of(request, self._engine.model_config)
            priority = request.get("priority", 0)
            self._engine.add_request(str(number), prompt, params, lora_request=lora, priority=priority)
        except Exception as error:
            self._outcomes[number] = Outcome.of("refused", error)
            return False
        return True

    def _collect(self, output: Any) -> None:
        """Keep what a stream says: all so far each time, or what is new, as the request asked for."""
        from request_cases import plain_logprobs

        number = int(output.request_id)
        parts = self._parts.setdefault(number, {})
        delta = self._requests[number].get("output_kind") == 1
        for completion in output.outputs:
            said = parts.setdefault(completion.index, [])
            said[:] = [*said, completion] if delta else [completion]
        if output.prompt_logprobs is not None:  # of a stream of what is new, once
            self._prompt_logprobs[number] = plain_logprobs(output.prompt_logprobs)
        if not output.finished or number in self._outcomes:
            return
        answers = []
        for index in sorted(parts):
            said = parts[index]
            logprobs = [plain_logprobs(part.logprobs) for part in said if part.logprobs is not None]
            answers.append(
                {
                    "tokens": [token for part in said for token in part.token_ids],
                    "text": "".join(part.text for part in said),
                    "ends": (said[-1].finish_reason, said[-1].stop_reason),
                    "logprobs": [position for part in logprobs for position in part] if logprobs else None,
                    "prompt_logprobs": self._prompt_logprobs.get(number),
                }
            )
        self._outcomes[number] = Outcome("answered", answers=answers)


def params_of(request: dict) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    fields = {name: value for name, value in request.items() if name in SamplingParams.__struct_fields__}
    readers = {
        "output_kind": RequestOutputKind,
        "repetition_detection": lambda given: RepetitionDetectionParams(**given),
        "structured_outputs": lambda given: StructuredOutputsParams(**given),
    }
    return SamplingParams(**{name: readers.get(name, lambda given: given)(value) for name, value in fields.items()})


def prompt_of(request: dict, model_config: Any) -> dict:
    import torch

    tokens, longest = request["tokens"], model_config.max_model_len
    many = (tokens * longest)[: longest + 1]
    shape = len(tokens), model_config.get_hidden_size()
    prompt = {
        "text": {"prompt": "def add(a, b):\n    return"},
        "embeds": {"prompt_embeds": torch.randn(shape, generator=torch.Generator().manual_seed(len(tokens)))},
        "empty": {"prompt_token_ids": []},
        "unknown": {"prompt_token_ids": [*tokens, 10**6]},
        "as long as may be": {"prompt_token_ids": many[: longest - 1]},
        "too long": {"prompt_token_ids": many},
    }.get(request.get("prompt", ""), {"prompt_token_ids": tokens})
    return prompt | ({"cache_salt": request["cache_salt"]} if "cache_salt" in request else {})


def lora_of(adapter: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, adapter)


def forbids() -> type:
    """Return a logits processor that forbids a request one in `modulus` tokens."""
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Forbids(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            modulus = (params.extra_args or {}).get("modulus")
            if modulus is None:
                return None

            def forbid(output_token_ids: list[int], logits: Any) -> Any:
                excluded = torch.arange(len(logits)) % modulus == len(output_token_ids) % modulus
                return logits.masked_fill(excluded, -float("inf"))

            return forbid

    return Forbids


def __getattr__(name: str) -> type:
    """vLLM names a processor by its module; vLLM itself is imported only where an engine is."""
    if name == "Forbids":
        return forbids()
    raise AttributeError(name)
