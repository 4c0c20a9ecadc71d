"""benchmarks/serve_rates.py and servers.py: what is started, asked and stopped, without vLLM."""

import argparse
import importlib
import json
import os
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_eesd.bench.engines import EngineSettings
from vllm_eesd.bench.prompts import Prompt

REPOSITORY = Path(__file__).resolve().parents[2]
#: Stands in for a server: healthy after a while, with a child that does not end when asked to.
SERVER = """#!{python}
import http.server, os, subprocess, sys
sys.argv += ["--port", "0"]
port = int(sys.argv[sys.argv.index("--port") + 1])
if "--refuse" in sys.argv:
    sys.exit("no such model")
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([{python!r}, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
open({folder!r} + "/pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield importlib.import_module("serve_rates"), importlib.import_module("servers")


@pytest.fixture
def stand_in(scripts, tmp_path, monkeypatch):
    _, servers = scripts
    program = tmp_path / "python"
    program.write_text(SERVER.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o700)
    monkeypatch.setattr(servers, "sys", argparse.Namespace(executable=str(program)))
    monkeypatch.setattr(servers, "STOP_LIMIT_S", 0.5)  # the child never ends by itself
    return servers


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_server_is_waited_for_and_stopped_with_its_children_whatever_happens(stand_in, tmp_path):
    with pytest.raises(KeyboardInterrupt), stand_in.serving("m", [], tmp_path / "log") as address:
        assert urllib.request.urlopen(f"{address}/health").status == 200
        raise KeyboardInterrupt
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 60  # killed ones have yet to be taken off the list
    while not all(map(ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(ended, pids))


def test_a_server_that_ends_is_one_line_with_its_log(stand_in, tmp_path):
    with pytest.raises(RuntimeError, match=r"the server ended with status 1 .*log$") as error:
        with stand_in.serving("m", ["--refuse"], tmp_path / "log"):
            pytest.fail("it never was healthy")
    assert "\n" not in str(error.value) and "no such model" in (tmp_path / "log").read_text()


def arguments(**changed):
    given = {"model": "target", "rates": [1.0, 4.0], "rounds": 2, "requests": 6, "max_tokens": 9, "temperature": 0.7}
    given |= {"top_p": 0.95, "seed": 3, "warmups": 1, "limit": 0.1}
    return argparse.Namespace(**(given | changed))


def test_the_client_is_asked_what_vllm_understands(scripts, tmp_path):
    """By vLLM's own parser; the chat template is the server's to render, and answers may end."""
    from vllm.benchmarks.serve import add_cli_args

    script, _ = scripts
    words = script.client_command(arguments(), tmp_path / "q.jsonl", script.QUESTIONS, "http://h:1", 4.0, seed=3)
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert words[1:5] == ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    given = parser.parse_args(words[5:])
    assert (given.request_rate, given.num_prompts, given.custom_output_len, given.seed) == (4.0, 6, 9, 3)
    assert given.skip_chat_template and not given.ignore_eos and (given.temperature, given.top_p) == (0.7, 0.95)
    assert given.dataset_path == str(tmp_path / "q.jsonl") and given.result_filename == "run.json"
    words = script.client_command(arguments(), tmp_path / "q.jsonl", script.COMPLETIONS, "http://h:1", 4.0, seed=3)
    given = parser.parse_args(words[5:])
    assert given.ignore_eos and (given.backend, given.endpoint) == ("openai", "/v1/completions")


def test_servers_differ_in_speculation_alone(scripts):
    script, _ = scripts
    settings = EngineSettings("target", head="head", dtype="bfloat16")
    plain, eesd = (script.server_options(settings, method, 512) for method in ("plain", "eesd"))
    assert eesd[: len(plain)] == plain and eesd[len(plain)] == "--speculative-config"
    assert json.loads(eesd[-1]) == {"method": "eesd", "policy": "goodput", "model": "head"}


def test_methods_take_turns_each_alone_on_the_machine(scripts, tmp_path, monkeypatch):
    script, _ = scripts
    journal = []

    @contextmanager
    def serving(model, options, log):
        method = "eesd" if "--speculative-config" in options else "plain"
        journal.append(f"{method} begins")
        yield method
        journal.append(f"{method} ends")

    def ask(command, folder, limit):
        method = command[command.index("--base-url") + 1]
        journal.append(f"{method} at {command[command.index('--request-rate') + 1]}")
        speed = 2.0 if method == "eesd" else 4.0
        return dict.fromkeys([*script.KEPT.values(), "mean_e2el_ms"], speed)

    monkeypatch.setattr(script, "serving", serving)
    monkeypatch.setattr(script, "ask", ask)
    settings = EngineSettings("/some/where/target")
    runs = script.measure(arguments(), settings, tmp_path / "q.jsonl", script.QUESTIONS, 512, lambda text: None)
    begun = [line.split()[0] for line in journal if line.endswith("begins")]
    assert begun == ["plain", "eesd", "eesd", "plain"]
    assert journal[:4] == ["plain begins", "plain at 1", "plain at 4", "plain ends"]
    rows = script.rows_of(runs, arguments(), settings, "chat.jsonl", 6)
    assert [(row["rate"], row["method"], row["latency_ratio"]) for row in rows] == [
        (rate, method, ratio) for rate in (1.0, 4.0) for method, ratio in (("plain", 1.0), ("eesd", 2.0))
    ]
    assert {row["model"] for row in rows} == {"target"} and rows[1]["latency_ratio_spread"] == [2.0, 2.0]


CLIENTS = {
    "lost": ('import json; json.dump({"completed": 5, "num_prompts": 6}, open(OUT, "w"))', "1 of 6 requests failed"),
    "failed": ('import sys; sys.exit("boom: no such host")', "ended with status 1: boom: no such host"),
    "slow": ("import time; time.sleep(600)", "took longer than 0.005 minutes"),
}


@pytest.mark.parametrize("kind", list(CLIENTS))
def test_a_run_that_went_wrong_ends_the_measurement_in_one_line(scripts, tmp_path, kind):
    script, _ = scripts
    code, message = CLIENTS[kind]
    command = [sys.executable, "-c", f"OUT = {str(tmp_path / 'run.json')!r}\n{code}"]
    with pytest.raises(RuntimeError, match=message) as error:
        script.ask(command, tmp_path, 0.005 if kind == "slow" else 10)
    assert "\n" not in str(error.value) and os.listdir(tmp_path) in ([], ["run.json"])


def test_single_questions_or_completions_can_be_asked(scripts):
    script, _ = scripts
    one, text = Prompt("Why?", messages=({"role": "user", "content": "Why?"},)), Prompt("to complete")
    assert script.kind_of([one, one], "f") == script.QUESTIONS and script.kind_of([text], "f") == script.COMPLETIONS
    longer = Prompt("x", messages=({"role": "system", "content": "s"}, *one.messages))
    for mixed in ([one, text], [text, one], [one, longer]):
        with pytest.raises(ValueError, match="f: prompt 2 is not usable; allowed: messages of one user turn in every"):
            script.kind_of(mixed, "f")
