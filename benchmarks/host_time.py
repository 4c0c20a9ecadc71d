#!/usr/bin/env python3
"""Host time of an engine step on Model Runner V2, measured without a GPU: the device is a fake that does nothing.

    export PYTHONPATH=benchmarks:tests/engine_v2:tests/engine_v2/triton_cpu_backend
    python benchmarks/host_time.py [--requests 1 8 64 128] [--json FILE]

The real engine core, scheduler and model runner run in this process on one core and start as on a GPU. After the start
a replay of a CUDA graph and a launch of a Triton kernel do nothing but count, and every method has a fixed number of
tokens accepted, so what is left of a step is the host's work. Engines take turns in blocks of steps. A real device adds
the time of its driver's calls, so read ratios.

Methods: plain; eagle@4, vLLM's EAGLE with four drafts; eesd@m, EESD with m drafts decided every round by `goodput`,
whose answer is then replaced; off, EESD present and switched off by vLLM's own schedule of draft lengths (K = 0).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.end_to_end import SHAPES, config_directory, impose_acceptance_on_eesd, random_head, speculative_config

from vllm_eesd.bench.latency import write_json
from vllm_eesd.provenance import provenance

#: One process, one core, and nothing from elsewhere.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SHAPE, LONGEST = "tiny", 8
METHODS = ("plain", "eagle@4", "off", "eesd@0", "eesd@4", "eesd@8")
#: Drafts accepted in every round, at most.
ACCEPTED = {"eagle": 2, "eesd": 3}
#: Steps of a method's turn; as many before them are run and not counted.
STEPS, UNCOUNTED = 20, 3
#: Phases of a step: what vLLM's (and EESD's) own methods take, each without the ones below it.
PHASES = ("schedule", "execute_model", "sample_tokens", "propose", "get_output", "update", "frontend")


class FakeDevice:
    """Counts what would have been launched; answers for the device how much of a draft was accepted.

    Attributes:
        counts: of graph replays and Triton launches.
        accepted: drafts of each request that the step under way accepts.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.accepted = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """From now on nothing runs on the device."""
        import recorded_graphs
        from triton.runtime.interpreter import InterpretedFunction
        from vllm.v1.worker.gpu import model_runner
        from vllm.v1.worker.gpu.sample import sampler
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        def count(name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: self.counts.update({name: 1})

        patch.setattr(InterpretedFunction, "run", count("triton"))
        patch.setattr(recorded_graphs.Graph, "replay", count("graph"))
        patch.setattr(sampler, "get_num_sampled_and_rejected", lambda *args: self._emitted(len(args[3]), 0))
        patch.setattr(
            rejection_sampler, "get_num_sampled_and_rejected", lambda *args: self._emitted(len(args[3]), self.accepted)
        )
        sample, combine = rejection_sampler.rejection_sample, model_runner.combine_sampled_and_draft_tokens

        def rejection_sample(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, num_sampled = sample(*args, **kwargs)
            return tokens.zero_(), num_sampled.fill_(1 + self.accepted)

        patch.setattr(rejection_sampler, "rejection_sample", rejection_sample)

        def combine_sampled_and_draft_tokens(*args: Any, **kwargs: Any) -> torch.Tensor:
            return combine(*args, **kwargs).zero_()  # memory that no kernel has written holds no indices

        patch.setattr(model_runner, "combine_sampled_and_draft_tokens", combine_sampled_and_draft_tokens)

    def _emitted(self, num_reqs: int, accepted: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts["triton"] += 1
        return torch.full((num_reqs,), 1 + accepted, dtype=torch.int32), torch.zeros(num_reqs, dtype=torch.int32)


class Clock:
    """Seconds in each phase since it was cleared, those of a phase inside another not counted twice."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._inner: list[float] = []

    def time(self, patch: pytest.MonkeyPatch, owner: type, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - begin
                self.seconds[phase] += seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        patch.setattr(owner, name, timed)


class Engine:
    """An engine whose requests decode for as long as they are asked to."""

    def __init__(self, method: str, num_reqs: int, root: Path) -> None:
        from vllm import LLM, SamplingParams

        self.name = method.partition("@")[0]
        spec = speculative_config(f"eesd@{LONGEST}" if self.name in ("eesd", "off") else method, SHAPE, root)
        if self.name == "off":
            spec |= {"num_speculative_tokens_per_batch_size": [[1, 1024, 0]]}
        self.llm = LLM(
            config_directory(SHAPE, root),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            dtype="float32",
            block_size=32,
            max_num_seqs=max(num_reqs, 4),
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=(4 + 4 * num_reqs) << 20,
            speculative_config=spec,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        ).llm_engine
        core = self.llm.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True, detokenize=False)
        tokens = np.random.default_rng(0)
        for number in range(num_reqs):
            self.llm.add_request(str(number), {"prompt_token_ids": tokens.integers(3, 512, 4).tolist()}, params)
        for _ in range(3):  # prompts, before the device stops working
            self.llm.step()

    def draft(self, length: int) -> None:
        """Let the policy decide as ever, and draft so many tokens whatever it answers."""
        policy = self.runner.speculator.rounds.policy
        decide = type(policy).more

        def more(slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
            decide(policy, slots, num_drafted, confidence)
            return np.full(len(slots), num_drafted < length)

        policy.more, policy.idle_rounds = more, lambda slots: 0


@contextlib.contextmanager
def started(methods: Sequence[str], num_reqs: int, root: Path) -> Iterator[tuple[dict[str, Engine], FakeDevice, Clock]]:
    """Start an engine for every method that needs one of its own, then take the device away and time the phases."""
    from gpu_start import as_on_a_gpu
    from vllm.platforms import current_platform
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import async_utils

    sizes = [num_reqs * num_tokens for num_tokens in range(1, LONGEST + 2)]
    device, clock = FakeDevice(), Clock()
    with as_on_a_gpu("FULL_DECODE_ONLY", sizes, updates_in_graphs=True), pytest.MonkeyPatch.context() as patch:
        platform = type(current_platform)
        update = platform.check_and_update_config

        def keep_asynchronous(config: Any) -> None:  # which vLLM turns off on a CPU
            update(config)
            config.scheduler_config.async_scheduling = True

        patch.setattr(platform, "check_and_update_config", staticmethod(keep_asynchronous))
        patch.setattr(gpu_worker, "warmup_kernels", lambda *args: None)
        own = {method: "eesd" if method.startswith("eesd") else method for method in methods}
        engines = {name: Engine(name, num_reqs, root) for name in dict.fromkeys(own.values())}
        device.install(patch)
        timed = {(type(engine.scheduler), "schedule"): "schedule" for engine in engines.values()}
        for engine in engines.values():
            timed |= {
                (type(engine.scheduler), "update_from_output"): "update",
                (type(engine.runner), "execute_model"): "execute_model",
                (type(engine.runner), "sample_tokens"): "sample_tokens",
                (type(engine.llm.output_processor), "process_outputs"): "frontend",
            }
            if engine.runner.speculator is not None:
                timed[type(engine.runner.speculator), "propose"] = "propose"
        timed[async_utils.AsyncOutput, "get_output"] = "get_output"
        for (owner, name), phase in timed.items():
            clock.time(patch, owner, name, phase)
        yield {method: engines[name] for method, name in own.items()}, device, clock


def measure(methods: Sequence[str], num_reqs: int, turns: int, root: Path, profile: bool) -> list[dict[str, Any]]:
    """Return a row for each method: its median step, its phases and what a step launches."""
    steps, phases = collections.defaultdict(list), collections.defaultdict(collections.Counter)
    launched, profiles = collections.defaultdict(collections.Counter), {}
    with started(methods, num_reqs, root) as (engines, device, clock):
        for _ in range(turns):
            for method, engine in engines.items():
                length = int(method.partition("@")[2] or 0)
                device.accepted = min(ACCEPTED.get(engine.name, 0), length)
                if engine.name == "eesd":
                    engine.draft(length)
                for _ in range(UNCOUNTED):
                    engine.llm.step()
                clock.seconds.clear()
                device.counts.clear()
                with profiles.setdefault(method, cProfile.Profile()) if profile else contextlib.nullcontext():
                    for _ in range(STEPS):
                        begin = time.perf_counter()
                        engine.llm.step()
                        steps[method].append(1e3 * (time.perf_counter() - begin))
                phases[method].update(clock.seconds)
                launched[method].update(device.counts)
    for method, profiled in profiles.items():
        print(f"\n{method}, {num_reqs} requests")
        pstats.Stats(profiled).sort_stats("tottime").print_stats(30)
    plain = statistics.median(steps["plain"]) if "plain" in steps else None
    rows = []
    for method, ms in steps.items():
        first, median, third = statistics.quantiles(ms, n=4)
        row = {"requests": num_reqs, "method": method, "step_ms": median, "quartiles_ms": [first, third]}
        row |= {"of_plain": median / plain if plain else None}
        row |= {f"{phase}_ms": 1e3 * phases[method][phase] / len(ms) for phase in PHASES}
        rows.append(row | {f"{kind}_launches": launched[method][kind] / len(ms) for kind in ("graph", "triton")})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, ms."""
    lines = [f"| requests | method | step, ms | of plain's | {' | '.join(PHASES)} | graphs | kernels |"]
    lines.append("|" + "---|" * (len(PHASES) + 6))
    for row in rows:
        cells = [row["requests"], row["method"], f"{row['step_ms']:.2f}"]
        cells.append("-" if row["of_plain"] is None else f"{row['of_plain']:.2f}")
        cells += [f"{row[f'{phase}_ms']:.2f}" for phase in PHASES]
        cells += [f"{row[f'{kind}_launches']:.1f}" for kind in ("graph", "triton")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 128], metavar="R")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="M", help=f"default: {' '.join(METHODS)}")
    parser.add_argument("--turns", type=int, default=8, help=f"of {STEPS} steps for each method (default: 8)")
    parser.add_argument("--profile", action="store_true", help="print cProfile's table for each method, times off")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    torch.set_num_threads(1)
    # A target of four layers whose drafts never leave its context.
    SHAPES["tiny"] = (64, 128, 4, 2, 1, 32)
    impose_acceptance_on_eesd()
    rows, measured_on = [], provenance()
    with tempfile.TemporaryDirectory() as root:
        random_head(SHAPE, Path(root))
        for num_reqs in args.requests:
            found = measure(args.methods, num_reqs, args.turns, Path(root), args.profile)
            print(table(found), flush=True)
            rows += [row | measured_on for row in found]
            if args.json:
                write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # engines of a fake device have nothing to put away
