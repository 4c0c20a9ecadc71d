"""benchmarks/measure_public.py, and what the pages say of the public model."""

import argparse
import importlib.util
import io
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from vllm_eesd.bench.vllm_engine import each_limit

REPOSITORY = Path(__file__).resolve().parents[2]
COUNTERS = {"rounds": 10, "emitted": 24, "drafted": 40, "accepted": 14, "accepted_per_position": [8, 4, 2, 0]}


@pytest.fixture(scope="module")
def scripts():
    """(measure_public, pages) of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        loaded = []
        for name in ("measure_public", "pages"):
            spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            loaded.append(module)
        yield loaded


class FakeEngine:
    """Ends every text after three tokens if it may; `wrong` ones say something else than plain."""

    def __init__(self, method, asked, wrong):
        self.method, self.asked, self.last = method, asked, 9 if wrong else 7

    def at(self, temperature, top_p=1.0, **more):
        self.asked.append((self.method, "at", temperature, top_p, *more.items()))
        return self

    def generate(self, prompts, max_tokens, at_once=None, ignore_eos=True):
        self.asked.append((self.method, len(prompts), at_once, ignore_eos))
        return [[7] * (limit if ignore_eos else 2) + [self.last] for limit in each_limit(max_tokens, len(prompts))]

    def stream(self, prompts, max_tokens, at_once=None, ignore_eos=True):
        for _ in range(3):
            yield [(n, [7]) for n in range(len(prompts))]

    def top_two_margins(self, texts):
        return [0.25] * len(texts)

    def statistics(self):
        return COUNTERS if self.method.startswith("eesd") else None

    forget_prefixes = reset_statistics = lambda self: None


@pytest.fixture
def measured(scripts, tmp_path, monkeypatch):
    """A call that measures with engines that answer at once, and (what was asked, what was started, the files)."""
    module, _ = scripts
    asked, started = [], []

    @contextmanager
    def engines(methods, settings, longest, progress):
        started.append((settings.dtype, list(methods)))
        wrong = settings.dtype == "bfloat16"
        yield {name: FakeEngine(name, asked, wrong and name == "eesd") for name in methods}

    def missing(settings, method):
        return {"suffix": "not built", "eagle": None, "draft_model": "not trained"}.get(method)

    way = {"max_tokens": 5, "rounds": 1}
    sizes = {
        "bfloat16": {
            "chat": module.Size({1: 9, 2: 16}, **way, peers=True),
            "long_documents": module.Size({1: 2}, **way),
        },
        "float32": {"chat": module.Size({1: 2}, **way, samplings=(module.GREEDY,))},
    }
    monkeypatch.setattr(module, "SIZES", sizes)
    monkeypatch.setattr(module, "FEWEST_IN_BLOCK", 3)
    monkeypatch.setattr(module, "running_engines", engines)
    monkeypatch.setattr(module, "encode_prompts", lambda model, texts, *_: (None, [[1, 2]] * len(texts), 256))
    monkeypatch.setattr(module.EngineSettings, "missing", missing)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "git_sha", lambda: "a commit")
    monkeypatch.setattr(module, "open_console", lambda: Console(file=io.StringIO(), width=100))
    monkeypatch.setattr(sys.modules["vllm_eesd.bench.latency"], "provenance", lambda: PROVENANCE)
    monkeypatch.chdir(REPOSITORY)

    def call(**changed):
        given = {"model": "/somewhere/target", "head": "head", "peers": None, "name": "smollm2"}
        return module.measure_public(
            argparse.Namespace(
                **(given | {"quick": False, "resume": False, "parameters": False} | NOTHING_CHOSEN | changed)
            )
        )

    return call, asked, started, tmp_path


NOTHING_CHOSEN = {"prompts": None, "workloads": None, "dtypes": None}
PROVENANCE = {"hardware": "Some CPU", "versions": {"vllm-eesd": "9.9"}, "git_sha": "a commit"}


def rows_in(folder, name):
    return json.loads((folder / f"smollm2-{name}.json").read_text())


def test_every_table_has_its_controls(measured):
    call, asked, started, folder = measured
    assert call() == 0
    ours, copying = ["plain", "plain-again", "eesd", "eesd-fixed@4"], ["ngram"]
    half = [("bfloat16", methods) for methods in (ours, copying, ["eagle@2"], ["eagle@5"])]
    assert started == [*half, ("float32", ours), ("float32", copying)]
    names = {path.name for path in folder.glob("smollm2-*")}
    tables = {"chat_greedy_bfloat16", "chat_sampled_bfloat16", "chat_greedy_float32"}
    tables |= {"long_documents_greedy_bfloat16", "long_documents_sampled_bfloat16"}
    assert names == {f"smollm2-{table}.json" for table in tables} | {"smollm2-methods.json"}
    rows = rows_in(folder, "chat_greedy_bfloat16")
    with_peers = [(batch, method) for batch in (1, 2) for method in [*ours, *copying]]
    with_peers += [(batch, f"eagle@{length}") for length in (2, 5) for batch in (1, 2)]
    assert [(row["batch"], row["method"]) for row in rows] == with_peers
    assert {row["model"] for row in rows} == {"target"} and {row["fixed_length"] for row in rows} == {False}
    assert {(row["batch"], row["num_prompts"], row["out_of"]) for row in rows} == {(1, 9, 80), (2, 16, 80)}
    fixed = next(row for row in rows if row["method"] == "eesd-fixed@4")
    assert fixed["acceptance_per_position"] == [0.8, 0.4, 0.2, 0.0]
    assert not any(what[3] for what in asked if what[1] != "at")  # natural ends, whatever runs
    sampled = rows_in(folder, "chat_sampled_bfloat16")
    assert {(row["temperature"], row["top_p"], row["identical_share"]) for row in sampled} == {(0.7, 0.95, None)}
    assert ("eagle@5", "at", 0.7, 0.95) in asked


def test_a_short_session_has_fewer_prompts_of_everything(measured):
    call, _, _, folder = measured
    assert call(prompts=5, workloads=["chat"], dtypes=["bfloat16"]) == 0
    assert not list(folder.glob("*_float32.json")) and not list(folder.glob("*long_documents*"))
    rows = rows_in(folder, "chat_greedy_bfloat16")
    assert {(row["batch"], row["num_prompts"], row["out_of"]) for row in rows} == {(1, 5, 80), (2, 5, 80)}


def test_bfloat16_has_no_verdict_and_float32_has(measured):
    call, _, _, folder = measured
    call()
    half, whole = rows_in(folder, "chat_greedy_bfloat16"), rows_in(folder, "chat_greedy_float32")
    assert {row["identical"] for row in half} == {None} and {row["identical"] for row in whole} == {True}
    eesd = next(row for row in half if row["method"] == "eesd")
    assert (eesd["identical_share"], eesd["control_batch"], eesd["control_identical_share"]) == (0.0, 8, 1.0)
    assert eesd["margins"] == [0.25] * 9 and eesd["speedup_vs_plain"] is not None
    assert "margins" not in whole[0]


def test_what_was_measured_is_not_measured_again_unless_the_commit_is_another(measured, scripts, monkeypatch):
    call, _, started, folder = measured
    call()
    started.clear()
    (folder / "smollm2-chat_greedy_float32.json").unlink()
    assert call(resume=True) == 0 and [dtype for dtype, _ in started] == ["float32"] * 2
    started.clear()
    assert call(resume=True) == 0 and not started
    file = folder / "smollm2-chat_greedy_bfloat16.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps([row for row in kept if "@5" not in row["method"]]))  # stopped before those
    assert call(resume=True) == 0 and started, "trained peers are measured last"
    started.clear()
    monkeypatch.setattr(scripts[0], "git_sha", lambda: "another")
    call(resume=True)
    assert len(started) == 6


def test_the_parameters_of_real_chats_are_measured_alone(measured):
    call, asked, started, folder = measured
    assert call(parameters=True) == 0 and started == [("bfloat16", ["plain", "eesd"])]
    assert [path.name for path in folder.glob("smollm2-*")] == ["smollm2-sampling_parameters.json"]
    rows = rows_in(folder, "sampling_parameters")
    assert len(rows) == 16 and len({(row["kind"], row["batch"], row["method"]) for row in rows}) == 16
    assert {(row["batch"], row["num_prompts"], row["out_of"]) for row in rows} == {(1, 6, 80), (8, 24, 80)}
    assert ("eesd", "at", 0.6, 0.95, ("top_k", 20)) in asked


def test_a_model_that_cannot_be_had_is_one_line(scripts, monkeypatch):
    module, _ = scripts
    ended = argparse.Namespace(returncode=2, stdout="", stderr="usage\neesd: error: no such command\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ValueError, match=r"no such command\); allowed: --model DIR") as error:
        module.public_model()
    assert "\n" not in str(error.value)


# Pages


def test_before_anything_is_measured_the_pages_say_so(scripts, tmp_path):
    _, pages = scripts
    pages.results(tmp_path, tmp_path / "results.md")
    for name in ("results.md", "tables/results.md"):
        assert "## A public chat model\n\nNot yet measured (`make bench`)." in (tmp_path / name).read_text()
    assert "SmolLM2-135M-Instruct): not yet measured" in pages.render("readme.md.j2", public=None, **EMBEDDED)


ROW = {"hardware": "H", "num_prompts": 1, "max_tokens": 1, "temperature": 0, "batch": 1, "method": "plain"}
ROW |= {"tokens_per_s": 1.0, "speedup_vs_plain": None, "speedup_spread": None, "acceptance_length": None}
ROW |= {"ngram_share": None, "identical": None}
EMBEDDED = {"rows": [ROW], "head": argparse.Namespace(exit_layer=1, head_layers=2), "slower": []}


def test_the_pages_say_what_was_measured(measured, scripts):
    call, _, _, folder = measured
    _, pages = scripts
    call()
    pages.results(folder, folder / "results.md")
    text = (folder / "tables" / "results.md").read_text()
    assert "### Chat, greedy, bfloat16" in text and "16 prompts (9 at batch 1) (digest " in text
    told = "| 0% (plain at batch 8: 100%) |"
    line = next(line for line in text.splitlines() if line.startswith("| 1 | eesd | ") and told in line)
    assert line.endswith("| 0.80 0.40 0.20 | 0% (plain at batch 8: 100%) | 0.250, 0.250 |")
    assert "**no**" not in text and "| 1 | plain, again | " in text
    command = 'eesd bench latency --model "$(eesd model smollm2)" --workload chat --methods plain,plain-again,eesd,'
    assert command in text
    assert "--batch 1 --head head --num-prompts 9 --block 4 --rounds 1 --max-tokens 5 --dtype bfloat16\n" in text
    assert "--temperature 0.7 --top-p 0.95\n" in text
    assert "- `draft_model` is left out: not trained." in text
    assert "Not yet measured (`make bench ARGS=--rates`)." in text
    public = {"public": pages.page_public.load_public(folder), "public_workloads": pages.page_public.WORKLOADS}
    shown = pages.render("readme.md.j2", **public, **EMBEDDED)
    assert shown.index("SmolLM2-135M-Instruct, bfloat16") < shown.index("The embedded model, which tests and CI use:")
    assert "In float32 4 of 4 greedy texts of EESD are plain vLLM's" in shown
    assert "Drafts of 4 tokens on chat, greedy, batch 1, accepted by position: 0.80 0.40 0.20." in shown
    assert "plain, again" not in shown and shown.count("| eagle@") == 2


def test_of_a_peer_the_better_length_is_shown_and_of_the_head_every_row(scripts):
    best = scripts[1].page_public.best_lengths
    speeds = [("plain", 1, 1.0), ("eesd-fixed@4", 1, 0.5), ("eagle@2", 1, 1.2), ("eagle@5", 1, 1.4)]
    speeds += [("eagle@2", 8, 0.9), ("eagle@5", 8, None)]
    rows = [{"method": method, "batch": batch, "speedup_vs_plain": speed} for method, batch, speed in speeds]
    kept = [("plain", 1), ("eesd-fixed@4", 1), ("eagle@5", 1), ("eagle@2", 8)]
    assert [(row["method"], row["batch"]) for row in best(rows)] == kept


def test_the_noise_is_the_worst_pass_of_plain_against_itself(scripts):
    public = scripts[1].page_public
    rows = [{"method": "plain-again", "batch": 1, "speedup_spread": spread} for spread in ([0.97, 1.01], [0.99, 1.02])]
    rows += [{"method": "eesd", "batch": 1, "speedup_spread": [1.0, 3.0]}]
    table = public.Measured("chat", "greedy", "bfloat16", rows)
    assert public.Public([table], [], [], {}).noise() == pytest.approx(0.03)
