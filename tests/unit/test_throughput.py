"""`eesd bench throughput` and `eesd bench sweep` without an engine: arrivals, figures, combinations."""

import json
import statistics
import sys
import time
import types

import pytest

from vllm_eesd import cli
from vllm_eesd.bench import sweep, throughput
from vllm_eesd.bench.engines import EngineSettings
from vllm_eesd.bench.throughput import measure_rate, poisson_arrivals, rows
from vllm_eesd.bench.vllm_engine import Served, VllmEngine


def served(arrived, first, last, tokens=(1, 2, 3, 4, 5)):
    return Served(arrived, first, last, list(tokens))


class FakeServer:
    """Every request takes `seconds` from its arrival, a fifth of them to its first token."""

    def __init__(self, name, seconds, journal, tokens=(1, 2, 3, 4, 5)):
        self.name, self.seconds, self.journal, self.tokens = name, seconds, journal, tokens

    def serve(self, prompts, arrivals, max_tokens):
        self.journal.append((self.name, len(prompts), tuple(arrivals)))
        return [served(at, at + self.seconds / 5, at + self.seconds, self.tokens) for at in arrivals]

    def forget_prefixes(self):
        self.journal.append((self.name, "forget"))


def measured(rounds=3, **tokens):
    journal = []
    servers = {
        name: FakeServer(name, s, journal, **tokens.get(name, {})) for name, s in (("plain", 2.0), ("eesd", 1.0))
    }
    return measure_rate(servers, [[7]] * 4, 2.0, 5, rounds, seed=1), journal


def test_arrivals_are_poisson_and_the_same_for_the_same_seed():
    arrivals = poisson_arrivals(4000, 2.0, seed=3)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert arrivals[0] == 0 and min(gaps) >= 0 and arrivals == poisson_arrivals(4000, 2.0, seed=3)
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.08)  # of an exponential distribution: its mean


def test_methods_see_the_same_arrivals_and_take_turns():
    _, journal = measured()
    timed = [entry for entry in journal if entry[1] != "forget"]
    warm_up, timed = timed[:2], timed[2:]
    assert [(size, set(arrivals)) for _, size, arrivals in warm_up] == [(2, {0.0})] * 2
    assert [name for name, *_ in timed] == ["plain", "eesd", "eesd", "plain", "plain", "eesd"]
    arrivals = [entry[2] for entry in timed]
    assert arrivals[0] == arrivals[1] != arrivals[2] == arrivals[3]
    assert all(journal[journal.index(entry) - 1] == (entry[0], "forget") for entry in timed)


def test_figures():
    runs, _ = measured()
    plain, eesd = rows(runs)
    assert (plain["latency_s"], eesd["latency_s"], eesd["first_token_s"]) == (2.0, 1.0, 0.2)
    assert eesd["ms_per_token"] == 200.0  # 0.8 s for the four tokens behind the first
    assert (eesd["latency_ratio"], eesd["latency_ratio_interval"], eesd["identical"]) == (2.0, [2.0, 2.0], True)
    (round_,) = [[served(0, 1, 2), served(1, 2, 4)]]
    (row,) = rows({"eesd": [round_]})
    assert row["tokens_per_s"] == 2.5 and row["latency_s"] == 2.5 and row["latency_ratio"] is None


def test_other_output_is_seen():
    runs, _ = measured(eesd={"tokens": (1, 2, 9, 4, 5)})
    assert [row["identical"] for row in rows(runs)] == [True, False]


def test_a_request_is_what_came_and_when():
    request = Served(0.5)
    for tokens, now in (([], 0.6), ([4], 1.0), ([5, 6], 2.0), ([], 3.0)):
        request.add(tokens, now)
    assert (request.first, request.last, request.tokens) == (1.0, 2.0, [4, 5, 6])


class SteppedEngine:
    """vLLM's engine: requests come in whenever, every step gives each running one a token."""

    def __init__(self):
        self.running, self.added = {}, []

    def add_request(self, request_id, prompt, params):
        self.running[request_id] = params["max_tokens"]
        self.added.append((request_id, prompt, time.perf_counter()))

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        time.sleep(0.005)
        outputs = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            if not self.running[request_id]:
                del self.running[request_id]
            completion = types.SimpleNamespace(token_ids=[int(request_id)])
            outputs.append(types.SimpleNamespace(request_id=request_id, outputs=[completion]))
        return outputs


