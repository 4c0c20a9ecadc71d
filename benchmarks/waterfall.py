"""Where a step's time goes, for plain vLLM and for EESD, and how far EESD is from its ideal.

    python benchmarks/waterfall.py --json benchmarks/results/waterfall.json [--batch 1,8] [--tokens 96] [--rounds 2]

Both engines live in this process and take turns. Timers around the methods in `PIECES` each count the time that no
timer inside them counts, so the pieces of a step add up to it; what is spent between them is the "unnamed" piece.
Counted are steps in which the whole batch decodes, without those that took more than three times the median
(`waterfall_rows.OUTLIER`: the machine was busy with something else); how many those were is written too.

A round is one engine step and the drafting after it. Ideally it would cost what a plain step and its draft steps' own
forward passes cost, and emit as many tokens as it did. `ideal_speedup` is that; `efficiency`, measured /
ideal, is therefore the ideal round's time over the real one's, and the waterfall is the difference, piece by piece.

The engine runs in the caller's process: what vLLM's processes tell each other is not in these steps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from waterfall_rows import UNNAMED, compare, summary  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MODEL, PROMPTS = "models/eesd-code-10m", "models/prompts/held_out_code.jsonl"
#: Prompts of a batch size: so many, or so many batches of it; the tail of a batch, where fewer decode, is not counted.
MIN_PROMPTS, MIN_BATCHES = 8, 2
DRAFT_STEP = "vllm_eesd.host.model.draft_step:DraftStep.__call__"
STEP = "vllm.v1.engine.llm_engine:LLMEngine.step"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
UPDATE = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
#: Piece -> the methods whose own time it is. All must exist: a waterfall with a hole would blame the wrong piece.
PIECES = {
    "engine loop": [
        "vllm.v1.engine.core_client:InprocClient.get_output",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.sample_tokens",
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        _RUNNER + "execute_model",
        _RUNNER + "sample_tokens",
    ],
    "scheduler": [SCHEDULE, UPDATE, "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids"],
    "input preparation": [
        _RUNNER + name
        for name in (
            "_update_states",
            "_prepare_inputs",
            "_calc_spec_decode_metadata",
            "_determine_batch_execution_and_padding",
            "_get_slot_mappings",
            "_build_attention_metadata",
            "_preprocess",
        )
    ],
    "model forward": [_RUNNER + "_model_forward"],
    "LM head": ["vllm.model_executor.models.llama:LlamaForCausalLM.compute_logits"],
    "sampler and verification": [_RUNNER + "_sample"],
    "draft forward": [DRAFT_STEP],
    "draft preparation": [
        "vllm_eesd.host.v1.draft_rows:DraftRows.step",
        "vllm_eesd.host.v1.draft_rows:DraftRows.round",
        "vllm_eesd.host.v1.proposer:EarlyExitProposer.propose_round",
    ],
    "policy": [
        "vllm_eesd.round.draft:DraftRound.__init__",
        "vllm_eesd.round.draft:DraftRound.tell",
        "vllm_eesd.round.outcome:Learner.learn",
        "vllm_eesd.round.outcome:Learner.learn_times",
    ],
    "n-gram drafts": ["vllm_eesd.host.v1.proposer:EarlyExitProposer._find_ngrams"],
    "bookkeeping and output": [
        _RUNNER + "_bookkeeping_sync",
        _RUNNER + "_update_states_after_model_execute",
        _RUNNER + "take_draft_token_ids",
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "vllm_eesd.round.session:Session._count",
    ],
    UNNAMED: [STEP],
}


@dataclass
class Step:
    """One engine step: its time by piece, in ms, and what it was over."""

    pieces: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PIECES, 0.0))
    num_reqs: int = 0
    num_tokens: int = 0
    num_emitted: int = 0
    num_draft_steps: int = 0
    begins: bool = False

    @property
    def ms(self) -> float:
        return sum(self.pieces.values())


class Timers:
    """Times the pieces of steps, from `install` on; `take` returns the steps since the last call."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: list[Step] = []
        self._current: Step | None = None
        #: Time that timers inside the running ones counted, innermost last.
        self._inside: list[float] = []

    def install(self) -> None:
        """Wrap every method of `PIECES`.

        Raises:
            SystemExit: one of them is not there.
        """
        for piece, targets in PIECES.items():
            for target in targets:
                owner, name, function = locate(target)
                setattr(owner, name, self._timed(piece, target, function))

    def take(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def _timed(self, piece: str, target: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, inside = self._clock, self._inside

        def timed(*args: Any, **kwargs: Any) -> Any:
            if target == STEP:
                self._current = Step()
            elif self._current is None:  # outside a step: warm-up, requests coming in
                return function(*args, **kwargs)
            inside.append(0.0)
            began = clock()
            try:
                result = function(*args, **kwargs)
            finally:
                elapsed = clock() - began
                self._current.pieces[piece] += 1e3 * (elapsed - inside.pop())
                if inside:
                    inside[-1] += elapsed
            self._look(target, args, result)
            return result

        return timed

    def _look(self, target: str, args: tuple, result: Any) -> None:
        """Note what the step is over, from what goes into and comes out of the scheduler."""
        step = self._current
        if target == SCHEDULE:
            step.num_reqs, step.num_tokens = len(result.num_scheduled_tokens), result.total_num_scheduled_tokens
            step.begins = bool(result.scheduled_new_reqs)
        elif target == DRAFT_STEP:
            step.num_draft_steps += 1
        elif target == UPDATE:
            step.num_emitted = sum(map(len, args[2].sampled_token_ids))
        elif target == STEP:
            self._steps.append(step)
            self._current = None


def locate(target: str) -> tuple[Any, str, Callable[..., Any]]:
    """Return (class, attribute, function) of "package.module:Class.method".

    Raises:
        SystemExit: there is none.
    """
    module_name, _, qualified = target.partition(":")
    class_name, _, name = qualified.rpartition(".")
    try:
        owner = getattr(importlib.import_module(module_name), class_name)
        return owner, name, getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"waterfall: {target} is not there ({error}): PIECES must be brought up to date") from None


class Runner:
    """Two engines in this process, and the timers around them."""

    def __init__(self, model: str, prompts: list[list[int]], tokens: int, eager: bool) -> None:
        from vllm import LLM

        from vllm_eesd.bench.engines import EngineSettings, fit_max_model_len

        length = fit_max_model_len(None, max(map(len, prompts)), tokens)
        shared = {"dtype": "float32", "max_model_len": length, "enforce_eager": eager, "disable_log_stats": True}
        shared |= {"distributed_executor_backend": "uni"}
        self._prompts, self._tokens = prompts, tokens
        eesd = LLM(model, speculative_config=EngineSettings(model).eesd_config(), **shared)
        self._engines = {"plain": LLM(model, **shared), "idle": eesd, "eesd": eesd}
        # Now, because a timer that is there while a model is compiled would be compiled too.
        self._timers = Timers()
        self._timers.install()

    def generate(self, kind: str, batch: int) -> tuple[list[Step], list[list[int]]]:
        """Return the steps and the outputs of all prompts, `batch` at a time."""
        from vllm import SamplingParams, TokensPrompt

        engine, options = self._engines[kind], {"eesd_enabled": False} if kind == "idle" else None
        params = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True, extra_args=options)
        engine.reset_prefix_cache()
        self._timers.take()
        outputs, prompts = [], self._prompts[: prompts_for(batch)]
        for first in range(0, len(prompts), batch):
            some = [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts[first : first + batch]]
            done = engine.generate(some, params, use_tqdm=False)
            outputs += [list(output.outputs[0].token_ids) for output in done]
        return self._timers.take(), outputs


