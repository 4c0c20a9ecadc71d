"""A long, mixed load on the served embedded model: answers stay plain vLLM's, memory stays flat, nothing leaks.

    make soak MINUTES=20        # writes benchmarks/results/soak.json; then docs/reliability.md

Plain vLLM answers every greedy case first, one at a time. Then clients ask at random: arrivals, lengths, parameters,
grammars, streams, disconnects, refused requests; now and then drafting is made to fail. At the end the server idles and
is looked at, and its worker is killed. A soak long enough to judge memory by puts plain vLLM under the same load first,
for as long: its own caches grow with every new shape of a batch, and EESD answers only for what comes on top.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import soak_cases
from soak_server import Server

from vllm_eesd.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "eesd-code-10m"
#: Where faults are planted in turn, never so many so close together that they switch speculation off.
FAULT_PLACES = ("step", "policy", "requests")
#: Shares of the load.
KINDS = {"greedy": 50, "stream": 15, "disconnect": 10, "sampled": 20, "refused": 5}
#: A slope is judged from so many minutes on: before, caches still fill.
JUDGED_FROM_MINUTES = 10
#: The first on top of plain vLLM's.
MOST_MIB_PER_HOUR, MOST_OBJECTS_PER_HOUR = 60.0, 20_000.0
CLEAN_EXIT_S = 180.0


class Soak:
    """Clients, their checks and what they counted.

    Args:
        server: serving with EESD, or plain vLLM.
        cases: greedy request bodies.
        expected: plain vLLM's answer to each.
        kinds: name -> share of the load.
    """

    def __init__(
        self, server: Server, cases: list[dict[str, Any]], expected: list[dict[str, Any]], kinds: dict[str, int] = KINDS
    ) -> None:
        self.server, self.cases, self.expected, self.kinds = server, cases, expected, kinds
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def run(self, watch: Watch, num_clients: int, seed: int, minutes: float) -> None:
        """Let so many clients ask for so long."""
        deadline = time.monotonic() + minutes * 60
        threads = [threading.Thread(target=self.client, args=(seed + i, deadline)) for i in range(num_clients)]
        for thread in threads:
            thread.start()
        watch.run(deadline)
        for thread in threads:
            thread.join()

    def client(self, seed: int, deadline: float) -> None:
        """Ask at random until the deadline."""
        generator = random.Random(seed)
        while time.monotonic() < deadline:
            # Bursts and pauses: batches of every size, the empty one included.
            time.sleep(generator.choice((0.0, 0.0, 0.05, generator.expovariate(2.0))))
            (kind,) = generator.choices(list(self.kinds), self.kinds.values())
            number = generator.randrange(len(self.cases))
            try:
                fault = getattr(self, f"_{kind}")(number, generator)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            with self._lock:
                self.counts[kind] += 1
                if fault:
                    self.failures.append(f"{kind} {self.cases[number]}: {fault}"[:1000])

    def _asked(self, number: int, generator: random.Random) -> dict[str, Any]:
        return self.cases[number] | {"vllm_xargs": generator.choice(soak_cases.WISHES)}

    def _greedy(self, number: int, generator: random.Random) -> str:
        status, response = self.server.complete(self._asked(number, generator))
        if status != 200:
            return f"status {status}: {response}"
        answer = soak_cases.answer_of(response)
        with self._lock:
            self.counts["greedy tokens compared"] += answer["tokens"]
        return "" if answer == self.expected[number] else f"{answer} is not {self.expected[number]}"

    def _stream(self, number: int, generator: random.Random) -> str:
        text = "".join(self.server.stream(self._asked(number, generator)))
        return "" if text == self.expected[number]["text"] else f"{text!r} is not {self.expected[number]['text']!r}"

    def _disconnect(self, number: int, generator: random.Random) -> str:
        stream = self.server.stream(self._asked(number, generator) | {"max_tokens": 400})
        text = "".join(itertools.islice(stream, generator.randrange(1, 12)))
        stream.close()
        known = self.expected[number]["text"]
        same = text.startswith(known) or known.startswith(text)
        return "" if same or "stop" in self.cases[number] else f"{text!r} began otherwise than {known!r}"

    def _sampled(self, number: int, generator: random.Random) -> str:
        status, response = self.server.complete(soak_cases.sampled(self._asked(number, generator), generator))
        if status != 200:
            return f"status {status}: {response}"
        most = self.cases[number]["max_tokens"] * len(response["choices"])
        return "" if response["usage"]["completion_tokens"] <= most else "more tokens than asked for"

    def _refused(self, number: int, generator: random.Random) -> str:
        asked = generator.choice(soak_cases.REFUSED)
        status, response = self.server.complete(self.cases[number] | asked)
        return "" if status == 400 else f"{asked}: status {status}, must be 400: {response}"


class Watch:
    """Samples the server's memory and plants faults while the clients run; None of plain vLLM, which has no drafter."""

    def __init__(self, server: Server, inject_every_s: float | None) -> None:
        self.server, self.inject_every_s = server, inject_every_s
        self.memory: list[tuple[float, int]] = []
        self.objects: list[tuple[float, int]] = []

    def run(self, deadline: float) -> None:
        began = time.monotonic()
        next_look, next_fault = began, began + (self.inject_every_s or 0.0)
        places = itertools.cycle(FAULT_PLACES)
        while (now := time.monotonic()) < deadline:
            self.memory.append((now - began, self.server.resident_bytes()))
            if self.inject_every_s is None:
                time.sleep(0.5)
                continue
            if now >= next_look:
                self.objects.append((now - began, self.server.worker("soak_footprint")["objects"]))
                next_look = now + 10.0
            if now >= next_fault:
                self.server.worker("soak_inject", next(places))
                next_fault = now + self.inject_every_s
            time.sleep(0.5)


