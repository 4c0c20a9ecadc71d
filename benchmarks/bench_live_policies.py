"""The goodput policy against every fixed draft length and plain vLLM, live: the same prompts, interleaved.

    python -P benchmarks/bench_live_policies.py models/eesd-code-10m [--batches 1,8] [--rounds 5] [--json OUT]
    python -P models/make/make_random_target.py build/random_135m   # nothing to predict, at a real model's step
    python -P benchmarks/bench_live_policies.py build/random_135m --workloads random_tokens --lengths "" [...]

Two engines run side by side: plain vLLM, and EESD, switched from policy to policy by `eesd_use_policy`; requests limit
their drafts (`eesd_max_draft_tokens`; `off` is `eesd_enabled: false`). Methods take turns within a round; ratios are
paired by round.
A request that ends makes room for the next, so that a batch stays full: a run's last requests are not what is measured.
Random tokens are sampled at a temperature at which nothing can be predicted: drafting never pays there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, start_engine
from vllm_eesd.bench.measure import rotated
from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.provenance import provenance

PROMPTS = Path(__file__).resolve().parents[1] / "models" / "prompts"
#: Name -> sampling temperature.
WORKLOADS = {"held_out_code": 0.0, "repetitive_code": 0.0, "random_tokens": 2.0}
#: Method -> what its requests ask for; plain vLLM is another engine.
OPTIONS: dict[str, dict[str, Any] | None] = {"plain": None, "off": {"eesd_enabled": False}, "goodput": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--lengths", default="1,2,3,4,5,6,7,8", help="fixed lengths; may be empty")
    parser.add_argument("--prompts", type=int, default=4, help="per workload; at least three batches are used")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings, batches = EngineSettings(args.model), [int(batch) for batch in args.batches.split(",")]
    lengths = [int(length) for length in args.lengths.split(",") if length]
    options = OPTIONS | {f"fixed {k}": {"eesd_max_draft_tokens": k} for k in lengths}
    count = max(args.prompts, *(used_prompts(args.prompts, batch) for batch in batches))
    prompts = {}
    for name in args.workloads.split(","):
        texts = read_prompts(PROMPTS / f"{name}.jsonl")[:count]
        _, prompts[name], max_model_len = encode_prompts(args.model, texts, args.max_tokens, lambda text: None)
    engines = {
        "eesd": start_engine(settings, 1024, 2, **settings.method_arguments("eesd")),
        "plain": start_engine(settings, 1024, 2),
    }
    rows = []
    for name, encoded in prompts.items():
        for batch in batches:
            used = [encoded[i % len(encoded)] for i in range(used_prompts(args.prompts, batch))]
            times = measure(engines, options, used, batch, args.max_tokens, WORKLOADS[name], args.rounds)
            steps = -(-len(used) // batch) * args.max_tokens
            rows += summarise(name, batch, times, steps)
            print_rows(rows[-len(options) :])
    for llm in engines.values():
        llm.llm_engine.engine_core.shutdown()
    if args.json:
        shared = {"model": args.model, "max_tokens": args.max_tokens, "rounds": args.rounds} | provenance()
        args.json.write_text(json.dumps([row | shared for row in rows], indent=1) + "\n")


def used_prompts(prompts: int, batch: int) -> int:
    """Three batches of them, so that most steps run a full batch, whichever request ends first."""
    return max(prompts, 3 * batch)


def measure(
    engines: dict[str, Any],
    options: dict[str, dict[str, Any] | None],
    prompts: list[list[int]],
    batch: int,
    max_tokens: int,
    temperature: float,
    rounds: int,
) -> dict[str, list[float]]:
    """Return the seconds of every method in every round; one round before the first is not counted."""
    times: dict[str, list[float]] = {method: [] for method in options}
    expected = None
    for number in range(rounds + 1):
        for method in rotated(list(options), number):
            llm = engines["plain" if method == "plain" else "eesd"]
            llm.reset_prefix_cache()
            if method != "plain":
                llm.collective_rpc("eesd_use_policy", args=("fixed" if method.startswith("fixed") else "goodput",))
            began = time.perf_counter()
            outputs = generate(llm, prompts, batch, max_tokens, temperature, options[method])
            if number:
                times[method].append(time.perf_counter() - began)
            if temperature == 0:
                expected = expected or outputs
                if outputs != expected:
                    raise SystemExit(f"NOT LOSSLESS: {method}, batch {batch}: greedy output differs")
    return times


def generate(
    llm: Any, prompts: list[list[int]], batch: int, max_tokens: int, temperature: float, options: Any
) -> list[list[int]]:
    """Return what is generated with `batch` requests running at a time: one that ends makes room for the next."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=options,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, outputs, begun = llm.llm_engine, {}, 0
    while len(outputs) < len(prompts):
        while begun < len(prompts) and begun - len(outputs) < batch:
            engine.add_request(str(begun), tokens_input(prompts[begun]), params)
            begun += 1
        for output in engine.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [outputs[number] for number in range(len(prompts))]


def summarise(workload: str, batch: int, times: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    """Return one row per method: paired speedup over plain, and goodput's over the method.

    Args:
        times: seconds of every method in every round.
        steps: engine steps that plain decoding takes, for its `ms_per_step`.
    """
    rows = []
    for method, seconds in times.items():
        plain = [theirs / ours for theirs, ours in zip(times["plain"], seconds, strict=True)]
        goodput = [theirs / ours for theirs, ours in zip(seconds, times["goodput"], strict=True)]
        row = {"workload": workload, "batch": batch, "method": method}
        for key, ratios in (("vs_plain", plain), ("goodput_vs_it", goodput)):
            row[key] = round(statistics.median(ratios), 3)
            row[f"{key}_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
        if method == "plain":
            row["ms_per_step"] = round(statistics.median(seconds) * 1e3 / steps, 2)
        rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['workload']}, batch {rows[0]['batch']}", flush=True)
    for row in rows:
        (low, high), (worst, best) = row["vs_plain_spread"], row["goodput_vs_it_spread"]
        print(
            f"  {row['method']:8} {row['vs_plain']:.2f}x plain ({low:.2f}-{high:.2f}); "
            f"goodput {row['goodput_vs_it']:.2f}x it ({worst:.2f}-{best:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
