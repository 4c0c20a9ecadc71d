"""What `eesd calibrate` does: drafts on held-out text, counted into calibration.json and the prior of a head.

The rounds are teacher-forced on the target's own text. For greedy drafts, on greedy text, that is exact: a draft token
is judged only if all before it were accepted, and accepted greedy drafts ARE the target's text. For drawn drafts, on
text sampled at `DRAWN_TEMPERATURE`, chances are counted, sum of min(p, q) each; that is an approximation, for what
precedes an accepted draft is not quite distributed as the target's text. For drafts verified by shared noise, on the
same text, noise is drawn of which that text is the target's choice: then accepted drafts are the text again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.conversations import read_chat_template
from vllm_eesd.distill.answers import answer_prompts, answered, ways_of
from vllm_eesd.distill.data import Corpus, long_enough
from vllm_eesd.distill.generate import own_held_out
from vllm_eesd.distill.held_out import answer_window, long_answers
from vllm_eesd.distill.material import DEFAULT_LONGEST
from vllm_eesd.distill.metrics import draft_passes
from vllm_eesd.distill.model import load_head
from vllm_eesd.distill.report import check_writable, serve_command, write_json
from vllm_eesd.distill.target import Target, load_target, place, room_for_weights
from vllm_eesd.distill.text import check_seq_len, read_files
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior
from vllm_eesd.policy import Calibration
from vllm_eesd.policy.calibration import EDGES, FILE_NAME
from vllm_eesd.policy.source import DRAWN, SHARED_NOISE
from vllm_eesd.progress import progress, telling

# A prior worth fewer observations says nothing; one worth more would not yield to what a request shows.
MIN_CONCENTRATION, MAX_CONCENTRATION = 2.0, 50.0
# Agreement of 0 or 1 on the sample must not become certainty.
RATE_RANGE = 0.02, 0.98
FILE_BYTES = 1 << 16
#: Of the text that drawn drafts are counted on, in the middle of what completion models are sampled at.
DRAWN_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Rounds:
    """Draft rounds and what the target made of them.

    Attributes:
        confidences: [num_rounds, longest draft] float32, probability of each drafted token under the draft model.
        num_accepted: [num_rounds] int64, leading drafts that are the target's choice.
        window: [num_rounds] int64, the window each round is in.
    """

    confidences: np.ndarray
    num_accepted: np.ndarray
    window: np.ndarray

    def judged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (confidence, position, accepted) of every draft token all of whose predecessors were accepted."""
        position = np.arange(self.confidences.shape[1])
        rows, positions = np.nonzero(position <= self.num_accepted[:, None])
        return self.confidences[rows, positions], positions, positions < self.num_accepted[rows]

    def of(self, chosen: np.ndarray) -> Rounds:
        """Return the rounds that `chosen`, [num_rounds] bool, selects."""
        return Rounds(self.confidences[chosen], self.num_accepted[chosen], self.window[chosen])


