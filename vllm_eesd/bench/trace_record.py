"""`eesd trace-record`: what drafting would be worth at every position of a workload, and what steps cost here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_eesd.bench.engines import WORKER_EXTENSION, EngineSettings, encode_prompts, start_engine
from vllm_eesd.bench.latency import check_sizes, open_console, reporting
from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig
from vllm_eesd.traces.dense import DenseTrace, RequestTrace, write

#: Draft lengths and batch sizes whose steps are timed; the cost model interpolates between them.
TIMED_LENGTHS = (0, 1, 2, 3, 4, 6, 8)
TIMED_TOKENS = 24
#: Drafts to the end, and wants every confidence: what a dense trace holds.
TO_THE_END = {"policy": "confidence", "policy_args": {"threshold": 0.0}}

#: Of a request's arrays, which travel as lists.
DTYPES = {"matches": np.int64, "confidences": np.float32, "prompt": np.int32, "emitted": np.int32}


def run(args: argparse.Namespace) -> int:
    """Record a dense trace and write it.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    settings = EngineSettings(args.model, args.head, num_speculative_tokens=args.num_speculative_tokens)
    texts = read_prompts(args.prompts)
    check_sizes(len(texts), args.batch, max_tokens=args.max_tokens)
    console = open_console()
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(settings.model, texts, args.max_tokens, progress)
        progress("starting vLLM: loading, compiling")
        arguments = {
            "speculative_config": settings.eesd_config() | TO_THE_END,
            "worker_extension_cls": WORKER_EXTENSION,
            "enable_prefix_caching": False,
        }
        llm = start_engine(settings, max_model_len, **arguments)
        try:
            costs, requests = _record(llm, prompts, args, progress)
        finally:
            llm.llm_engine.engine_core.shutdown()
    head = args.head or Path(args.model) / "eesd"
    prior = ExitHeadConfig.load(head).prior
    depth = settings.num_speculative_tokens
    name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
    write(args.output, DenseTrace(name, args.workload, depth, costs, requests, (prior.alpha, prior.beta)))
    matches = np.concatenate([request.matches for request in requests])
    console.print(f"wrote {args.output}: {len(matches)} positions, {matches.mean():.2f} of {depth} drafts match")
    console.print(f"next: eesd simulate {args.output}", soft_wrap=True)
    return 0


def _record(
    llm: Any, prompts: list[list[int]], args: argparse.Namespace, progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[RequestTrace]]:
    """Return what steps cost, nothing without batch sizes to time, and the requests' traces."""
    costs = {}
    if args.batch:
        progress("timing steps")
        time_steps(partial(_generate, llm, temperature=0.0), prompts, args.batch, args.num_speculative_tokens)
        costs = llm.collective_rpc("eesd_costs")[0]
    progress(f"recording {len(prompts)} requests of {args.max_tokens} tokens")
    llm.collective_rpc("eesd_record_dense")
    _generate(llm, prompts, args.max_tokens, args.temperature)
    (recorded,) = llm.collective_rpc("eesd_take_dense")
    return costs, [
        RequestTrace(**{name: np.array(values, dtype=DTYPES[name]) for name, values in request.items()})
        for request in recorded
    ]


def time_steps(generate: Callable[..., Any], prompts: list[list[int]], batches: list[int], longest: int) -> None:
    """Make the engine run steps of every size the cost model should know.

    Args:
        generate: takes prompts, max_tokens and `options`, EESD's own of a request.
        longest: draft length.
    """
    for batch in batches:
        for length in TIMED_LENGTHS:
            if length <= longest:
                options = {"eesd_max_draft_tokens": length}
                generate(prompts[:batch], TIMED_TOKENS * (1 + length // 2), options=options)


def _generate(llm: Any, prompts: list[list[int]], max_tokens: int, temperature: float, options: Any = None) -> None:
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False, seed=0, extra_args=options
    )
    llm.generate([TokensPrompt(prompt_token_ids=tokens) for tokens in prompts], params, use_tqdm=False)
