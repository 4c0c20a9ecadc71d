"""What a policy's decisions cost: microseconds per call of the round's hooks, by batch size.

    python benchmarks/bench_policy.py [--policies goodput,beta_ts] [--rows 1,8,64] [--hopeless] [--json OUT]

No engine and no model: confidences and outcomes are drawn at random, so that rows stop at different lengths. `step` is
all that one decoding step asks for: costs fed, outcomes observed, the round begun and every token decided. With
`--hopeless` no draft is ever accepted and drafting is dear: what `goodput` costs where it does not draft. What looking
for n-gram continuations and deciding about them takes is timed apart, on random texts, searched to their beginning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from vllm_eesd.config import LONGEST_NGRAM_DRAFT
from vllm_eesd.policy import POLICIES, BetaPosterior, Outcome, build_policy
from vllm_eesd.provenance import provenance
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.ngram import NgramDrafter

NUM_SPECULATIVE_TOKENS = 8
STEPS, WARM_UP_STEPS, COPY_STEPS = 1500, 300, 200
TEXT_LENGTHS = (250, 8000)
#: Draft steps so cheap that `goodput` drafts at every batch size: deciding about many tokens is what costs.
DRAFT_MS, PLAIN_MS, GROWTH_MS = 0.02, 3.6, 0.001


def measure(name: str, num_rows: int, hopeless: bool) -> dict[str, float]:
    """Return the median microseconds per call of each hook, and per step."""
    draft_ms = PLAIN_MS if hopeless else DRAFT_MS
    generator = np.random.default_rng(0)
    policy = build_policy(name, BetaPosterior(num_rows, 3.0, 1.0), 0, {})
    slots, limits = np.arange(num_rows), np.full(num_rows, NUM_SPECULATIVE_TOKENS)
    policy.reset(slots)
    everyone, no_ngrams = np.ones(num_rows, dtype=bool), np.zeros(num_rows, dtype=bool)
    times: dict[str, list[float]] = {"feed_costs": [], "observe": [], "begin": [], "tell": [], "step": []}

    def timed(hook: str, function, *args):
        start = time.perf_counter()
        result = function(*args)
        times[hook].append(time.perf_counter() - start)
        return result

    for _ in range(WARM_UP_STEPS + STEPS):
        calls_before = len(times["tell"])
        round_ = timed("begin", DraftRound, policy, slots, limits)
        while len(round_.rows):
            timed("tell", round_.tell, generator.beta(6, 2, len(round_.rows)).astype(np.float32))
        accepted = np.minimum(round_.lengths, 0 if hopeless else generator.geometric(0.3, num_rows) - 1)
        timed("feed_costs", feed_costs, policy.costs, num_rows, round_.lengths, draft_ms)
        outcome = Outcome(slots, round_.lengths, accepted, round_.confidences, no_ngrams, everyone)
        timed("observe", policy.observe, outcome)
        decided = sum(times["tell"][calls_before:])
        times["step"].append(decided + sum(times[hook][-1] for hook in ("feed_costs", "observe", "begin")))
    skip = {hook: WARM_UP_STEPS * len(values) // (WARM_UP_STEPS + STEPS) for hook, values in times.items()}
    return {hook: 1e6 * statistics.median(values[skip[hook] :] or [0.0]) for hook, values in times.items()}


def measure_ngrams(num_rows: int, text_length: int) -> dict[str, float]:
    """Return the median microseconds of searching every row's text, and of deciding which n-gram drafts to take."""
    ngrams = NgramDrafter(num_rows, LONGEST_NGRAM_DRAFT)
    policy = build_policy("goodput", BetaPosterior(num_rows, 3.0, 1.0), 0, {})
    slots, limits = np.arange(num_rows), np.full(num_rows, LONGEST_NGRAM_DRAFT)
    policy.reset(slots)
    texts = np.random.default_rng(0).integers(0, 2000, (num_rows, text_length + COPY_STEPS)).astype(np.int32)
    times: dict[str, list[float]] = {"search": [], "take": []}
    for step in range(COPY_STEPS):
        policy.begin(slots, limits)
        began = time.perf_counter()
        ngrams.update(slots, texts, slots, np.full(num_rows, text_length + step), limits > 0)
        searched = time.perf_counter()
        policy.take_ngrams(slots, ngrams.chances(slots), limits)
        times["search"].append(searched - began)
        times["take"].append(time.perf_counter() - searched)
    return {hook: round(1e6 * statistics.median(values), 1) for hook, values in times.items()}


def feed_costs(costs, num_rows: int, lengths: np.ndarray, draft_ms: float) -> None:
    """Report one step's times as an engine would."""
    num_tokens = num_rows + int(lengths.sum())
    costs.observe_verify(num_rows, num_tokens, PLAIN_MS + GROWTH_MS * (num_tokens - num_rows))
    for step in range(int(lengths.max())):
        costs.observe_draft_step(int((lengths > step).sum()), draft_ms)
    if lengths.any():
        costs.observe_draft_round(num_rows, draft_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="goodput,beta_ts", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--rows", default="1,8,64", help="batch sizes")
    parser.add_argument("--hopeless", action="store_true", help="drafting never pays")
    parser.add_argument("--json", help="write the rows")
    args = parser.parse_args()
    rows = []
    for name in args.policies.split(","):
        for num_rows in map(int, args.rows.split(",")):
            medians = {hook: round(us, 1) for hook, us in measure(name, num_rows, args.hopeless).items()}
            rows.append({"policy": name, "num_rows": num_rows, "hopeless": args.hopeless} | medians | provenance())
            print(f"{name:14}{num_rows:4} rows, us: " + ", ".join(f"{hook} {us}" for hook, us in medians.items()))
    for num_rows in map(int, args.rows.split(",")):
        for text_length in TEXT_LENGTHS:
            medians = measure_ngrams(num_rows, text_length)
            rows.append(
                {"policy": "goodput", "num_rows": num_rows, "text_length": text_length} | medians | provenance()
            )
            shown = ", ".join(f"{hook} {us}" for hook, us in medians.items())
            print(f"{num_rows:4} texts of {text_length} tokens, us: {shown}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
