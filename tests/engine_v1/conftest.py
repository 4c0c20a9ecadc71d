"""Real vLLM engines, in this process: small targets, heads cloned from the target's own layers."""

import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

# In-process engines: the test can look into the worker. One thread, or two engines would fight over the cores.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

VOCAB_SIZE = 512


@pytest.fixture(scope="session")
def random_target(tmp_path_factory):
    """Directory of an untied 8-layer Llama with weights large enough that its greedy text does not repeat itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("targets") / "random8"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        initializer_range=0.12,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def random_target_with_tokenizer(random_target, tmp_path_factory):
    """The same with a tokenizer, which bad words and grammars want: a token for each byte, and names for the others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("targets") / "random8_with_tokenizer"
    shutil.copytree(random_target, directory)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"<{number}>" for number in range(len(tokens), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[-1]).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def eight_token_target(tmp_path_factory):
    """Directory of the target of `exact_distribution`."""
    import exact_distribution

    directory = str(tmp_path_factory.mktemp("targets") / "eight_tokens")
    exact_distribution.write_target(directory)
    return directory


@pytest.fixture(scope="session")
def cloned_head(tmp_path_factory):
    """Return make(target_dir, exit_layer, layer): an exit head that is the target's own `layer` and final norm.

    With `token_ids`, ascending, it drafts from these only.
    """
    import torch
    from safetensors.torch import load_file

    from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Verifier, write_head
    from vllm_eesd.exit_head.draft_vocabulary import offsets_of

    def make(target, exit_layer, layer, token_ids=None):
        with open(f"{target}/config.json") as file:
            config = json.load(file)
        weights = load_file(f"{target}/model.safetensors")
        prefix = f"model.layers.{layer}."
        tensors = {f"layer.{n[len(prefix) :]}": t for n, t in weights.items() if n.startswith(prefix)}
        tensors["norm.weight"] = weights["model.norm.weight"]
        verifier = Verifier(
            name_or_path=target,
            architecture=config["architectures"][0],
            hidden_size=config["hidden_size"],
            num_hidden_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
        )
        if token_ids is not None:
            tensors["d2t"] = offsets_of(torch.tensor(token_ids))
        head = ExitHeadConfig(
            exit_layer=exit_layer,
            head_type="transformer",
            verifier=verifier,
            transformer_layer_config=config,
            draft_vocab_size=None if token_ids is None else len(token_ids),
        )
        directory = tmp_path_factory.mktemp("heads") / f"clone_{exit_layer}_{layer}"
        write_head(directory, head, tensors)
        return str(directory)

    return make


@pytest.fixture(scope="session")
def head_of_two_layers(tmp_path_factory):
    """Return make(target_dir, exit_layer, aux_layers): an untrained deep-context head of the target's next two layers.

    The upper one sees verified tokens through what it has not learned to read. With `token_ids`, ascending, it drafts
    from these only.
    """
    import torch

    from vllm_eesd.distill.model import head_config, new_head
    from vllm_eesd.distill.target import load_target
    from vllm_eesd.distill.vocabulary import restrict
    from vllm_eesd.exit_head.checkpoint import Prior, write_head

    def make(target_directory, exit_layer, aux_layers, token_ids=None):
        target = load_target(target_directory, exit_layer, "cpu", aux_layers)
        head = new_head(target, "exit", "deep_context", 2)
        if token_ids is not None:
            restrict(head, torch.tensor(token_ids))
        size = None if token_ids is None else len(token_ids)
        directory = tmp_path_factory.mktemp("heads") / "two_layers"
        write_head(
            directory, head_config(target, target_directory, "deep_context", Prior(), size, 2), head.state_dict()
        )
        return str(directory)

    return make


@pytest.fixture(scope="session")
def engine():
    """Return open(target, spec=None, **options): a context manager giving an LLM that is torn down at its end."""

    @contextlib.contextmanager
    def open_engine(target, spec=None, **options):
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        if spec is not None:
            options |= {"speculative_config": spec, "worker_extension_cls": "vllm_eesd.host.worker.WorkerExtension"}
        options.setdefault("max_model_len", 256)
        options.setdefault("skip_tokenizer_init", True)
        options.setdefault("dtype", "float32")
        options.setdefault("enforce_eager", True)  # compiling takes most of a start; some tests ask for it
        llm = None
        try:
            llm = LLM(target, distributed_executor_backend="uni", disable_log_stats=True, seed=0, **options)
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()

    return open_engine


@pytest.fixture(scope="session")
def drafter_of():
    """Return a function that gives the EarlyExitProposer of an in-process LLM."""

    def drafter(llm):
        return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter

    return drafter


