"""`eesd trace-record`: what drafting would be worth at every position of a workload, and what steps cost here."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import check_sizes, open_console, reporting
from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig
from vllm_eesd.traces.dense import DenseTrace, DraftLayers, RequestTrace, write

#: Draft lengths whose steps are timed; the cost model interpolates between them.
TIMED_LENGTHS = (0, 1, 2, 3, 4, 6, 8)
TIMED_TOKENS = 24
#: Drafts to the end, and wants every confidence: what a dense trace holds.
TO_THE_END = {"policy": "confidence", "policy_args": {"threshold": 0.0}}


def run(args: argparse.Namespace) -> int:
    """Record a dense trace and write it.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    depth = args.num_speculative_tokens
    settings = EngineSettings(
        args.model, args.head, num_speculative_tokens=depth, temperature=args.temperature, **TO_THE_END
    )
    head = ExitHeadConfig.load(args.head or Path(args.model) / "eesd")
    texts = read_prompts(args.prompts)
    check_sizes(len(texts), args.batch, max_tokens=args.max_tokens)
    console = open_console()
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(settings.model, texts, args.max_tokens, progress, args.chat_template)
        with running_engines(["eesd"], settings, max_model_len, progress) as engines:
            engine = engines["eesd"]
            progress("timing steps")
            time_steps(engine.at(temperature=0.0), prompts, args.batch, depth)
            costs = engine.ask("eesd_costs")
            progress(f"recording {len(prompts)} requests of {args.max_tokens} tokens")
            engine.forget_prefixes()
            engine.ask("eesd_record_dense")
            engine.generate(prompts, args.max_tokens)
            recorded = engine.ask("eesd_take_dense")
    requests = [RequestTrace(**{name: np.array(values) for name, values in found.items()}) for found in recorded]
    name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
    layers = DraftLayers(head.exit_layer, head.head_layers, head.verifier.num_hidden_layers)
    prior = head.prior.alpha, head.prior.beta
    write(args.output, DenseTrace(name, args.workload, depth, costs, requests, prior, layers))
    matches = np.concatenate([request.matches for request in requests])
    console.print(f"wrote {args.output}: {len(matches)} positions, {matches.mean():.2f} of {depth} drafts match")
    console.print(f"next: eesd simulate {args.output}", soft_wrap=True)
    return 0


def time_steps(engine: VllmEngine, prompts: list[list[int]], batches: list[int], longest: int) -> None:
    """Make the engine run steps of every size the cost model should know, up to drafts of the longest length.

    Rounds are recorded meanwhile: otherwise rounds are skipped, and not timed, where no request may draft.
    """
    engine.ask("eesd_take_rounds")
    for batch in batches:
        for length in TIMED_LENGTHS:
            if length <= longest:
                num_tokens = TIMED_TOKENS * (1 + length // 2)
                engine.generate(prompts[:batch], num_tokens, extra_args={"eesd_max_draft_tokens": length})
