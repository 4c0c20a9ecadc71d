"""`vllm serve MODEL --speculative-config eesd` and the OpenAI client, as a user would run them."""

import concurrent.futures
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from vllm_serve import START_LIMIT_S, metric, serving

EMITTED = "eesd:emitted_tokens_total"
PROMPTS = [
    "import os\n\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def add(a, b):\n    return",
    "for i in range(10):\n    print(",
    "    def __repr__(self):\n        return",
    "from typing import Any\n\n\ndef get(self, key: str, default: Any = None) -> Any:\n",
    "if __name__ == '__main__':\n",
    "try:\n    import numpy as np\nexcept ImportError:\n",
]


@pytest.fixture(scope="module")
def server(embedded_model, tmp_path_factory):
    """Base URL of a server started by the `vllm` command with the bare word `eesd`; it can be paused."""
    options = ("--speculative-config", "eesd", "--max-model-len", "1024")
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(embedded_model, *options, log=log, VLLM_SERVER_DEV_MODE="1") as address:
        yield address


@pytest.fixture(scope="module")
def client(server):
    import openai

    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=120)


def complete(client, prompt, **options):
    options = {"max_tokens": 48, "temperature": 0} | options
    return client.completions.create(model="code", prompt=prompt, **options)


@pytest.fixture(scope="module")
def expected(embedded_model):
    """What plain vLLM answers, one prompt at a time, in a process of its own."""
    script = (
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    model, prompts = sys.argv[1], json.loads(sys.argv[2])\n"
        "    llm = LLM(model, dtype='float32', max_model_len=1024, disable_log_stats=True)\n"
        "    params = SamplingParams(temperature=0, max_tokens=48)\n"
        "    texts = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].text for p in prompts]\n"
        "    print('RESULT' + json.dumps(texts))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(embedded_model), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.split("RESULT")[1].splitlines()[0])


@pytest.mark.feature("vllm serve, OpenAI client, async engine", "the same answers")
def test_completions_from_eight_clients_at_once(client, expected):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(client, prompt).choices[0].text, PROMPTS))
    assert answers == expected


