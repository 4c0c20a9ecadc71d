"""Compare greedy output with and without EESD, token for token, and say which differences are near-ties.

    python benchmarks/gpu/lossless.py --dtype bfloat16 --json build/gpu/lossless.json

In bfloat16 the target's own two best logits are often closer than its rounding, and a batch of another shape decides
them differently: plain vLLM differs from itself in the same way. A difference counts against EESD only where plain
vLLM's margin was larger than that. Exit status 1 if there is one; in float32 if there is any difference at all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

#: Two bfloat16 roundings (2^-8 relative each) of logits around 10.
NEAR_TIE_MARGIN = 0.08
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


def compare(plain: list, eesd: list) -> dict:
    """Return counts: prompts, tokens up to the first difference, differences, and those that are near-ties."""
    tokens = differences = near_ties = 0
    for expected, found in zip(plain, eesd, strict=True):
        pairs = zip(expected, found, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        tokens += len(expected) if at is None else at
        if at is not None:
            differences += 1
            near_ties += expected[at][1] < NEAR_TIE_MARGIN
    return {"prompts": len(plain), "equal_tokens": tokens, "differences": differences, "near_ties": near_ties}


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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    result = compare(generate(options, None), generate(options, {"method": "eesd"}))
    result |= {"dtype": options.dtype, "model": options.model, "near_tie_margin": NEAR_TIE_MARGIN}
    print(json.dumps(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    excused = 0 if options.dtype == "float32" else result["near_ties"]
    return int(result["differences"] > excused)


if __name__ == "__main__":
    raise SystemExit(main())
