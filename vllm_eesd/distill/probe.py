"""What `eesd probe` does: how well each layer already predicts the target, what layers cost, whether EESD will pay."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.conversations import read_chat_template
from vllm_eesd.distill.config import DEFAULT_HEAD_LAYERS
from vllm_eesd.distill.expected import (
    MEASURED,
    MeasuredHead,
    best_speedup,
    choose_vocabulary,
    closing,
    describe,
    gaps_closed,
    leading_of,
    lm_head_dominates,
    most_alike,
    num_parameters,
)
from vllm_eesd.distill.layer_costs import LayerCosts, LayerResult, measure_costs
from vllm_eesd.distill.losses import CHUNK_LOGITS
from vllm_eesd.distill.metrics import float_head
from vllm_eesd.distill.plots import check_plot, plot_probe
from vllm_eesd.distill.report import as_typed, check_writable, command, write_json
from vllm_eesd.distill.target import Target, load_target
from vllm_eesd.distill.text import measuring_windows
from vllm_eesd.distill.vocabulary import coverage, end_tokens
from vllm_eesd.progress import progress

# Floats of hidden states kept at one time: 256 MiB of float32.
CHUNK_STATES = 1 << 26
# Windows of given text whose tokens are counted for a draft vocabulary; fewer are measured on.
COUNTED_WINDOWS = 1024
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
    template = read_chat_template(args.chat_template)
    with progress(f"loading {args.model}"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = load_target(args.model, 1, device).to(device)
    with progress("reading text" if args.text else "the target writes text to measure on"):
        many = max(args.windows, COUNTED_WINDOWS) if args.text else args.windows
        counted = measuring_windows(target, args.model, args.text, many, args.seq_len, template)
    windows = counted[torch.linspace(0, len(counted) - 1, min(args.windows, len(counted))).long()]
    results, costs = probe(target, windows, args.head_layers, counted)
    verdict = decide(results, args.model, args.text, args.head_layers, num_parameters(target) / 1e6)
    if args.chat_template and "distill" in verdict["next"]:
        verdict["next"] += f" {command('--chat-template', args.chat_template)}"
    print(_table(results))
    print(f"verdict: {verdict['verdict']}")
    if vocabulary := vocabulary_line(results, verdict["exit_layer"], args.head_layers, target.config.vocab_size):
        print(vocabulary)
    print(f"next: {verdict['next']}")
    if args.json:
        layers = [asdict(result) for result in results]
        write_json(args.json, {"model": args.model, "layers": layers, "costs": asdict(costs)} | verdict)
    if args.plot:
        plot_probe(args.plot, results, costs)
    return 0


def probe(
    target: Target, windows: Tensor, head_layers: int = DEFAULT_HEAD_LAYERS, counted: Tensor | None = None
) -> tuple[list[LayerResult], LayerCosts]:
    """Return one result per exit layer 1..L-1, and what layers cost.

    Args:
        windows: [num_windows, seq_len] int64; memory does not grow with num_windows.
        head_layers: M of a distilled head, each of which costs what a layer of the target does.
        counted: [more windows, seq_len] int64, whose tokens are counted for a draft vocabulary; None: `windows`.
    """
    costs, gap = measure_costs(target, LONGEST_DRAFT), most_alike(num_parameters(target) / 1e6).gap_closed
    # As one text: windows may overlap their neighbours, which must not be in the other half.
    text = (windows if counted is None else counted).flatten().numpy()
    covered = coverage([text], target.config.vocab_size, end_tokens(target.config))
    results = []
    for index, (agreement, overlap, leading) in enumerate(headless_agreement(target, windows)):
        n, longest = index + 1, len(leading)
        headless = best_speedup(leading, costs.draft_ms(n), costs.verify_ms)
        vocabulary, share = None, 1.0
        if lm_head_dominates(target, n, head_layers):
            vocabulary = choose_vocabulary(covered, closing(gap, agreement), costs, n, head_layers, longest)
            share = vocabulary.coverage
        draft_ms = costs.draft_ms(n, head_layers, vocabulary and vocabulary.size)
        # Of greedy drafts, of drawn ones; then the range.
        expected = [(gap, agreement), (gap, overlap), *((one, agreement) for one in gaps_closed())]
        greedy, drawn, *extremes = (
            best_speedup(leading_of(share * closing(one, accepted), longest), draft_ms, costs.verify_ms)
            for one, accepted in expected
        )
        reached = extremes[0][0], extremes[1][0]
        measured = n, agreement, overlap, leading, costs.draft_ms(n)
        results.append(LayerResult(*measured, *headless, *greedy, *drawn, reached, vocabulary))
    return results, costs


@torch.no_grad()
def headless_agreement(
    target: Target, windows: Tensor, only: int | None = None
) -> list[tuple[float, float, list[float]]]:
    """Return (agreement, overlap, matches per position) of layers, drafting with the target's final norm.

    Args:
        windows: [num_windows, seq_len] int64.
        only: the layer that is asked for, 0 to L-1; None: 1 to L-1.
    """
    num_layers, seq_len = target.config.num_hidden_layers, windows.shape[1]
    layers = range(1, num_layers) if only is None else range(only, only + 1)
    depth = min(LONGEST_DRAFT, seq_len)
    matched = torch.zeros(len(layers), dtype=torch.float64)
    overlap, leading = torch.zeros_like(matched), torch.zeros(len(layers), depth, dtype=torch.float64)
    rows_at_once = max(1, CHUNK_STATES // ((num_layers + 1) * seq_len * target.config.hidden_size))
    with progress("measuring layers", windows.numel(), "tokens") as count:
        for rows in windows.split(rows_at_once):
            states = target.layer_inputs(rows.to(target.lm_head.weight.device))
            compared = [states[index].flatten(0, 1) for index in (*layers, num_layers)]
            match, shared = _compare_layers(target, compared, count)
            overlap += shared
            matched += match.sum(1, dtype=torch.float64)
            runs = match.unflatten(1, rows.shape).unfold(2, depth, 1).double().cumprod(-1)
            leading += runs.sum((1, 2))
    num_starts = len(windows) * (seq_len - depth + 1)
    return [
        (m / windows.numel(), o / windows.numel(), [share / num_starts for share in runs])
        for m, o, runs in zip(matched.tolist(), overlap.tolist(), leading.tolist(), strict=True)
    ]


def _compare_layers(target: Target, states: list[Tensor], count: Callable[[float], object]) -> tuple[Tensor, Tensor]:
    """Return (which choices are the target's, [layers, num_tokens] bool; sums of min(p, q), [layers] float64).

    Args:
        states: [num_tokens, hidden_size] each, what leaves each layer and, last, the target.
        count: told how many tokens are done.
    """
    norm, lm_head = target.model.model.norm, float_head(target)
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
        count(len(p))
    return match, overlap


def best_exit_layer(results: list[LayerResult]) -> int:
    """Return the N at which a distilled head is expected to pay most."""
    return max(results, key=lambda result: result.distilled_speedup).exit_layer


def decide(
    results: list[LayerResult],
    model: str,
    text: list[str] | None,
    head_layers: int = DEFAULT_HEAD_LAYERS,
    parameters: float = MEASURED[0].parameters,
) -> dict[str, Any]:
    """Return {"verdict", "exit_layer", "next"}: headless, distil, or neither, and the command for it.

    Args:
        parameters: of the target, millions.
    """
    headless = max(results, key=lambda result: result.headless_speedup)
    distilled = max(results, key=lambda result: result.distilled_speedup)
    if headless.headless_speedup >= max(WORTHWHILE, HEADLESS_SHARE * distilled.distilled_speedup):
        n = headless.exit_layer
        verdict = f"LayerSkip-style: use headless at N={n}, predicted {headless.headless_speedup:.2f}x"
        spec = f'{{"method": "eesd", "exit_layer": {n}, "num_speculative_tokens": {headless.headless_tokens}}}'
        following = command("vllm", "serve", model, "--speculative-config", spec)
    elif distilled.distilled_speedup >= WORTHWHILE:
        n = distilled.exit_layer
        verdict = f"worth distilling at N={n}: {_expected(distilled, most_alike(parameters))}"
        data = as_typed(text or ["TEXT"])
        layers = ["--exit-layer", n, "--head-layers", head_layers]
        following = command("eesd", "distill", model, *layers, "--data", *data, "-o", "HEAD")
    else:
        n = None
        verdict = (
            f"not worth it: no layer is predicted to gain {WORTHWHILE - 1:.0%} "
            f"(best, distilled at N={distilled.exit_layer}: {_expected(distilled, most_alike(parameters))})"
        )
        following = command("vllm", "serve", model)
    return {"verdict": verdict, "exit_layer": n, "next": following}


def _expected(result: LayerResult, like: MeasuredHead) -> str:
    """Return what is predicted of a distilled head and what that was measured on."""
    lowest, highest = gaps_closed()
    low, high = result.distilled_range
    return (
        f"predicted {result.distilled_speedup:.2f}x ({low:.2f}x to {high:.2f}x) if the head closes "
        f"{like.gap_closed:.0%} of the gap to the target, as measured on {like}; "
        f"on the {len(MEASURED)} heads measured it was {lowest:.0%} to {highest:.0%}, and more tokens close more of it"
    )


def vocabulary_line(results: list[LayerResult], exit_layer: int | None, head_layers: int, vocab_size: int) -> str:
    """Return what a draft vocabulary is worth at N, or at the best N where none pays; "" where there is no question."""
    n = best_exit_layer(results) if exit_layer is None else exit_layer
    choice = results[n - 1].vocabulary
    return f"at N={n}, M={head_layers} {describe(choice, vocab_size)}" if choice else ""


def _table(results: list[LayerResult]) -> str:
    lines = ["  N  agreement  overlap  of 8 match  draft ms  headless     distilled    sampled, T = 1 (both expected)"]
    for r in results:
        lines.append(
            f"{r.exit_layer:3d}  {r.agreement:9.3f}  {r.overlap:7.3f}  {sum(r.matches_per_position):10.2f}  "
            f"{r.draft_ms:8.3f}  {r.headless_speedup:.2f}x K={r.headless_tokens}    "
            f"{r.distilled_speedup:.2f}x K={r.distilled_tokens}    {r.drawn_speedup:.2f}x K={r.drawn_tokens}"
        )
    return "\n".join(lines)