def measure(runner: Any, batch: int, rounds: int) -> dict[str, Any]:
    """Return `compare`'s row, after a warm-up; the three kinds take turns.

    Raises:
        SystemExit: EESD's output is not plain's; times of wrong output mean nothing.
    """
    kinds = ("plain", "idle", "eesd")
    expected = {kind: runner.generate(kind, batch)[1] for kind in kinds}["plain"]
    steps: dict[str, list[Step]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            some, outputs = runner.generate(kind, batch)
            if outputs != expected:
                raise SystemExit(f"waterfall: batch {batch}: the output of {kind} is not plain's")
            steps[kind] += some
    return compare(batch, *(summary(steps[kind], batch) for kind in kinds), layers_share())


def layers_share() -> float:
    """Return which part of the target's layers a draft step runs through: the first N and the head's."""
    target, head = (json.loads((ROOT / MODEL / name).read_text()) for name in ("config.json", "eesd/config.json"))
    return (head["exit_layer"] + head["head_layers"]) / target["num_hidden_layers"]


def prompts_for(batch: int) -> int:
    return max(MIN_PROMPTS, MIN_BATCHES * batch)


def read_prompts(model: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (ROOT / PROMPTS).read_text(encoding="utf-8").splitlines()[:count]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--batch", default="1,8", help="comma-separated (default 1,8)")
    parser.add_argument("--tokens", type=int, default=96, help="per prompt (default 96)")
    parser.add_argument("--rounds", type=int, default=2, help="counted passes (default 2)")
    parser.add_argument("--eager", action="store_true", help="compile nothing: quicker to start, other times")
    args = parser.parse_args()
    from vllm_eesd.bench.engines import prepare_environment
    from vllm_eesd.provenance import num_cores, provenance

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # As many as a worker process of vLLM's takes: it leaves a core to the scheduler.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() - 1)))
    prepare_environment(MODEL)
    os.chdir(ROOT)
    batches = list(map(int, args.batch.split(",")))
    runner = Runner(MODEL, read_prompts(MODEL, prompts_for(max(batches))), args.tokens, args.eager)
    rows = []
    for batch in batches:
        rows.append(measure(runner, batch, args.rounds) | {"prompts": prompts_for(batch)})
        told = {name: rows[-1][name] for name in ("measured_speedup", "ideal_speedup", "efficiency")}
        print(f"batch {batch}: {told}, explained {rows[-1]['plain']['explained']}, {rows[-1]['eesd']['explained']}")
    shared = {"model": MODEL, "tokens": args.tokens, "rounds": args.rounds} | provenance()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps([row | shared for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
