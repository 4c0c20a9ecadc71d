"""What `eesd probe` does: how well each layer already predicts the target, what layers cost, whether EESD will pay."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.config import DEFAULT_HEAD_LAYERS
from vllm_eesd.distill.layer_costs import LayerCosts, LayerResult, measure_costs
from vllm_eesd.distill.losses import CHUNK_LOGITS
from vllm_eesd.distill.plots import check_plot, plot_probe
from vllm_eesd.distill.report import check_writable, command, write_json
from vllm_eesd.distill.target import Target, load_target
from vllm_eesd.distill.text import measuring_windows

# Floats of hidden states kept at one time: 256 MiB of float32.
CHUNK_STATES = 1 << 26
# Of what a layer gets wrong headless, the share that a distilled head at the same N gets right. Measured on the
# embedded target, N = 2 of 24, 8 x 128 tokens of models/prompts/held_out_code.jsonl: agreement 0.186 headless, 0.583
# with its head of one layer, so (0.583 - 0.186) / (1 - 0.186). One small model: a guide to where to start, not a
# promise; a head of more layers closes more of it.
GAP_CLOSED = 0.49
# A smaller gain is lost again in scheduling and sampling.
WORTHWHILE = 1.1
# Headless needs no training and no KV: it may reach this much less than what a distilled head is expected to reach.
HEADLESS_SHARE = 0.95


def run(args: argparse.Namespace) -> int:
    """Print a table of all layers, a verdict and the next command.

    Raises:
        ValueError: a wrong argument or unusable text, before anything is measured.
    """
    for path in filter(None, (args.json, args.plot)):
        check_writable(Path(path).parent, 0, "output")
    check_plot(args.plot)
    target = load_target(args.model, 1, "cuda" if torch.cuda.is_available() else "cpu")
    windows = measuring_windows(target, args.model, args.text, args.windows, args.seq_len)
    results, costs = probe(target, windows, args.head_layers)
    verdict = decide(results, args.model, args.text, args.head_layers)
    print(_table(results))
    print(f"verdict: {verdict['verdict']}")
    print(f"next: {verdict['next']}")
    if args.json:
        layers = [asdict(result) for result in results]
        write_json(args.json, {"model": args.model, "layers": layers, "costs": asdict(costs)} | verdict)
    if args.plot:
        plot_probe(args.plot, results, costs)
    return 0


def probe(
    target: Target, windows: Tensor, head_layers: int = DEFAULT_HEAD_LAYERS
) -> tuple[list[LayerResult], LayerCosts]:
    """Return one result per exit layer 1..L-1, and what layers cost.

    Args:
        windows: [num_windows, seq_len] int64; memory does not grow with num_windows.
        head_layers: M of a distilled head, each of which costs what a layer of the target does.
    """
    costs = measure_costs(target, LONGEST_DRAFT)
    results = []
    for index, (agreement, overlap, leading) in enumerate(headless_agreement(target, windows)):
        draft_ms, head_ms = costs.draft_ms(index + 1), costs.layer_ms[index]
        headless = best_speedup(leading, draft_ms, costs.verify_ms)
        distilled = []
        for accepted in (agreement, overlap):  # of greedy drafts, of drawn ones
            reached = accepted + GAP_CLOSED * (1 - accepted)
            powers = [reached ** (i + 1) for i in range(len(leading))]
            distilled += best_speedup(powers, draft_ms + head_layers * head_ms, costs.verify_ms)
        results.append(LayerResult(index + 1, agreement, overlap, leading, draft_ms, *headless, *distilled))
    return results, costs


@torch.no_grad()
def headless_agreement(target: Target, windows: Tensor) -> list[tuple[float, float, list[float]]]:
    """Return (agreement, overlap, matches per position) of layers 1..L-1, drafting with the target's final norm.

    Args:
        windows: [num_windows, seq_len] int64.
    """
    num_layers, seq_len = target.config.num_hidden_layers, windows.shape[1]
    depth = min(LONGEST_DRAFT, seq_len)
    matched = torch.zeros(num_layers - 1, dtype=torch.float64)
    overlap, leading = torch.zeros_like(matched), torch.zeros(num_layers - 1, depth, dtype=torch.float64)
    rows_at_once = max(1, CHUNK_STATES // ((num_layers + 1) * seq_len * target.config.hidden_size))
    for rows in windows.split(rows_at_once):
        states = target.layer_inputs(rows.to(target.lm_head.weight.device))
        match, shared = _compare_layers(target, [state.flatten(0, 1) for state in states[1:]])
        overlap += shared
        matched += match.sum(1, dtype=torch.float64)
        runs = match.unflatten(1, rows.shape).unfold(2, depth, 1).double().cumprod(-1)
        leading += runs.sum((1, 2))
    num_starts = len(windows) * (seq_len - depth + 1)
    return [
        (m / windows.numel(), o / windows.numel(), [share / num_starts for share in runs])
        for m, o, runs in zip(matched.tolist(), overlap.tolist(), leading.tolist(), strict=True)
    ]


def _compare_layers(target: Target, states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (which choices are the target's, [layers, num_tokens] bool; sums of min(p, q), [layers] float64)."""
    norm, lm_head = target.model.model.norm, target.lm_head
    num_tokens, layers = len(states[-1]), states[:-1]
    match = torch.zeros(len(layers), num_tokens, dtype=torch.bool)
    overlap = torch.zeros(len(layers), dtype=torch.float64)
    chunk = max(1, CHUNK_LOGITS // target.config.vocab_size)
    for first in range(0, num_tokens, chunk):
        some = slice(first, first + chunk)
        p = lm_head(norm(states[-1][some])).softmax(-1)
        for index, state in enumerate(layers):
            q = lm_head(norm(state[some])).softmax(-1)
            match[index, some] = (p.argmax(-1) == q.argmax(-1)).cpu()
            overlap[index] += torch.minimum(p, q).sum(dtype=torch.float64).item()
    return match, overlap


def best_speedup(leading: list[float], draft_ms: float, verify_ms: list[float]) -> tuple[float, int]:
    """Return (speedup over plain decoding, draft length) of the best fixed draft length; 1.0 at 0 if none pays.

    Args:
        leading: probability that the first i + 1 drafts are all accepted.
        draft_ms: one draft step.
        verify_ms: the target's forward over i + 1 tokens.
    """
    best, tokens = (1.0, 0), 1.0
    for length, probability in enumerate(leading, start=1):
        tokens += probability
        speedup = tokens * verify_ms[0] / (length * draft_ms + verify_ms[length])
        best = max(best, (speedup, length))
    return best


def best_exit_layer(results: list[LayerResult]) -> int:
    """Return the N at which a distilled head is expected to pay most."""
    return max(results, key=lambda result: result.distilled_speedup).exit_layer


def decide(
    results: list[LayerResult], model: str, text: list[str] | None, head_layers: int = DEFAULT_HEAD_LAYERS
) -> dict[str, Any]:
    """Return {"verdict", "exit_layer", "next"}: headless, distil, or neither, and the command for it."""
    headless = max(results, key=lambda result: result.headless_speedup)
    distilled = max(results, key=lambda result: result.distilled_speedup)
    if headless.headless_speedup >= max(WORTHWHILE, HEADLESS_SHARE * distilled.distilled_speedup):
        n = headless.exit_layer
        verdict = f"LayerSkip-style: use headless at N={n}, predicted {headless.headless_speedup:.2f}x"
        spec = f'{{"method": "eesd", "exit_layer": {n}, "num_speculative_tokens": {headless.headless_tokens}}}'
        following = command("vllm", "serve", model, "--speculative-config", spec)
    elif distilled.distilled_speedup >= WORTHWHILE:
        n = distilled.exit_layer
        verdict = (
            f"worth distilling at N={n}: predicted {distilled.distilled_speedup:.2f}x if the head closes "
            f"{GAP_CLOSED:.0%} of the gap to the target, as the embedded one does"
        )
        data = text or ["TEXT"]
        layers = ["--exit-layer", n, "--head-layers", head_layers]
        following = command("eesd", "distill", model, *layers, "--data", *data, "-o", "HEAD")
    else:
        n = None
        verdict = (
            f"not worth it: no layer is predicted to gain {WORTHWHILE - 1:.0%} "
            f"(best: {distilled.distilled_speedup:.2f}x distilled at N={distilled.exit_layer})"
        )
        following = command("vllm", "serve", model)
    return {"verdict": verdict, "exit_layer": n, "next": following}


def _table(results: list[LayerResult]) -> str:
    lines = ["  N  agreement  overlap  of 8 match  draft ms  headless     distilled    sampled, T = 1 (both expected)"]
    for r in results:
        lines.append(
            f"{r.exit_layer:3d}  {r.agreement:9.3f}  {r.overlap:7.3f}  {sum(r.matches_per_position):10.2f}  "
            f"{r.draft_ms:8.3f}  {r.headless_speedup:.2f}x K={r.headless_tokens}    "
            f"{r.distilled_speedup:.2f}x K={r.distilled_tokens}    {r.drawn_speedup:.2f}x K={r.drawn_tokens}"
        )
    return "\n".join(lines)
