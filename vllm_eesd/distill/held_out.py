"""What a head is measured on: windows of text, or the target's answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.conversations import Conversation, Message, read_chat_template
from vllm_eesd.distill.answers import answer_prompts, answered, ways_of
from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.data import as_source, long_enough, spaced_windows
from vllm_eesd.distill.generate import own_held_out
from vllm_eesd.distill.material import DEFAULT_LONGEST, Material, OwnTalks
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.rows import Rows
from vllm_eesd.distill.target import Target
from vllm_eesd.progress import telling

# Prompts whose answers are measured on at most, and the longest answer.
HELD_OUT_ANSWERS, HELD_OUT_ANSWER_TOKENS = 32, 256

# Windows and the first position measured, or conversations that end with an answer of the target's.
Measured = tuple[Tensor, int] | list[Conversation]
# Name of a text -> what of it is measured on.
HeldOut = dict[str, Measured]


def held_out_of(
    config: DistillConfig, target: Target, material: Material, own_talks: OwnTalks | None, count: int
) -> HeldOut:
    """Return what is measured on: text, and the target's greedy text if asked for or trained on.

    Args:
        count: windows that measuring has time for, or answers.
    Raises:
        ValueError: there is too little of it.
    """
    held_out: HeldOut = {}
    talks = material.held_out_talks
    text = material.held_out + ([] if own_talks else as_source(talks.conversations))
    if text:
        held_out["text"] = (
            spaced_windows(long_enough(text, config.seq_len, "held_out"), count, config.seq_len),
            0,
        )
    if messages := talks.messages or (own_talks.held_out() if own_talks else []):
        if answers := _held_out_answers(config, target, messages, min(count, HELD_OUT_ANSWERS)):
            held_out["greedy"] = answers
    elif config.self_generate or config.measure_greedy:
        windows, first = own_held_out(target, text, count, config.seq_len)
        # The last prompt position is the first whose next token the target chose.
        held_out["greedy"] = (windows, first - 1)
    if not held_out:
        raise ValueError("held_out: the target answers all of it with fewer tokens than a draft has; name other files")
    return held_out


def _held_out_answers(
    config: DistillConfig, target: Target, messages: list[list[Message]], count: int
) -> list[Conversation]:
    """Return held-out conversations up to a user turn, answered greedily."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokens = min(config.answer_tokens, HELD_OUT_ANSWER_TOKENS)
    longest = getattr(target.config, "max_position_embeddings", None) or DEFAULT_LONGEST
    template = read_chat_template(config.chat_template)
    prompts = answer_prompts(tokenizer, messages, count, longest - tokens, template)
    with telling(lambda: f"answering {len(prompts)} held-out user turns"):
        ends = ways_of(config.model, target.config, tokenizer).ends
        return long_answers(answered(target, prompts, tokens, 0.0, ends, config.seed))


def long_answers(conversations: list[Conversation]) -> list[Conversation]:
    """Return those whose answer is as long as a draft."""
    return [said for said in conversations if said.answers.sum() >= LONGEST_DRAFT]


def answer_window(said: Conversation) -> tuple[Tensor, int]:
    """Return (the conversation as a window, [1, num_tokens] int64; its first position whose next token is answered)."""
    return torch.from_numpy(said.ids)[None], int(np.flatnonzero(said.answers)[0]) - 1


def measure(target: Target, head: nn.Module, held_out: Measured) -> dict[str, Any]:
    """Return what `evaluate` says of windows, or of answers."""
    if isinstance(held_out, tuple):
        return evaluate(target, head, *held_out)
    rows = Rows(held_out, max(len(said.ids) for said in held_out), answers_only=True)
    return evaluate(target, head, [rows.batch_of(np.array([row])) for row in range(len(held_out))])


def few(held_out: Measured, count: int) -> Measured:
    """Return the first windows or answers."""
    return (held_out[0][:count], held_out[1]) if isinstance(held_out, tuple) else held_out[:count]


def preferred(by_name: dict[str, Any]) -> Any:
    """Return that of the target's greedy text, which is what a served head meets, where there is one."""
    return by_name["greedy"] if "greedy" in by_name else by_name["text"]
