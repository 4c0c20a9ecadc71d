"""(engine option, request option): both drawn from what vLLM's EngineArgs and SamplingParams have, by their types.

A type gives a field's values where it says enough: a switch, a list of choices, a number. For the others, and where
only a few numbers mean something, the values stand here. A draw is a function of a seed and its number.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import numpy as np

#: Of a small random target whose words are the embedded model's.
VOCAB_SIZE = 4096
MAX_MODEL_LEN = 128
#: Requests that an engine is asked, at most.
NUM_REQUESTS = 16
INTEGERS = (-1, 0, 1, 2, 3, 7, 16, 33, 100, 1000)
FLOATS = (-1.0, 0.0, 0.1, 0.5, 1.0, 2.0)
#: Engine option -> values, where the type alone says too little, or where most that it allows means nothing.
ENGINE_VALUES: dict[str, list] = {
    "additional_config": [{"a": 1}],
    "attention_backend": ["CPU_ATTN", "FLASH_ATTN", "TORCH_SDPA"],
    "attention_config": [{"backend": "CPU_ATTN"}],
    "block_size": [8, 16, 32, 64, 128],
    "collect_detailed_traces": [["all"]],
    "compilation_config": [{"mode": 0}, {"cudagraph_mode": "NONE"}, {"custom_ops": ["all"]}, {"custom_ops": ["none"]}],
    "config_format": ["auto", "hf", "mistral"],
    "cpu_offload_gb": [0.001, 1.0],
    "cpu_offload_params": [{"mlp"}],
    "cudagraph_capture_sizes": [[1, 2, 4]],
    "custom_histogram_buckets": [{"vllm:request_latency": [1.0, 2.0]}],
    "data_parallel_size": [2],
    "decode_context_parallel_size": [2],
    "diffusion_config": [{"canvas_length": 4}],
    "generation_config": ["auto", "vllm"],
    "gpu_memory_utilization": [0.01, 0.5, 1.5],
    "hf_overrides": [{"max_position_embeddings": 100}, {"rms_norm_eps": 0.1}, {"architectures": ["Other"]}],
    "io_processor_plugin": ["none_such"],
    "kv_cache_memory_bytes": [2**18, 2**21, 2**26],
    "kv_events_config": [{"enable_kv_cache_events": True, "publisher": "null"}],
    "kv_offloading_size": [0.1],
    "kv_transfer_config": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}],
    "limit_mm_per_prompt": [{"image": 1}],
    "load_format": ["auto", "hf", "safetensors", "pt", "dummy", "sharded_state", "none_such"],
    "log_level": ["DEBUG"],
    "logits_processors": [["pair_engines:Forbids"], ["some.module:Processor"]],
    "long_prefill_token_threshold": [1, 2, 7, 16, 300],
    "lora_dtype": ["auto", "bfloat16"],
    "lora_target_modules": [["q_proj"]],
    "max_model_len": [1, 16, 40, 700, 5000],
    "max_num_batched_tokens": [1, 8, 16, 33, 128, 4096],
    "max_num_scheduled_tokens": [1, 8, 33, 128],
    "max_num_seqs": [1, 2, 3, 64],
    "model_impl": ["auto", "vllm", "transformers"],
    "num_gpu_blocks_override": [1, 5, 9, 20],
    "optimization_level": [0, 1, 3],
    "override_generation_config": [{"temperature": 0.5}, {"max_new_tokens": 5}],
    "pipeline_parallel_size": [2],
    "pooler_config": [{"pooling_type": "MEAN"}],
    "prefill_context_parallel_size": [2],
    "quantization": ["fp8", "bitsandbytes", "awq", "none_such"],
    "reasoning_config": [{"reasoning_start_str": "(", "reasoning_end_str": ")"}],
    "reasoning_parser": ["qwen3", "deepseek_r1", "none_such"],
    "scheduler_cls": ["vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"],
    "served_model_name": ["another"],
    "show_hidden_metrics_for_version": ["0.30"],
    "spec_tokens": [1, 3, 200],
    "stream_interval": [2, 5],
    "structured_outputs_config": [{"backend": name} for name in ("xgrammar", "guidance", "outlines", "none_such")],
    "tensor_parallel_size": [2],
    "tokenizer_mode": ["auto", "hf", "mistral"],
    "tokens_only": [True],
    "use_fp64_gumbel": [True],
    "watermark": [0.0, 0.3, 1.0],
    "watermark_config": [{"algorithm": "gumbel", "key": 1}],
    "weight_transfer_config": [{"backend": "nccl"}],
    "worker_extension_cls": [""],
}
#: What changes how requests are scheduled, sampled, cached or told: the suite's pairs, and most of the fuzz's.
TELLING = """async_scheduling block_size compilation_config disable_log_stats dtype enable_chunked_prefill enable_lora
enable_prefix_caching enable_prompt_embeds enforce_eager kv_cache_dtype kv_cache_memory_bytes logits_processors
logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive max_logprobs max_model_len
max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
max_num_seqs model_impl num_gpu_blocks_override performance_mode prefill_schedule_interval quantization
reasoning_config reasoning_parser runner scheduler_cls scheduler_reserve_full_isl scheduling_policy seed
skip_tokenizer_init spec_tokens stream_interval structured_outputs_config use_fp64_gumbel watermark""".split()
#: Engine options that are never drawn, and why.
ENGINE_ELSEWHERE = {
    "model tokenizer revision code_revision tokenizer_revision hf_token hf_config_path model_weights trust_remote_code "
    "model_class_overrides download_dir ignore_patterns model_loader_extra_config pt_load_map_location": "which files",
    "speculative_config spec_method spec_model": "what is tried: test_engine_options.py",
    "nnodes node_rank master_addr master_port device_ids numa_bind numa_bind_nodes numa_bind_cpus data_parallel_rank "
    "data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port "
    "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
    "distributed_executor_backend distributed_timeout_seconds cpu_distributed_timeout_seconds "
    "max_parallel_loading_workers ray_workers_use_nsight": "other processes or machines",
    "_api_process_count _api_process_rank otlp_traces_endpoint logging_config log_config_file profiler_config "
    "worker_cls fail_on_environ_validation shutdown_timeout reasoning_parser_plugin": "the process around an engine",
    "media_io_kwargs mm_processor_kwargs mm_processor_device mm_encoder_attn_backend mm_encoder_attn_dtype "
    "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path video_pruning_method allowed_local_media_path "
    "allowed_media_domains default_mm_loras ec_transfer_config ec_manager_config": "texts only",
    "eplb_config engram_config mamba_config kernel_config ir_op_priority aux_output_config quantization_config "
    "fault_tolerance_config offload_backend offload_params kv_cache_dtype_skip_layers sleep_preserve_parameter_names "
    "mamba_backend": "for other kinds of models or devices, or given by an option that is drawn",
}
#: Engine options that round: plain vLLM's own answers then hang on a batch's shape.
ROUNDING = ("dtype", "kv_cache_dtype", "quantization", "lora_dtype")
STRUCTURED = (
    {"json_object": True},
    {"regex": r"\[[0-9]{1,3}(, [0-9]{1,3}){2,6}\]"},
    {"choice": ["positive", "negative", "positively"]},
    {"grammar": 'root ::= "SELECT " column (", " column)* " FROM t"\ncolumn ::= "a" | "b"'},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    {"regex": "("},
)
#: Request option -> values, where the type alone says too little.
REQUEST_VALUES: dict[str, list] = {
    "allowed_token_ids": [list(range(4, 900)), list(range(4, 900, 7)), [5], []],
    "bad_words": [["self", " self", "return"], [" ", "a"], [""]],
    "extra_args": [{"eesd_enabled": False}, {"eesd_max_draft_tokens": 1}, {"other": 1}, {"modulus": 2}],
    "frequency_penalty": [-2.0, 0.9, 2.0],
    "logit_bias": [{5: 3.0, 300: 9.0}, {7: -100.0}, {token: 4.0 for token in range(0, 4096, 7)}],
    "logprob_token_ids": [[5, 6], [9], []],
    "logprobs": [0, 1, 2, 5, 20, 21],
    "max_tokens": [None, 1, 2, 3, 40],
    "min_p": [0.05, 0.5, 1.0],
    "min_tokens": [1, 7, 12],
    "n": [1, 2, 3],
    "output_kind": [0, 1, 2],
    "presence_penalty": [-1.1, 0.5, 2.0],
    "prompt_logprobs": [0, 2, 20],
    "prompt_logprob_token_ids": [[[5, 6]]],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}, {"max_pattern_size": 1, "min_count": 1}],
    "repetition_penalty": [0.5, 1.05, 1.4],
    "seed": [-1, 0, 11, 2**40, -7],
    "stop": [["e"], ["object", " *"], "a"],
    "stop_token_ids": [list(range(0, VOCAB_SIZE, 5)), [7, 304, 939]],
    "structured_outputs": list(STRUCTURED),
    "temperature": [0.0, 1e-6, 0.3, 0.8, 1.4, 2.0],
    "thinking_token_budget": [0, 3, -1],
    "top_k": [-1, 1, 2, 40, 10_000],
    "top_p": [1e-6, 0.4, 0.95, 1.0],
    "trace_decode_token_ids": [[5, 6, 7]],
    # Of a request beside its SamplingParams.
    "aborted": [1, 3],
    "cache_salt": ["salt"],
    "lora": [True],
    "priority": [-1, 5],
    "prompt": ["text", "embeds", "empty", "unknown", "as long as may be", "too long"],
}
#: Fields of SamplingParams that are never drawn, and why.
REQUEST_ELSEWHERE = {"skip_clone output_text_buffer_length": "set by vLLM's entry points"}
#: Engine options that plain vLLM is not started with: they say how long drafts are, or what is told of them.
ONLY_WITH_DRAFTS = ("spec_tokens", "per_request_spec_decode_metrics")
#: How a request samples unless its option says so. A seed is plain vLLM's text; without one only greedy texts are.
BASES = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0})
POLICIES = ("fixed", "goodput", "beta_ts", "calibrated_ts", "confidence")


class Draw(typing.NamedTuple):
    """What one engine is started with and asked, and by which numbers it was drawn."""

    seed: int
    number: int
    engine: dict[str, Any]
    spec: dict[str, Any]
    requests: list[dict[str, Any]]


def names_in(table: dict[str, str]) -> set[str]:
    return {name for names in table for name in names.split()}


def values_of_type(kind: Any) -> list | None:
    """Return legal values of a type, None where it says too little."""
    if kind is bool:
        return [True, False]
    if kind is int:
        return list(INTEGERS)
    if kind is float:
        return list(FLOATS)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [values_of_type(part) for part in typing.get_args(kind) if part not in (str, type(None))]
        return None if not found or None in found else [value for values in found for value in values]
    return None


def engine_options() -> dict[str, list]:
    """Return {field of EngineArgs: its values} of the installed vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    options = {}
    for field in dataclasses.fields(EngineArgs):
        if field.name not in names_in(ENGINE_ELSEWHERE):
            options[field.name] = ENGINE_VALUES.get(field.name) or values_of_type(field.type)
    return options