def slope_per_hour(samples: list[tuple[float, int]]) -> float:
    """Return the rise of the second half of the samples, by least squares; 0 of too few."""
    if len(samples) < 6:
        return 0.0
    times, values = np.array(samples[len(samples) // 2 :], dtype=np.float64).T
    return float(np.polyfit(times, values, 1)[0] * 3600)


def at_idle(server: Server) -> dict[str, Any]:
    """Return what is left once no client asks; one short request lets the worker hear that the others ended."""
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    server.complete({"prompt": "import os\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True})
    footprint = server.worker("soak_footprint")
    return {
        "requests_running": server.metric("vllm:num_requests_running"),
        "kv_cache_usage": server.metric("vllm:kv_cache_usage_perc"),
        "slots": footprint["slots"],
        "faults_met": footprint["faults_met"],
    }


def kill_worker(server: Server) -> dict[str, Any]:
    """Kill the process that holds the model; return how the rest took it."""
    (victim,) = server.named("Worker") or server.named("EngineCore")
    outcome: list[str] = []

    def ask() -> None:
        try:
            outcome.append(f"status {server.complete({'prompt': 'x', 'max_tokens': 900, 'ignore_eos': True})[0]}")
        except Exception as error:  # the connection may end before or within the answer
            outcome.append(type(error).__name__)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    gone = server.gone_within(CLEAN_EXIT_S)
    client.join(CLEAN_EXIT_S)
    return {"all_processes_gone": gone, "request_in_flight": outcome[0] if outcome else "never answered"}


def judge(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a result; nothing, it is to be hoped."""
    idle, wrong = result["idle"], list(result["failures"])
    if idle["requests_running"] or idle["kv_cache_usage"]:
        wrong.append(
            f"at idle: {idle['requests_running']} requests run, {idle['kv_cache_usage']} of the KV cache is used"
        )
    if idle["slots"] > 1:
        wrong.append(f"at idle {idle['slots']} request slots are in use, at most the last request's may be")
    if result["drafter_faults"] != idle["faults_met"]:
        wrong.append(f"{result['drafter_faults']} faults were counted, {idle['faults_met']} planted ones met")
    if result["speculation_off"]:
        wrong.append(f"{idle['faults_met']} faults came so close together that speculation was switched off")
    if not result["accepted"]:
        wrong.append("nothing was ever drafted and accepted")
    if result["minutes"] >= JUDGED_FROM_MINUTES:
        if result["mib_per_hour"] > result["plain_mib_per_hour"] + MOST_MIB_PER_HOUR:
            wrong.append(
                f"memory rises by {result['mib_per_hour']:.0f} MiB an hour, plain vLLM's by "
                f"{result['plain_mib_per_hour']:.0f}"
            )
        if result["objects_per_hour"] > MOST_OBJECTS_PER_HOUR:
            wrong.append(f"Python objects rise by {result['objects_per_hour']:.0f} an hour")
    killed = result["worker_killed"]
    if not killed["all_processes_gone"] or killed["request_in_flight"] in ("never answered", "status 200"):
        wrong.append(f"after its worker was killed the server did not end cleanly: {killed}")
    return wrong


def soak(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Run it all and return the result."""
    cases = soak_cases.greedy_cases(args.cases, random.Random(args.seed))
    options = ("--enforce-eager",) if args.eager else ()
    with contextlib.ExitStack() as stack:
        # Both start now: that takes longer than a short soak.
        plain, server = (Server(MODEL, spec, logs / f"{spec or 'plain'}.log", options) for spec in (None, "eesd"))
        stack.callback(server.stop)
        with plain:
            expected = [soak_cases.answer_of(plain.complete(case)[1]) for case in cases]
            plain_watch = Watch(plain, None)
            if args.minutes >= JUDGED_FROM_MINUTES:
                answered = {kind: share for kind, share in KINDS.items() if kind != "refused"}  # by EESD only
                Soak(plain, cases, expected, answered).run(plain_watch, args.clients, args.seed, args.minutes)
        stack.enter_context(server)
        run, watch = Soak(server, cases, expected), Watch(server, args.inject_every)
        run.run(watch, args.clients, args.seed, args.minutes)
        idle, stats = at_idle(server), server.worker("eesd_stats")
        killed = kill_worker(server)
    return provenance() | {
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": {kind: run.counts[kind] for kind in KINDS},
        "tokens_compared": run.counts["greedy tokens compared"],
        "mismatches_and_errors": len(run.failures),
        "failures": run.failures[:20],
        **{name: stats[name] for name in ("rounds", "drafted", "accepted", "drafter_faults", "speculation_off")},
        "idle": idle,
        "mib": [round(watch.memory[i][1] / 2**20) for i in (0, len(watch.memory) // 2, -1)],
        "mib_per_hour": round(slope_per_hour(watch.memory) / 2**20, 1),
        "plain_mib_per_hour": round(slope_per_hour(plain_watch.memory) / 2**20, 1),
        "objects_per_hour": round(slope_per_hour(watch.objects)),
        "worker_killed": killed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--cases", type=int, default=130, help="greedy cases that plain vLLM answers first")
    parser.add_argument("--inject-every", type=float, default=60.0, help="seconds between planted faults")
    parser.add_argument("--eager", action="store_true", help="compile nothing: starts sooner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = soak(args, Path(directory))
    wrong = judge(result)
    args.json.write_text(json.dumps(result | {"wrong": wrong}, indent=1) + "\n")
    print(*(wrong or ["nothing wrong"]), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
