"""Write the other workloads beside models/prompts/held_out_code.jsonl, all made of what is there.

    python models/make/make_workloads.py

`repetitive_code.jsonl`: each held-out prompt, then the beginning of a copy of it with one name changed, as an editor
sends it when code is copied and adapted. `random_tokens.jsonl`: uniformly random token ids, decoded: nothing to
predict, the worst case for drafting; greedy, a small model soon repeats itself after them, so measure it at a
temperature. `multi_turn.jsonl`: conversations of requests and code replies that end where the next reply starts.
`long_context.jsonl`: as much held-out code as the embedded model's positions leave room for, 64 new tokens kept free;
not 4096 tokens, because it has 2048 positions (and it learned on texts of 512, so nothing is claimed about how well
it writes there). `mixed.jsonl`: held-out, repetitive and random prompts in turn.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

PROMPTS = Path(__file__).resolve().parents[2] / "models" / "prompts"
#: Share of the copy that the prompt already holds: the model has to see that it is one.
SHOWN = 0.3
RANDOM_TOKENS = 64
#: Long prompts take eight times the room of the others in the repository, so there are few of them.
LONG_COUNT, LONG_TOKENS = 8, 1920
NAME = re.compile(r"\b[a-z_]{4,}\b")
DEFINED = re.compile(r"^\s*(?:async def|def|class) (\w+)", re.MULTILINE)


def frequent_name(code: str) -> str:
    """Return the code's most frequent longer name."""
    names = NAME.findall(code)
    return max(sorted(set(names)), key=names.count)


def renamed(code: str, name: str) -> str:
    """Return the code with the name changed throughout."""
    return re.sub(rf"\b{name}\b", f"{name}_copy", code)


def copied_with_changes(prompt: str) -> str:
    """Return the prompt and the first lines of its copy, its most frequent longer name changed throughout."""
    copy = renamed(prompt, frequent_name(prompt)).splitlines()
    shown = copy[: max(1, round(len(copy) * SHOWN))]
    return prompt.rstrip("\n") + "\n\n\n" + "\n".join(shown) + "\n"


def conversation(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    """Return a prompt of four turns: show code, rename in it, show other code, rename in that; the last is unanswered.

    Requests are comments, as the embedded model completes Python and knows no other format of a conversation.
    """
    turns = []
    for piece in (first, second):
        code, name = piece["prompt"].rstrip("\n"), frequent_name(piece["prompt"])
        defined = DEFINED.search(code)
        of = f"`{defined.group(1)}` of " if defined else ""
        turns += [f"# Show me {of}{piece['source'].split(':')[0]}.", code]
        turns += [f"# Now call `{name}` in it `{name}_copy`.", renamed(code, name)]
    return {"prompt": "\n\n".join(turns[:-1]) + "\n\n", "source": f"{first['source']}, {second['source']}"}


def long_context(pieces: list[dict[str, str]], num_tokens: Callable[[str], int]) -> dict[str, str]:
    """Return the last lines of the pieces, joined, that are at most LONG_TOKENS tokens long.

    Raises:
        ValueError: the pieces together are shorter.
    """
    lines = "\n\n\n".join(piece["prompt"].rstrip("\n") for piece in pieces).split("\n")
    if num_tokens("\n".join(lines)) <= LONG_TOKENS:
        raise ValueError(f"the held-out prompts are too few to fill {LONG_TOKENS} tokens")
    low, high = 0, len(lines) - 1  # from `high` on it fits, from `low` on it does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if num_tokens("\n".join(lines[middle:])) <= LONG_TOKENS else (middle, high)
    return {"prompt": "\n".join(lines[high:]), "source": f"held-out code, ending with {pieces[-1]['source']}"}


def make_workloads(held_out: list[dict[str, str]], count: int, tokenizer: Any) -> dict[str, list[dict[str, str]]]:
    """Return the prompts of every workload by its name; the same for the same held-out prompts.

    Args:
        held_out: at least twice `count`.
        count: prompts of a workload, but for the long ones.
        tokenizer: the target's.
    """
    chosen = held_out[:count]
    repetitive = [p | {"prompt": copied_with_changes(p["prompt"])} for p in chosen]
    ids = np.random.default_rng(0).integers(len(tokenizer), size=(count, RANDOM_TOKENS))
    random = [{"prompt": tokenizer.decode(row), "source": "random token ids, seed 0"} for row in ids.tolist()]

    def num_tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    return {
        "repetitive_code": repetitive,
        "random_tokens": random,
        "multi_turn": [conversation(*pair) for pair in zip(chosen, held_out[count : 2 * count], strict=True)],
        # Every one ends with another piece; the pieces before it are the rest in the file's order.
        "long_context": [long_context(held_out[n + 1 :] + held_out[: n + 1], num_tokens) for n in range(LONG_COUNT)],
        "mixed": [p for three in zip(chosen, repetitive, random, strict=True) for p in three],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=str(PROMPTS.parent / "eesd-code-10m"))
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    lines = (PROMPTS / "held_out_code.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for name, prompts in make_workloads([json.loads(line) for line in lines], args.count, tokenizer).items():
        path = PROMPTS / f"{name}.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