def request_options() -> dict[str, list]:
    """Return {field of SamplingParams, or what else a request has: its values} of the installed vLLM."""
    from vllm import SamplingParams

    hints = typing.get_type_hints(SamplingParams)
    fields, left_out = SamplingParams.__struct_fields__, names_in(REQUEST_ELSEWHERE)
    options = {name: REQUEST_VALUES.get(name) or values_of_type(hints[name]) for name in fields}
    of_params = {name: values for name, values in options.items() if name not in left_out and name[0] != "_"}
    return of_params | {name: REQUEST_VALUES[name] for name in REQUEST_VALUES if name not in options}


def draw(seed: int, number: int, telling_only: bool = False) -> Draw:
    """Return an engine with an option or two, and the requests, each with one or two, that it is asked.

    Args:
        telling_only: take one of the telling options, in a random order, so that none comes twice before all have come.
    """
    generator = np.random.default_rng([seed, number])

    def one_of(values: Any) -> Any:
        return values[int(generator.integers(len(values)))]

    fields = {name: values for name, values in engine_options().items() if values}
    if telling_only:
        names = [np.random.default_rng(seed).permutation(TELLING)[number % len(TELLING)]]
    else:
        # Of all options there are, many are for other kinds of models.
        among = TELLING if generator.integers(4) else list(fields)
        names = generator.choice(among, 1 + int(generator.integers(4) == 0), replace=False)
    engine = {str(name): one_of(fields[name]) for name in names}
    if any("lora" in name for name in engine):
        engine.setdefault("enable_lora", True)
    spec = {"method": "eesd", "exit_layer": one_of((1, 2, 3)), "policy": one_of(POLICIES)}
    if "spec_tokens" not in engine and generator.integers(2):
        spec["num_speculative_tokens"] = one_of((1, 4, 7))
    options = {name: values for name, values in request_options().items() if values}
    requests = []
    for _ in range(NUM_REQUESTS):
        chosen = generator.choice(list(options), 1 + int(generator.integers(2)), replace=False)
        asked = {str(option): one_of(options[option]) for option in chosen}
        length = one_of((1, 2, 7, 16, 31, 60))
        tokens = generator.integers(4, VOCAB_SIZE, length).tolist()
        requests.append({"max_tokens": 12, "tokens": tokens} | one_of(BASES) | asked)
    return Draw(seed, number, engine, spec, requests)