def run(args: argparse.Namespace) -> int:
    """Calibrate a head in place; print the calibration error before and after, and the command that serves it.

    Raises:
        ValueError: a wrong argument, a head of another target, or unusable data, before anything is measured.
    """
    config = ExitHeadConfig.load(args.head)
    check_writable(args.head, FILE_BYTES, "head")
    if args.json:
        check_writable(Path(args.json).parent, FILE_BYTES, "json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with progress(f"loading {args.model}"):
        target = load_target(args.model, config.exit_layer, device.type, config.aux_layers)
        head = load_head(target, args.head).to(device)
        place(target, device, room_for_weights(device))
    check_seq_len(target.config, args.seq_len)
    if args.seq_len < 2 * LONGEST_DRAFT:
        raise ValueError(f"seq_len is {args.seq_len}, must be at least {2 * LONGEST_DRAFT}")
    if args.windows < 2:
        raise ValueError(f"windows is {args.windows}, must be at least 2: one to fit, one to measure the error on")
    with progress("reading text"):
        corpus = read_files(args.model, target.config, args.data, args.seq_len, read_chat_template(args.chat_template))
    rounds = all_rounds(draft_rounds(target, head, *text) for text in own_texts(target, corpus, args))
    before, after = calibration_errors(rounds)
    calibration, prior = count(rounds), fit_prior(rounds)
    noise = torch.Generator(device).manual_seed(0)
    for text in own_texts(target, corpus, args, DRAWN_TEMPERATURE):
        count_sampled(calibration, target, head, *text, noise)
    _write(calibration, Path(args.head) / FILE_NAME)
    config.model_copy(update={"prior": prior}).save(args.head)
    rates, drawn_rates, shared_noise_rates = calibration.position_rates[:, :LONGEST_DRAFT].round(4).tolist()
    outcome = {
        "head": str(args.head),
        "rounds": len(rounds.num_accepted),
        "ece_before": before,
        "ece_after": after,
        "prior": prior.model_dump(),
        "acceptance_per_position": rates,
        "drawn_acceptance_per_position": drawn_rates,
        "shared_noise_acceptance_per_position": shared_noise_rates,
        "next": serve_command(args.model, args.head),
    }
    if args.json:
        write_json(args.json, outcome)
    _report(outcome, calibration.bin_rates[SHARED_NOISE].tolist())
    return 0


def _report(outcome: dict[str, Any], by_margin: list[float]) -> None:
    """Print what a calibration found.

    Args:
        outcome: as written to `--json`.
        by_margin: acceptance of drafts verified by shared noise, by the bin of their margin.
    """
    errors, prior = (outcome["ece_before"], outcome["ece_after"]), outcome["prior"]
    print("calibration error on rounds not fitted to: {:.4f} raw confidence, {:.4f} calibrated".format(*errors))
    print(f"acceptance per position, given the ones before: {_shown(outcome['acceptance_per_position'])}")
    print(f"of drafts drawn at temperature {DRAWN_TEMPERATURE}: {_shown(outcome['drawn_acceptance_per_position'])}")
    shared = _shown(outcome["shared_noise_acceptance_per_position"])
    print(f"of drafts drawn by shared noise, as of requests with a seed: {shared}")
    print(f"of these, by margin from small to large: {_shown(by_margin)}")
    print(f"wrote {Path(outcome['head']) / FILE_NAME}; prior alpha {prior['alpha']}, beta {prior['beta']}")
    print(f"next: {outcome['next']}")


def own_texts(
    target: Target, corpus: Corpus, args: argparse.Namespace, temperature: float = 0.0
) -> list[tuple[Tensor, int]]:
    """Return (windows that the target wrote, where the first round begins): of texts, and of each conversation one.

    Raises:
        ValueError: there is too little text, or no answer as long as a draft.
    """
    texts, count = [], -(-args.windows // 2) if corpus.text and corpus.messages else args.windows
    if corpus.text:
        text = long_enough(corpus.text, args.seq_len, "data")
        windows, prompt_len = own_held_out(target, text, count, args.seq_len, temperature)
        texts.append((windows, prompt_len - 1))
    if corpus.messages:
        tokenizer, template = AutoTokenizer.from_pretrained(args.model), read_chat_template(args.chat_template)
        longest = (getattr(target.config, "max_position_embeddings", None) or DEFAULT_LONGEST) - args.seq_len
        prompts = answer_prompts(tokenizer, corpus.messages, count, longest, template)
        ends = ways_of(args.model, target.config, tokenizer).ends
        with telling(lambda: f"answering {len(prompts)} user turns at temperature {temperature:g}"):
            said = answered(target, prompts, args.seq_len, temperature, ends, seed=0)
        texts += map(answer_window, long_answers(said))
    if not texts:
        raise ValueError(f"data: the target answers all with fewer than {LONGEST_DRAFT} tokens; name other files")
    return texts


def all_rounds(parts: Iterable[Rounds]) -> Rounds:
    """Return the rounds of several texts; windows go on counting."""
    parts = list(parts)
    begins = np.cumsum([0, *(part.window.max(initial=-1) + 1 for part in parts[:-1])])
    return Rounds(
        np.concatenate([part.confidences for part in parts]),
        np.concatenate([part.num_accepted for part in parts]),
        np.concatenate([part.window + begin for part, begin in zip(parts, begins, strict=True)]),
    )


def _write(calibration: Calibration, path: Path) -> None:
    """Write the positions that a draft of training has."""
    state = calibration.state()
    write_json(path, {name: table if name == "edges" else table[:LONGEST_DRAFT] for name, table in state.items()})


def _shown_passes(
    doing: str, target: Target, head: nn.Module, windows: Tensor, first: int
) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
    """Yield what `draft_passes` does and show how many windows are done."""
    begun = 0
    with progress(doing, len(windows), "windows") as count:
        for passed in draft_passes(target, head, windows, first):
            rows = passed[0]
            count(max(0, rows.start - begun))
            begun = max(begun, rows.start)
            yield passed


def _shown(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


@torch.no_grad()
def draft_rounds(target: Target, head: nn.Module, windows: Tensor, first: int) -> Rounds:
    """Return one round from every position of the windows with enough text after it, teacher-forced.

    Args:
        windows: [num_windows, seq_len] int64, from position `first` + 1 on the target's own greedy choices.
        first: where the first round begins.
    """
    confidences, accepted, window = [], [], []
    depth = min(LONGEST_DRAFT, windows.shape[1] - first)
    for rows, target_logits, draft_logits, start in _shown_passes("drafting", target, head, windows, first):
        num_rounds = (windows.shape[1] - start) // depth
        drafted = slice(start, start + num_rounds * depth)
        best = draft_logits[:, drafted].softmax(-1).max(-1)
        match = best.indices == target_logits[:, drafted].argmax(-1)
        confidences.append(best.values.reshape(-1, depth).cpu())
        accepted.append(match.reshape(-1, depth).long().cumprod(-1).sum(-1).cpu())
        window.append(torch.arange(rows.start, rows.stop).repeat_interleave(num_rounds))
    # Rounding may take a probability above 1.
    return Rounds(
        torch.cat(confidences).clamp(max=1).numpy().astype(np.float32),
        torch.cat(accepted).numpy(),
        torch.cat(window).numpy(),
    )


@torch.no_grad()
def count_sampled(
    calibration: Calibration, target: Target, head: nn.Module, windows: Tensor, first: int, noise: torch.Generator
) -> None:
    """Count rounds from every position of sampled windows: drawn drafts, and such as are verified by shared noise.

    Args:
        windows, first: see `draft_rounds`; sampled at `DRAWN_TEMPERATURE`.
        noise: of the device; what it draws is shared.
    """
    depth = min(LONGEST_DRAFT, windows.shape[1] - first)
    for rows, target_logits, draft_logits, start in _shown_passes("drawing drafts", target, head, windows, first):
        drafted = slice(start, start + (windows.shape[1] - start) // depth * depth)
        p, q = ((logits / DRAWN_TEMPERATURE).log_softmax(-1) for logits in (target_logits, draft_logits))
        after_all = torch.multinomial(p[:, -1].exp(), 1, generator=noise)
        text = torch.cat([windows[rows, 1:].to(p.device), after_all], dim=1)[:, drafted]
        p, q, confidence = p[:, drafted], q[:, drafted], draft_logits[:, drafted].softmax(-1).amax(-1)
        _count_rounds(calibration, DRAWN, confidence, torch.minimum(p.exp(), q.exp()).sum(-1), depth)
        largest = (q + noise_of(p, text, noise)).topk(2, dim=-1)
        margin = largest.values[..., 0] - largest.values[..., 1]
        _count_rounds(
            calibration, SHARED_NOISE, -torch.expm1(-margin), (largest.indices[..., 0] == text).float(), depth
        )


def noise_of(p: Tensor, text: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gumbel noise with which log p is largest at the text's tokens, [..., vocab_size].

    Given which one it is, the largest score is Gumbel noise itself, and the others are what they were, cut off there.

    Args:
        p: [..., vocab_size], logarithms of probabilities.
        text: [...] int64.
    Source: Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014, section 3.
    """

    def gumbel(*shape: int) -> Tensor:
        drawn = torch.empty(shape, device=p.device).exponential_(generator=generator)
        return -drawn.clamp(min=torch.finfo(torch.float32).tiny).log()

    largest = gumbel(*text.shape)[..., None]
    scores = -torch.logaddexp(-largest, -(p + gumbel(*p.shape)))
    return scores.scatter(-1, text[..., None], largest) - p


def _count_rounds(calibration: Calibration, kind: int, confidence: Tensor, chance: Tensor, depth: int) -> None:
    """Count rounds of `depth` tokens that follow each other, [num_windows, num_rounds * depth], at their chances."""
    reached = chance.reshape(-1, depth).clamp(max=1).cumprod(-1)
    judged = torch.cat([torch.ones_like(reached[:, :1]), reached[:, :-1]], dim=1)
    positions = np.broadcast_to(np.arange(depth), reached.shape)
    flat = (values.cpu().numpy().ravel() for values in (confidence, judged, reached))
    calibration.count(kind, positions.ravel(), *flat)


def count(rounds: Rounds) -> Calibration:
    """Return the table of these rounds, ready to be asked."""
    counted = Calibration()
    num_rounds, depth = rounds.confidences.shape
    counted.observe(rounds.confidences, np.full(num_rounds, depth), rounds.num_accepted)
    ready = Calibration()
    ready.restore(counted.state())
    return ready


def calibration_errors(rounds: Rounds) -> tuple[float, float]:
    """Return the expected calibration error of raw confidences and of calibrated ones.

    The table is counted on every other window and the error measured on the rest.
    """
    fitted = count(rounds.of(rounds.window % 2 == 0))
    confidence, position, accepted = rounds.of(rounds.window % 2 == 1).judged()
    calibrated = np.empty(len(confidence))
    for where in np.unique(position):
        calibrated[position == where] = fitted.acceptance(confidence[position == where], int(where))
    return expected_calibration_error(confidence, accepted), expected_calibration_error(calibrated, accepted)


def expected_calibration_error(predicted: np.ndarray, accepted: np.ndarray) -> float:
    """Return the mean gap between predicted and observed acceptance of a bin, weighted by how often it occurs.

    Source: arXiv 1706.04599, section 2.
    """
    bins = np.searchsorted(EDGES, predicted, side="right")
    gaps = np.bincount(bins, predicted) - np.bincount(bins, accepted)
    return float(np.abs(gaps).sum() / max(1, len(predicted)))


def fit_prior(rounds: Rounds) -> Prior:
    """Return the Beta distribution that a window's acceptance rate is drawn from, by its first two moments.

    Windows count alike: pooled, those of high acceptance would weigh more, as they have more judged tokens. A window's
    observed rate over n tokens varies by m (1 - m) (rho + (1 - rho) / n), where m is the mean and
    rho = 1 / (alpha + beta + 1).
    """
    longest = rounds.confidences.shape[1]
    accepted = np.bincount(rounds.window, rounds.num_accepted)
    judged = np.bincount(rounds.window, np.minimum(rounds.num_accepted + 1, longest))
    accepted, judged = accepted[judged > 0], judged[judged > 0]
    rates, chance = accepted / judged, float((1 / judged).mean())
    mean = float(np.clip(rates.mean(), *RATE_RANGE))
    rho = (rates.var() / (mean * (1 - mean)) - chance) / max(1 - chance, 1e-9)
    concentration = float(np.clip(1 / rho - 1 if rho > 0 else np.inf, MIN_CONCENTRATION, MAX_CONCENTRATION))
    return Prior(alpha=round(mean * concentration, 3), beta=round((1 - mean) * concentration, 3))
