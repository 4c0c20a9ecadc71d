"""What a head that is not trained yet is expected to be right about, and what drafting with it would then be worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import nn

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.layer_costs import ROWS_MULTIPLE, LayerCosts, VocabularyChoice
from vllm_eesd.distill.target import Target

#: A draft vocabulary that is expected to win less keeps out tokens for nothing.
WORTH_A_VOCABULARY = 1.02


@dataclass(frozen=True)
class MeasuredHead:
    """A trained head that was measured: how much of what its layer gets wrong headless it gets right.

    Attributes:
        target: name of the target.
        parameters: of the target, millions.
        exit_layer, head_layers: N and M.
        tokens: that the head has seen, millions.
        headless: agreement at layer N with the target's final norm, held out.
        agreement: of the head, held out.
    """

    target: str
    parameters: float
    exit_layer: int
    head_layers: int
    tokens: float
    headless: float
    agreement: float

    @property
    def gap_closed(self) -> float:
        """Share of what is missing to an agreement of 1."""
        return (self.agreement - self.headless) / (1 - self.headless)

    def __str__(self) -> str:
        return f"{self.target} (N={self.exit_layer}, M={self.head_layers}) after {self.tokens:.3g} M tokens"


#: One line a head; agreement on text that neither was trained on. Both are small models: a guide to where to start.
MEASURED = (
    MeasuredHead("the embedded model", 10, exit_layer=2, head_layers=1, tokens=15, headless=0.186, agreement=0.583),
    MeasuredHead(
        "SmolLM2-135M-Instruct", 135, exit_layer=2, head_layers=2, tokens=1.77, headless=0.054, agreement=0.44
    ),
)


def most_alike(parameters: float, tokens: float | None = None) -> MeasuredHead:
    """Return the head of the measured target that is nearest in size; of its heads the one nearest in tokens.

    Args:
        parameters: of the target to expect something of, millions.
        tokens: that its head will see, millions; None: the most that were measured.
    """

    def distance(head: MeasuredHead) -> tuple[float, float]:
        size = abs(math.log(head.parameters / parameters))
        return size, -head.tokens if tokens is None else abs(math.log(head.tokens / tokens))

    return min(MEASURED, key=distance)


def gaps_closed() -> tuple[float, float]:
    """Return the lowest and the highest share of the gap that a measured head closed."""
    shares = [head.gap_closed for head in MEASURED]
    return min(shares), max(shares)


def closing(gap: float, accepted: float) -> float:
    """Return what is accepted of a head that gets so much of the gap right, where headless so much is.

    Args:
        gap: share of what is missing to 1.
    """
    return accepted + gap * (1 - accepted)


def best_speedup(leading: list[float], draft_ms: float, verify_ms: list[float]) -> tuple[float, int]:
    """Return (speedup over plain decoding, draft length) of the best fixed draft length; 1.0 at 0 if none pays.

    Args:
        leading: probability that the first i + 1 drafts are all accepted.
        draft_ms: one draft step.
        verify_ms: the target's forward over i + 1 tokens.
    """
    return max((1.0, 0), drafting_speedup(leading, draft_ms, verify_ms))


def drafting_speedup(leading: list[float], draft_ms: float, verify_ms: list[float]) -> tuple[float, int]:
    """Return the same of the best draft length that is not 0, whether it pays or not."""
    tokens = 1 + np.cumsum(leading)
    lengths = np.arange(1, len(leading) + 1)
    speedups = tokens * verify_ms[0] / (lengths * draft_ms + np.array(verify_ms)[lengths])
    best = int(speedups.argmax())
    return float(speedups[best]), best + 1


def leading_of(accepted: float, longest: int = LONGEST_DRAFT) -> list[float]:
    """Return the probability that the first i + 1 drafts are all accepted, each as likely as the others."""
    return [accepted ** (i + 1) for i in range(longest)]


def lm_head_dominates(target: Target, exit_layer: int, head_layers: int) -> bool:
    """Return whether the LM head has more parameters than the N + M layers of a draft step."""
    layers = target.model.model.layers
    drafting = sum(map(num_parameters, layers[:exit_layer])) + head_layers * num_parameters(layers[-1])
    return target.config.vocab_size * target.config.hidden_size > drafting


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers a module's weights are."""
    return sum(parameter.numel() for parameter in module.parameters())


def choose_vocabulary(
    coverage: np.ndarray,
    accepted: float,
    costs: LayerCosts,
    exit_layer: int,
    head_layers: int,
    longest: int = LONGEST_DRAFT,
) -> VocabularyChoice:
    """Return how many of the most frequent tokens to draft from so that most tokens are expected per ms.

    A token beyond them is never drafted, so a draft is right as often as the head would be times their coverage. Sizes
    are compared by the best draft length above 0 also where none pays: a head that is trained all the same should draft
    as cheaply as it can.

    Args:
        coverage: [vocab_size + 1], see `vocabulary.coverage`.
        accepted: probability that a draft from the whole vocabulary is.
        longest: drafts a round.
    """
    vocab_size = len(coverage) - 1
    whole_ms = costs.draft_ms(exit_layer, head_layers)

    def speedup(size: int | None) -> tuple[float, int, int | None]:
        covered = 1.0 if size is None else float(coverage[size])
        draft_ms = costs.draft_ms(exit_layer, head_layers, size)
        return *drafting_speedup(leading_of(accepted * covered, longest), draft_ms, costs.verify_ms), size

    whole, whole_tokens, _ = speedup(None)
    sizes = range(ROWS_MULTIPLE, vocab_size, ROWS_MULTIPLE)
    best, tokens, size = max(map(speedup, sizes), key=lambda found: found[0], default=(whole, whole_tokens, None))
    if best < WORTH_A_VOCABULARY * whole:
        best, tokens, size = whole, whole_tokens, None
    return VocabularyChoice(
        size,
        1.0 if size is None else float(coverage[size]),
        min(1.0, costs.lm_head(None) / whole_ms),
        costs.draft_ms(exit_layer, head_layers, size),
        whole_ms,
        max(1.0, best),
        max(1.0, whole),
        tokens if best > 1 else 0,
    )


def describe(choice: VocabularyChoice, vocab_size: int) -> str:
    """Return in one line what the LM head costs a draft and what a draft vocabulary would make of it."""
    if choice.size is None:
        words = f"no smaller draft vocabulary is expected to win {WORTH_A_VOCABULARY - 1:.0%}"
    else:
        words = (
            f"with {choice.size} of {vocab_size} draft tokens ({choice.coverage:.1%} of the text) a step takes "
            f"{choice.draft_ms:.2f} ms instead of {choice.whole_draft_ms:.2f}, predicted {choice.speedup:.2f}x instead "
            f"of {choice.whole_speedup:.2f}x"
        )
    return f"the LM head is {choice.lm_head_share:.0%} of a draft step: {words}"