@pytest.fixture(scope="session")
def greedy():
    """Return generate(llm, prompts, **sampling): token ids of every completion, prompts being token-id lists."""

    def generate(llm, prompts, max_tokens=48, **sampling):
        from vllm import SamplingParams

        sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False} | sampling
        outputs = llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            SamplingParams(max_tokens=max_tokens, **sampling),
            use_tqdm=False,
        )
        return [tuple(map(int, completion.token_ids)) for output in outputs for completion in output.outputs]

    return generate


@pytest.fixture(scope="session")
def plain_answers(engine, greedy, request):
    """Return ask(target, *questions, **options): plain vLLM's greedy answers to each of (prompts, max_tokens).

    They are constants of the target, the questions, the engine's options, the software and the processor. An engine is
    asked once; pytest's cache keeps the answers under a digest of all these.
    """
    import torch
    import vllm

    from vllm_eesd.provenance import cpu_name, gpu_name, versions

    runner = "V2" if importlib.util.find_spec("triton_cpu_interpreter") else "V1"

    def ask(target, *questions, **options):
        digest = hashlib.sha256()
        for path in sorted(filter(Path.is_file, Path(target).rglob("*"))):
            digest.update(path.read_bytes())
        where = [
            gpu_name() or cpu_name(),
            torch.backends.cpu.get_cpu_capability(),
            os.environ.get("ONEDNN_MAX_CPU_ISA"),
        ]
        software = [versions(), vllm.__version__]
        content = json.dumps([questions, options, where, software, runner], sort_keys=True)
        digest.update(content.encode())
        key = f"plain_answers/{digest.hexdigest()}"
        answers = request.config.cache.get(key, None)
        if answers is None:
            with engine(target, **options) as llm:
                answers = [greedy(llm, prompts, max_tokens=max_tokens) for prompts, max_tokens in questions]
            request.config.cache.set(key, answers)
        return [[tuple(tokens) for tokens in answer] for answer in answers]

    return ask


class Clock:
    """Every look at the time takes some of it, and nothing else does."""

    now = 0.0

    def __init__(self, ms):
        self._ms = ms

    def perf_counter(self):
        Clock.now += self._ms / 1e3
        return Clock.now


@pytest.fixture
def step_times(monkeypatch):
    """Return set(draft_step_ms): on Model Runner V1 a forward seems to take 4 ms and half a one per token.

    What `goodput` drafts hangs on these times, so a test of how much is drafted may not take the machine's.
    """
    from vllm_eesd.host import cost_profile
    from vllm_eesd.host.v1 import draft_rows
    from vllm_eesd.host.v1 import proposer as v1

    def set_them(draft_step_ms):
        for module, ms in ((cost_profile, 1), (v1, 1), (draft_rows, draft_step_ms)):
            monkeypatch.setattr(module, "time", Clock(ms))
        skips = v1.EarlyExitProposer._skips

        def after_a_step(self, step):
            Clock.now += (2 + step.num_scheduled_tokens / 2) / 1e3
            return skips(self, step)

        monkeypatch.setattr(v1.EarlyExitProposer, "_skips", after_a_step)

    return set_them


@pytest.fixture(autouse=True)
def no_faults_but_planted_ones(request, monkeypatch):
    """A fault while drafting costs a round of drafts and no token: tests of answers would not see it."""
    if "engine" not in request.fixturenames or request.node.get_closest_marker("fault"):
        yield
        return
    from vllm_eesd.host.circuit_breaker import CircuitBreaker

    met, fault = [], CircuitBreaker.fault

    def counting(self, error):
        met.append(repr(error))
        fault(self, error)

    monkeypatch.setattr(CircuitBreaker, "fault", counting)
    yield
    assert not met, f"faults while drafting: {met}"


@pytest.fixture
def preemptions(monkeypatch):
    """A list that grows with every request vLLM preempts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen, preempt = [], Scheduler._preempt_request

    def counting(self, request, *args, **kwargs):
        seen.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    return seen


@pytest.fixture
def every_ngram_taken(monkeypatch):
    """`goodput` takes every n-gram draft to its end, however unlikely."""
    import numpy as np

    from vllm_eesd.policy.goodput import Goodput

    def take_ngrams(self, slots, chances, limits):
        return np.where(chances[:, 1] > 0, limits, 0)

    monkeypatch.setattr(Goodput, "take_ngrams", take_ngrams)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory):
    """Directory of a LoRA adapter on q and v of every layer of `random_target`, strong enough to change its text."""
    import torch
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("lora")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(8):
        for module, out in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.2
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)
