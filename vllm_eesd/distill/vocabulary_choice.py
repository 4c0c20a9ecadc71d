"""`--draft-vocab auto`: how many tokens a run's head drafts from, measured before it trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

from torch import Tensor

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.expected import (
    choose_vocabulary,
    closing,
    describe,
    lm_head_dominates,
    most_alike,
    num_parameters,
)
from vllm_eesd.distill.layer_costs import VocabularyChoice, measure_costs
from vllm_eesd.distill.probe import headless_agreement
from vllm_eesd.distill.report import write_json
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vocabulary import coverage, end_tokens, own_text

#: In `work`: what was chosen, so that a resumed run, whose times differ, trains the same head.
KEPT_NAME = "draft_vocab.json"


def chosen_vocabulary(
    config: DistillConfig, target: Target, data: TokenData, windows: Tensor, work: Path
) -> tuple[int | str, str]:
    """Return (tokens to draft from or "all", a line that says why, "" where there was no choice).

    Chosen where the LM head has more parameters than the layers of a draft step.

    Args:
        config: whose `head_layers` is known.
        windows: [num_windows, seq_len] int64, to tell from how right the target's layer N already is.
        work: where the choice is kept.
    """
    if config.draft_vocab != "auto":
        return config.draft_vocab, ""
    dominates = lm_head_dominates(target, target.exit_layer, config.head_layers)
    if config.loss == "ce_text" or not dominates or not can_be_cut(target):
        return "all", ""
    kept = work / KEPT_NAME
    if kept.exists():
        size = json.loads(kept.read_text(encoding="utf-8"))["draft_vocab"]
        return size, f"draft vocabulary: {size}, as chosen when {work} was begun"
    choice = choice_of(config, target, data, windows)
    size = choice.size or "all"
    write_json(kept, {"draft_vocab": size})
    return size, f"draft vocabulary: {describe(choice, target.config.vocab_size)}"


def can_be_cut(target: Target) -> bool:
    """Return whether an engine can gather rows of the target's LM head: a quantised target's may be packed away."""
    return target.lm_head.bias is None and getattr(target.config, "quantization_config", None) is None


def choice_of(config: DistillConfig, target: Target, data: TokenData, windows: Tensor) -> VocabularyChoice:
    """Return what pays best by this machine's times, this text's coverage and what such heads are right about."""
    tokens = config.last_step * config.batch * config.seq_len
    like = most_alike(num_parameters(target) / 1e6, tokens / 1e6 if math.isfinite(tokens) else None)
    ((agreement, _, _),) = headless_agreement(target, windows, only=target.exit_layer)
    covered = coverage(own_text(data), target.config.vocab_size, end_tokens(target.config))
    costs = measure_costs(target, LONGEST_DRAFT)
    return choose_vocabulary(covered, closing(like.gap_closed, agreement), costs, target.exit_layer, config.head_layers)
