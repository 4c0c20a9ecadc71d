"""What the target says when it is asked: answers that end where it ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from vllm_eesd.conversations import Conversation, Message, prompt_ids
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vllm_sampler import VllmSampler
from vllm_eesd.distill.vocabulary import end_tokens

# Prompts that transformers answers at one time, padded to the longest.
AT_ONCE = 32


class Sampling(NamedTuple):
    """How a model samples unless a request says otherwise; top_k of 0 is all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Ways(NamedTuple):
    """What a target's generation_config says: how it samples, and the tokens that end what it says."""

    sampling: Sampling
    ends: list[int]


def ways_of(model: str, config: Any, tokenizer: Any) -> Ways:
    """Return how a target answers; the ends that its config and its tokenizer name are ends too."""
    try:
        said = GenerationConfig.from_pretrained(model).to_diff_dict()
    except (OSError, ValueError):
        said = {}
    ends = said.get("eos_token_id")
    ends = {*(ends if isinstance(ends, list) else [ends]), *end_tokens(config), tokenizer.eos_token_id}
    sampling = Sampling(said.get("temperature") or 1.0, said.get("top_p") or 1.0, said.get("top_k") or 0)
    return Ways(sampling, sorted(end for end in ends if isinstance(end, int) and end < config.vocab_size))


def answered(
    source: Target | VllmSampler,
    prompts: Sequence[list[int]],
    max_tokens: int,
    temperature: float,
    ends: Sequence[int],
    seed: int,
) -> list[Conversation]:
    """Return each prompt with the target's answer, which alone is marked as one.

    Args:
        max_tokens: of an answer; one that is longer ends there.
        temperature: 0 answers greedily.
        ends: tokens that end an answer, and belong to it.
    """
    said = answerer(source)(prompts, [temperature] * len(prompts), [max_tokens] * len(prompts), ends, seed)
    return [
        Conversation(np.array(prompt + new), np.arange(len(prompt) + len(new)) >= len(prompt))
        for prompt, new in zip(prompts, said, strict=True)
    ]


def answerer(source: Target | VllmSampler) -> Callable[..., list[list[int]]]:
    """Return `answer` without its first argument, by the target itself or an engine that runs it."""
    return source.answer if isinstance(source, VllmSampler) else partial(answer, source)


@torch.no_grad()
def answer(
    target: Target,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    limits: Sequence[int],
    ends: Sequence[int],
    seed: int,
    top_p: float = 1.0,
    top_k: int = 0,
    tell: Callable[[int], None] = lambda finished: None,
) -> list[list[int]]:
    """Return what the target says after each prompt, up to one of `ends`, which is included.

    Args:
        prompts: token ids, of any lengths from 1.
        temperatures: per prompt; 0 is greedy.
        limits: tokens it may say, per prompt, at least 1.
        seed: of the samples.
        top_p, top_k: of all prompts that are sampled; top_k of 0 is all tokens.
        tell: called with how many prompts are finished.
    """
    warpers = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    generator = torch.Generator(target.lm_head.weight.device).manual_seed(seed)
    said: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    for first in range(0, len(prompts), AT_ONCE):
        rows = by_length[first : first + AT_ONCE]
        scale = torch.tensor([temperatures[row] for row in rows])

        def choose(logits: Tensor, scale: Tensor) -> Tensor:
            sampled = warpers(None, logits / scale.clamp(min=1e-3)).softmax(-1).multinomial(1, generator=generator)
            return torch.where(scale > 0, sampled, logits.argmax(-1, keepdim=True))

        new = _answer_together(
            target, [prompts[row] for row in rows], scale, [limits[row] for row in rows], ends, choose
        )
        for row, tokens in zip(rows, new, strict=True):
            said[row] = tokens
        tell(first + len(rows))
    return said


def _answer_together(
    target: Target,
    prompts: list[list[int]],
    scale: Tensor,
    limits: list[int],
    ends: Sequence[int],
    choose: Callable[[Tensor, Tensor], Tensor],
) -> list[list[int]]:
    """Return what the target says after each prompt; prompts are padded on the left.

    Args:
        scale: [num_prompts], temperatures.
        choose: of logits [rows, vocab_size] and temperatures [rows, 1], the tokens [rows, 1].
    """
    device, longest = target.lm_head.weight.device, max(map(len, prompts))
    new = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    scale, cache = scale.to(device)[:, None], None
    said: list[list[int]] = [[] for _ in prompts]
    rows, going = list(range(len(prompts))), set(range(len(prompts)))
    while True:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        output = target.model(
            new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        new, cache = choose(output.logits[:, -1].float(), scale), output.past_key_values
        for row, token in zip(rows, new[:, 0].tolist(), strict=True):
            if row in going:
                said[row].append(token)
                if token in ends or len(said[row]) == limits[row]:
                    going.remove(row)
        if not going:
            return said
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        if 2 * len(going) <= len(rows):  # the others are not run any more
            kept = torch.tensor([place for place, row in enumerate(rows) if row in going], device=device)
            cache.batch_select_indices(kept)
            rows, new, mask, scale = [rows[place] for place in kept], new[kept], mask[kept], scale[kept]


def answer_prompts(
    tokenizer: Any, conversations: Sequence[list[Message]], count: int, longest: int, chat_template: str | None = None
) -> list[list[int]]:
    """Return at most `count` conversations up to where an answer begins, evenly spaced over all user turns.

    Args:
        longest: tokens of a prompt; longer ones are left out.
    Raises:
        ValueError: none is left.
    """
    turns = [messages[: place + 1] for messages in conversations for place in user_turns(messages)]
    kept = np.linspace(0, len(turns) - 1, min(count, len(turns))).astype(int)
    prompts = [prompt_ids(tokenizer, turns[turn], chat_template) for turn in kept]
    if not (fitting := [prompt for prompt in prompts if len(prompt) <= longest]):
        raise ValueError(f"data: {len(prompts)} user turns, none with at most {longest} tokens before its answer")
    return fitting


def user_turns(messages: Sequence[Message]) -> list[int]:
    """Return the places of the user's messages that are answered, or could be: of several in a row the last."""
    roles = [message["role"] for message in messages]
    return [place for place, role in enumerate(roles) if role == "user" and roles[place + 1 : place + 2] != ["user"]]