@pytest.mark.feature("streaming", "the same answers")
def test_streaming_gives_the_same_text_in_pieces(client, expected):
    pieces = [chunk.choices[0].text for chunk in complete(client, PROMPTS[0], stream=True) if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == expected[0]


def test_chat_with_the_trivial_template(client):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    answer = client.chat.completions.create(model="code", messages=messages, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16


def test_a_stop_string_ends_the_text_before_it(client, expected):
    stop = expected[1][10:14]
    assert complete(client, PROMPTS[1], stop=[stop]).choices[0].text == expected[1][: expected[1].index(stop)]


@pytest.mark.parametrize(
    "option", [{"eesd_policy": "fixed"}, {"eesd_max_draft_tokens": 1e9}, {"eesd_depth": 1}], ids=lambda o: [*o][0]
)
def test_a_wrong_option_is_the_clients_mistake(client, option):
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        complete(client, PROMPTS[0], extra_body={"vllm_xargs": option})
    assert error.value.status_code == 400 and [*option][0] in error.value.body["message"]


@pytest.mark.feature("disconnecting clients", "the same answers for the others")
def test_a_client_that_disconnects_mid_stream_harms_nobody(server, client, expected):
    body = json.dumps({"model": "code", "prompt": PROMPTS[2], "max_tokens": 900, "stream": True, "ignore_eos": True})
    host, port = server.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert b"data:" in connection.recv(4096) + connection.recv(4096)
    assert complete(client, PROMPTS[0]).choices[0].text == expected[0]
    deadline = time.monotonic() + 60
    while running_requests(server) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert running_requests(server) == 0


RECORDED = Path(__file__).resolve().parents[2] / "models" / "prompts" / "held_out_code.jsonl"
BENCH_DATA = {
    "random": ["--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "16"],
    "recorded": ["--dataset-name", "custom", "--dataset-path", str(RECORDED), "--custom-output-len", "16"],
}


@pytest.mark.feature("vllm bench serve", "every request served")
@pytest.mark.parametrize("prompts", BENCH_DATA)
def test_vllm_bench_serve(server, embedded_model, tmp_path, prompts):
    command = [
        str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--base-url", server, "--model", "code",
        "--tokenizer", str(embedded_model), *BENCH_DATA[prompts], "--skip-chat-template", "--num-prompts", "6",
        "--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path),
        "--result-filename", "bench.json",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S)
    assert run.returncode == 0, run.stderr[-3000:]
    seen = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert seen["completed"] == 6 and seen["failed"] == 0 and seen["total_output_tokens"] == 6 * 16


def running_requests(server):
    return metric(server, "vllm:num_requests_running")


def test_it_really_speculates(server, client):
    complete(client, PROMPTS[0])
    assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") > 0


def eesds(snapshot):
    return {name: value for name, value in snapshot.values.items() if "eesd:" in str(name)}


def settled(url):
    """Return the server's counters; those of requests that have ended are published within a second or later."""
    from vllm_eesd.bench.top import fetch, parse

    deadline = time.monotonic() + 120
    earlier, before = None, parse(fetch(url), 0.0)
    while earlier is None or eesds(earlier) != eesds(before):
        assert time.monotonic() < deadline, before
        time.sleep(2.5)
        earlier, before = before, parse(fetch(url), 0.0)
    return before


def once_emitted(url, number):
    """Return the server's counters as soon as rounds have emitted so many tokens."""
    from vllm_eesd.bench.top import fetch, parse

    deadline = time.monotonic() + 60
    while (after := parse(fetch(url), 10.0)).values[EMITTED] < number:
        assert time.monotonic() < deadline, after
        time.sleep(0.2)
    return after


def top(server):
    """Return what `eesd top` shows at two looks."""
    command = [sys.executable, "-m", "vllm_eesd.cli", "top", "--url", server, "--interval", "0.2", "--count", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_eesd_counts_are_at_the_metrics_endpoint_and_top_shows_them(server, client):
    from vllm_eesd.bench.top import between

    url = f"{server}/metrics"
    before = settled(url)
    # A fixed length: whether drafting pays at this moment on this machine is not the question here.
    options = {"ignore_eos": True, "vllm_xargs": {"eesd_max_draft_tokens": 8}}
    complete(client, PROMPTS[1], max_tokens=200, extra_body=options)
    after = once_emitted(url, before.values[EMITTED] + 199)
    figures = between(before, after)
    # The first token comes from the prompt's forward pass, which is no round.
    assert after.values[EMITTED] - before.values[EMITTED] == 199
    assert figures["own"] and figures["goodput"] == 20.0
    assert 1 < figures["acceptance_length"] < 9 and 0 < figures["speedup"] < 20
    assert sum(figures["lengths"]) == pytest.approx(1)
    shown = top(server)
    assert shown.count("estimated speedup over plain") == 2 and "EESD's own counters are not" not in shown


@pytest.mark.feature("`/pause` and `/resume` while requests are streamed", "the same answers; no step has taken it")
@pytest.mark.parametrize(("how", "num_recomputed"), [("mode=keep", 3), ("mode=keep&clear_cache=false", 0)])
def test_a_pause_while_requests_are_streamed(server, client, expected, how, num_recomputed):
    """Two seconds and more without a token: these are in no counter, and `eesd top` shows that nothing runs.

    A cleared cache preempts what runs: the token after a text that was computed again is no round's.
    """
    from vllm_eesd.bench.top import between

    num_tokens, prompts = 900, PROMPTS[:3]
    pieces = [[] for _ in prompts]

    def stream(number):
        options = {"max_tokens": num_tokens, "stream": True, "extra_body": {"ignore_eos": True}}
        for chunk in complete(client, prompts[number], **options):
            pieces[number] += [choice.text for choice in chunk.choices]

    def post(what):
        urllib.request.urlopen(urllib.request.Request(f"{server}/{what}", method="POST"), timeout=60).read()

    def ask(pause):
        """Return (texts, seconds that none was written in)."""
        began, paused_s = time.monotonic(), 0.0
        for of_one in pieces:
            of_one.clear()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            streams = [pool.submit(stream, number) for number in range(len(prompts))]
            if pause:
                while not all(len(of_one) > 5 for of_one in pieces):
                    time.sleep(0.01)
                post(f"pause?{how}")
                paused = time.monotonic()
                time.sleep(2.0)
                written = [*map(len, pieces)]
                shown = top(server)
                assert [*map(len, pieces)] == written and not any(one.done() for one in streams)
                assert len(re.findall(r"goodput, tokens/s +0\.0 ", shown)) == 2, shown
                assert len(re.findall(r"estimated speedup over plain +- ", shown)) == 2, shown
                paused_s = time.monotonic() - paused
                post("resume")
            for one in streams:
                one.result()
        return ["".join(of_one) for of_one in pieces], time.monotonic() - began - paused_s

    texts, _ = ask(pause=False)
    assert all(text.startswith(start) for text, start in zip(texts, expected, strict=False))
    before = settled(f"{server}/metrics")
    paused_texts, running_s = ask(pause=True)
    assert paused_texts == texts
    number = before.values[EMITTED] + len(prompts) * (num_tokens - 1) - num_recomputed
    after = once_emitted(f"{server}/metrics", number)
    assert after.values[EMITTED] == number
    assert 0 < after.values["eesd:decode_seconds_total"] - before.values["eesd:decode_seconds_total"] < running_s
    assert 0 < between(before, after)["speedup"] < 20
