"""Write the other two workloads beside models/prompts/held_out_code.jsonl: repetitive code and random tokens.

    python benchmarks/make_workloads.py

`repetitive_code.jsonl`: each held-out prompt, then the beginning of a copy of it with one name changed, as an editor
sends it when code is copied and adapted. `random_tokens.jsonl`: uniformly random token ids, decoded: nothing to
predict, the worst case for drafting.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

PROMPTS = Path(__file__).resolve().parents[1] / "models" / "prompts"
#: Share of the copy that the prompt already holds: the model has to see that it is one.
SHOWN = 0.3
RANDOM_TOKENS = 64
NAME = re.compile(r"\b[a-z_]{4,}\b")


def copied_with_changes(prompt: str) -> str:
    """Return the prompt and the first lines of its copy, its most frequent longer name changed throughout."""
    names = NAME.findall(prompt)
    name = max(sorted(set(names)), key=names.count)
    copy = re.sub(rf"\b{name}\b", f"{name}_copy", prompt).splitlines()
    shown = copy[: max(1, round(len(copy) * SHOWN))]
    return prompt.rstrip("\n") + "\n\n\n" + "\n".join(shown) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", default=str(PROMPTS.parent / "eesd-code-10m"))
    parser.add_argument("--count", type=int, default=16)
    args = parser.parse_args()
    lines = (PROMPTS / "held_out_code.jsonl").read_text().splitlines()[: args.count]
    held_out = [json.loads(line) for line in lines]
    repetitive = [p | {"prompt": copied_with_changes(p["prompt"])} for p in held_out]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rng = np.random.default_rng(0)
    ids = rng.integers(len(tokenizer), size=(args.count, RANDOM_TOKENS))
    random = [{"prompt": tokenizer.decode(row), "source": "random token ids, seed 0"} for row in ids.tolist()]
    for name, prompts in (("repetitive_code", repetitive), ("random_tokens", random)):
        path = PROMPTS / f"{name}.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
