"""What the soak asks: greedy cases whose answers plain vLLM gave, sampled ones, and ones that must be refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts"
#: Options that leave a greedy answer a function of the prompt alone; several may be drawn together.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"ignore_eos": True},
    {"presence_penalty": 0.7},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"stop": ["\n\n", "return"]},
    {"min_tokens": 12, "stop": ["\n"]},
    {"logprobs": 3},
    {"logit_bias": {"5": 3.0, "300": 4.0}},
    {"bad_words": ["self", " return x"]},
    {"allowed_token_ids": list(range(4, 3000))},
    {"structured_outputs": {"regex": "(a|b|c){3,20}"}},
    {"structured_outputs": {"choice": ["yes", "no", "undecided"]}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
)
LENGTHS = (1, 2, 3, 8, 24, 64, 160)
#: Wishes of a request about its own drafts: they change its speed, never its answer.
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"eesd_enabled": "false"},
    {"eesd_max_draft_tokens": 2},
)
#: Refused with status 400, whatever else is going on.
REFUSED: tuple[dict[str, Any], ...] = (
    {"vllm_xargs": {"eesd_policy": "fixed"}},
    {"vllm_xargs": {"eesd_max_draft_tokens": 10**9}},
    {"vllm_xargs": {"eesd_depth": 3}},
    {"max_tokens": -3},
)


def prompts() -> list[str]:
    texts = []
    for name in ("held_out_code.jsonl", "repetitive_code.jsonl"):
        lines = (PROMPTS / name).read_text(encoding="utf-8").split("\n")
        texts += [json.loads(line)["prompt"] for line in lines if line]
    return texts


def greedy_cases(count: int, generator: random.Random) -> list[dict[str, Any]]:
    """Return different request bodies, answered greedily."""
    texts = prompts()
    cases = []
    for number in range(count):
        options = OPTIONS[number % len(OPTIONS)]
        max_tokens = max(generator.choice(LENGTHS), options.get("min_tokens", 1))
        cases.append({"prompt": generator.choice(texts), "temperature": 0, "max_tokens": max_tokens} | options)
    return cases


def sampled(case: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return a case that samples."""
    drawn = {"temperature": generator.choice((0.3, 0.8, 1.5)), "top_p": generator.choice((1.0, 0.9))}
    drawn |= {"top_k": generator.choice((0, 20)), "n": generator.choice((1, 1, 2))}
    drawn["min_p"] = generator.choice((0.0, 0.0, 0.1))
    if generator.random() < 0.5:
        drawn["seed"] = generator.randrange(1000)
    return case | drawn


def answer_of(response: dict[str, Any]) -> dict[str, Any]:
    """Return what must equal plain vLLM's answer.

    Raises:
        RuntimeError: the server refused.
    """
    if "choices" not in response:
        raise RuntimeError(f"the server answered {response}")
    (choice,) = response["choices"]
    logprobs = choice.get("logprobs") or {}
    return {
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "tokens": response["usage"]["completion_tokens"],
        "logprob_tokens": logprobs.get("tokens"),
    }
