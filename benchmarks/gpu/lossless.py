"""Compare greedy output with and without EESD, token for token, and say which differences are near-ties.

    python benchmarks/gpu/lossless.py --dtype bfloat16 --json build/gpu/lossless.json
    python benchmarks/gpu/lossless.py --dtype bfloat16 --control      # plain vLLM against itself

The target's own two best logits are now and then closer than its rounding, and a batch of another shape decides them
differently: plain vLLM differs from itself in the same way. A difference counts against EESD only where plain vLLM's
margin was larger than that. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

import torch

from vllm_eesd.provenance import provenance

#: Two roundings of logits around 10, each 2^-8 of them in bfloat16 and 2^-11 in float16. vLLM's attention multiplies
#: float32 on a GPU as TF32, with 2^-11 too; on a CPU nothing excuses a difference in float32.
NEAR_TIE_MARGINS = {"bfloat16": 0.08, "float16": 0.01, "float32": 0.01 if torch.cuda.is_available() else 0.0}
#: Requests at a time of `--control`.
CONTROL_BATCH = 3
ROOT = Path(__file__).resolve().parents[2]


def generate(options: argparse.Namespace, spec: dict | None) -> list[list[tuple[int, float]]]:
    """Return, per prompt, the tokens with the margin between the two best log-probabilities."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    extra = options.engine | ({"speculative_config": spec} if spec else {})
    llm = LLM(
        options.model, dtype=options.dtype, max_model_len=1024, seed=0, distributed_executor_backend="uni", **extra
    )
    with open(options.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][: options.num_prompts]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True, logprobs=2)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        completion = output.outputs[0]
        margins = []
        for position in completion.logprobs:
            best = sorted((entry.logprob for entry in position.values()), reverse=True)
            margins.append(best[0] - best[1])
        found.append(list(zip(completion.token_ids, margins, strict=True)))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def compare(plain: list, eesd: list, near_tie: float) -> dict:
    """Return counts: prompts, tokens up to the first difference, differences, and those that are near-ties.

    Args:
        near_tie: margin between the two best log-probabilities below which either token is right.
    """
    tokens, margins = 0, []
    for expected, found in zip(plain, eesd, strict=True):
        pairs = zip(expected, found, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        tokens += len(expected) if at is None else at
        if at is not None:
            margins.append(round(expected[at][1], 5))
    near_ties = sum(margin < near_tie for margin in margins)
    found = {"prompts": len(plain), "equal_tokens": tokens, "differences": len(margins), "near_ties": near_ties}
    return found | {"near_tie_margin": near_tie, "margins": sorted(margins)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "eesd-code-10m"))
    parser.add_argument("--prompts", default=str(ROOT / "models" / "prompts" / "held_out_code.jsonl"))
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--engine", type=json.loads, default='{"gpu_memory_utilization": 0.3}', help="further arguments of vllm.LLM"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="compare plain vLLM with itself in small batches: differences without EESD",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    answers = [generate(options, None)]
    if options.control:
        options.engine = options.engine | {"max_num_seqs": CONTROL_BATCH}
    answers.append(generate(options, None if options.control else {"method": "eesd"}))
    result = compare(*answers, NEAR_TIE_MARGINS[options.dtype])
    result |= {"dtype": options.dtype, "model": options.model, **provenance()}
    print(json.dumps(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(result["differences"] > result["near_ties"])


if __name__ == "__main__":
    raise SystemExit(main())