def test_the_engine_is_given_requests_when_they_arrive(monkeypatch):
    module = types.SimpleNamespace
    vllm = module(SamplingParams=lambda **settings: settings, __path__=[])
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.inputs", module(tokens_input=tuple))
    kinds = module(RequestOutputKind=module(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    engine = SteppedEngine()
    began = time.perf_counter()
    found = VllmEngine(module(llm_engine=engine), drafts=False).serve([[5], [6], [7]], [0.0, 0.01, 0.2], max_tokens=4)
    assert [(i, prompt) for i, prompt, _ in engine.added] == [("0", (5,)), ("1", (6,)), ("2", (7,))]
    assert all(at - began >= due for (_, _, at), due in zip(engine.added, [0.0, 0.01, 0.2], strict=True))
    assert [request.tokens for request in found] == [[0] * 4, [1] * 4, [2] * 4]
    assert all(r.arrived < r.first < r.last for r in found) and found[2].first > 0.2


@pytest.fixture
def without_engines(monkeypatch, tmp_path):
    """Replace the tokenizer and the engines of both commands; returns the settings engines were started with."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    started = []
    monkeypatch.setenv("COLUMNS", "160")  # tables unwrapped

    class Engine(FakeServer):
        clock = 0.0

        def generate(self, prompts, max_tokens, at_once=None):
            return [list(self.tokens) for _ in prompts]

        def stream(self, prompts, max_tokens, at_once=None):
            yield [(number, list(self.tokens)) for number in range(len(prompts))]

        def reset_statistics(self):
            pass

        def statistics(self):
            counts = {"rounds": 10, "emitted": 30, "drafted": 40, "accepted": 20, "accepted_per_position": [10, 10]}
            return counts if self.name == "eesd" else None

    class Running:
        def __init__(self, methods, settings, max_model_len, progress):
            started.extend((method, settings) for method in methods)
            self.engines = {method: Engine(method, 1.0, []) for method in methods}

        def __enter__(self):
            return self.engines

        def __exit__(self, *error):
            return None

    for module in (throughput, sweep):
        monkeypatch.setattr(module, "running_engines", Running)
        monkeypatch.setattr(module, "encode_prompts", lambda *args: (None, [[1], [2]], 256))
    return started


def test_the_throughput_command(without_engines, tmp_path, capfd):
    out = tmp_path / "rows.json"
    flags = ["--model", "M", "--prompts", str(tmp_path / "prompts.jsonl"), "--methods", "plain,eesd"]
    more = ["--rate", "1,8", "--requests", "5", "--rounds", "3", "--json", str(out)]
    assert cli.main(["bench", "throughput", *flags, *more]) == 0
    found = json.loads(out.read_text())
    assert [(row["method"], row["rate"]) for row in found] == [(m, r) for r in (1.0, 8.0) for m in ("plain", "eesd")]
    assert all(row["requests"] == 5 and row["git_sha"] and row["hardware"] for row in found)
    assert "requests/s" in capfd.readouterr().out


def test_requests_that_sample_are_not_compared(without_engines, tmp_path, capfd):
    out = tmp_path / "rows.json"
    flags = ["--model", "M", "--workload", "mixed", "--methods", "plain,eesd", "--temperature", "2", "--rate", "1"]
    assert cli.main(["bench", "throughput", *flags, "--requests", "5", "--rounds", "3", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {(row["identical"], row["temperature"]) for row in found} == {(None, 2.0)}
    assert {settings.temperature for _, settings in without_engines} == {2.0}
    assert found[1]["latency_ratio"] is not None and found[0]["prompts"].endswith("models/prompts/mixed.jsonl")


def test_the_sweep_command_measures_every_combination(without_engines, tmp_path, capfd):
    out = tmp_path / "rows.json"
    flags = ["--model", "M", "--prompts", str(tmp_path / "prompts.jsonl"), "--exit-layers", "head,3"]
    more = ["--lengths", "2,8", "--policies", "goodput,fixed", "--batch", "1,2", "--rounds", "3", "--json", str(out)]
    assert cli.main(["bench", "sweep", *flags, *more]) == 0
    found = json.loads(out.read_text())
    named = {tuple(row[k] for k in ("exit_layer", "num_speculative_tokens", "policy", "batch")) for row in found}
    assert len(found) == len(named) == 16 and ("head", 8, "goodput", 2) in named and (3, 2, "fixed", 1) in named
    assert [method for method, _ in without_engines] == ["plain"] + ["eesd"] * 8, "plain is started once"
    headless = next(s for _, s in without_engines if s.exit_layer == 3 and s.policy == "fixed")
    assert headless.eesd_config() == {
        "method": "eesd",
        "num_speculative_tokens": 2,
        "policy": "fixed",
        "exit_layer": 3,
    }
    assert "longest draft" in capfd.readouterr().out


@pytest.mark.parametrize("layers", [["0"], ["x"], ["head", "-1"]])
def test_a_wrong_exit_layer_is_refused(layers):
    with pytest.raises(ValueError, match="--exit-layers .* is not allowed: a layer's number, or head"):
        list(sweep.combinations(EngineSettings("M"), layers, [4], ["fixed"]))


@pytest.mark.parametrize(("fixed_length", "ends"), [(True, {}), (False, {"ignore_eos": False})])
def test_conversations_that_arrive_end_where_the_model_ends_them(fixed_length, ends):
    asked = []

    def serve(prompts, arrivals, max_tokens, **given):
        asked.append(given)
        return [Served(0.0, 1.0, 2.0, [7]) for _ in prompts]

    engine = types.SimpleNamespace(serve=serve, forget_prefixes=lambda: None)
    throughput.measure_rate({"plain": engine}, [[1], [2]], 1.0, 4, 2, 0, fixed_length=fixed_length)
    assert asked == [ends] * 3
