"""What a server's metrics endpoint says, from a recorded answer, and what `eesd top` shows of it."""

import http.server
import re
import threading
import types
from pathlib import Path

import pytest

from vllm_eesd import cli
from vllm_eesd.bench import top
from vllm_eesd.bench.top import DRAFTS, GENERATED, Snapshot, Watch, between, fetch, parse, sparkline

#: Of a server of the embedded model with `--speculative-config eesd`, abridged to what is read and a little more.
RECORDED = (Path(__file__).parent / "metrics.txt").read_text(encoding="utf-8")
ZERO = Snapshot(0.0, {})


def without_eesd(text):
    return "".join(line for line in text.splitlines(keepends=True) if "eesd:" not in line)


def raised(text, name, by):
    """The text with every sample of that name raised by so much."""
    assert re.search(rf"^{name}\{{", text, re.M), name
    return re.sub(rf"^({name}\{{.*\}}) (\S+)$", lambda m: f"{m[1]} {float(m[2]) + by}", text, flags=re.M)


def eesds(values, what):
    return values[f"eesd:{what}_total"]


def test_a_recorded_answer_is_read():
    snapshot = parse(RECORDED, 10.0)
    figures, values = between(ZERO, snapshot), snapshot.values
    assert snapshot.model == "code" and figures["own"]
    rounds, emitted, accepted = (eesds(values, what) for what in ("rounds", "emitted_tokens", "accepted_tokens"))
    # Requests' first tokens come from their prompts' forward passes; everything else from rounds.
    assert emitted == rounds + accepted <= values[GENERATED]
    assert figures["goodput"] == values[GENERATED] / 10
    assert figures["acceptance_length"] == emitted / rounds
    assert figures["acceptance_rate"] == accepted / eesds(values, "drafted_tokens")
    lengths, positions = figures["lengths"], figures["positions"]
    assert sum(length * share for length, share in enumerate(lengths)) == pytest.approx(figures["draft_length"])
    assert sum(lengths) == pytest.approx(1) and figures["without_draft"] == lengths[0]
    assert figures["speedup"] == eesds(values, "plain_seconds") / eesds(values, "decode_seconds")
    assert len(positions) == 8 and positions == sorted(positions, reverse=True)
    assert sum(positions) == pytest.approx(accepted / values[DRAFTS])


def test_figures_are_of_the_time_between_two_looks():
    later = RECORDED
    for name, by in (("rounds", 10), ("drafted_tokens", 40), ("accepted_tokens", 20), ("emitted_tokens", 30)):
        later = raised(later, f"eesd:{name}_total", by)
    later = raised(raised(later, "eesd:decode_seconds_total", 2), "eesd:plain_seconds_total", 5)
    later = raised(later, GENERATED, 31)
    figures = between(parse(RECORDED, 100.0), parse(later, 102.0))
    assert (figures["goodput"], figures["acceptance_rate"], figures["acceptance_length"]) == (15.5, 0.5, 3.0)
    assert (figures["draft_length"], figures["speedup"]) == (4.0, pytest.approx(2.5))


def test_engines_are_summed():
    second = "\n".join(
        re.sub(r'engine="0"', 'engine="1"', line) for line in RECORDED.splitlines() if 'engine="0"' in line
    )
    once, twice = parse(RECORDED, 1.0), parse(f"{RECORDED}{second}\n", 1.0)
    assert twice.values == {name: value * (1 if name == "python_info" else 2) for name, value in once.values.items()}
    assert between(ZERO, twice)["lengths"] == between(ZERO, once)["lengths"]


def test_without_our_own_counters_vllms_are_taken_for_what_they_are():
    snapshot = parse(without_eesd(RECORDED), 10.0)
    figures, values = between(ZERO, snapshot), snapshot.values
    assert not figures["own"] and figures["lengths"] == []
    assert figures["speedup"] is None and figures["without_draft"] is None
    drafted, accepted = (values[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    assert figures["acceptance_rate"] == accepted / drafted and figures["draft_length"] == drafted / values[DRAFTS]
    assert figures["acceptance_length"] == values[GENERATED] / (values[GENERATED] - accepted)


def test_a_server_without_speculation_has_goodput_only():
    text = without_eesd("".join(line for line in RECORDED.splitlines(keepends=True) if "spec_decode" not in line))
    figures = between(ZERO, parse(text, 10.0))
    assert figures["goodput"] > 0 and figures["acceptance_rate"] is None and figures["positions"] == []


def test_a_restart_begins_anew():
    after = parse(RECORDED, 10.0)
    larger = {name: value + 1000 for name, value in after.values.items()}
    assert between(Snapshot(0.0, larger), after) == between(ZERO, after)


def test_a_gauge_that_falls_is_no_restart():
    before = parse(raised(RECORDED, "vllm:num_requests_running", 5), 8.0)
    assert between(before, parse(RECORDED, 10.0))["goodput"] == 0


@pytest.mark.parametrize("text", ["", "python_info 1\n", "{\n"])
def test_another_services_metrics_are_refused(text):
    with pytest.raises(ValueError):
        parse(text, 0.0)


def test_an_address_without_a_server_is_one_line():
    for address in ("http://127.0.0.1:9/metrics", "host:8000/metrics"):
        with pytest.raises(ValueError, match="no metrics .*allowed: the address of a running vLLM server"):
            fetch(address)


def test_sparkline():
    assert sparkline([0.0, None, 7.0, 3.0]) == "▁ █▄"
    assert sparkline([None, 0.0]) == ""


@pytest.fixture
def server():
    """URL of a server whose /metrics is the recorded text, more by a round of four tokens at every look."""

    class Handler(http.server.BaseHTTPRequestHandler):
        looks = 0

        def do_GET(self):
            Handler.looks += 1
            text = raised(RECORDED, "vllm:generation_tokens_total", 4 * Handler.looks)
            for name, by in (("rounds", 1), ("drafted_tokens", 4), ("accepted_tokens", 3), ("emitted_tokens", 4)):
                text = raised(text, f"eesd:{name}_total", by * Handler.looks)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{service.server_port}"
        service.shutdown()


def test_top_shows_a_server(server, capsys):
    assert cli.main(["top", "--url", f"{server}/", "--count", "2", "--interval", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("eesd top  code") == 2
    assert re.search(r"drafts accepted +75%", shown) and re.search(r"tokens per round +4\.00", shown)
    assert "EESD's own counters are not" not in shown


def test_a_server_that_goes_away_is_said_and_the_view_stays(server, monkeypatch):
    from rich.console import Console

    clock = iter(range(100))
    monkeypatch.setattr(top.time, "monotonic", lambda: float(next(clock)))
    watch = Watch(f"{server}/metrics", 10.0)
    watch.look()
    watch.look()
    watch.url = "http://127.0.0.1:9/metrics"
    watch.look()
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(watch.view())
    shown = console.export_text()
    assert "no answer" in shown and re.search(r"goodput, tokens/s +4\.0", shown)


def test_nobody_there_is_one_line(capsys):
    assert cli.main(["top", "--url", "http://127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("eesd: error: http://127.0.0.1:9/metrics: no metrics") and error.count("\n") == 1


def test_a_pause_of_a_minute(monkeypatch):
    """Nothing is counted meanwhile: the speedup afterwards is that of what ran, and none is shown of the pause."""
    answers, now = [RECORDED], [0.0]
    monkeypatch.setattr("vllm_eesd.bench.top.fetch", lambda url: answers[-1])
    monkeypatch.setattr(top, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    watch = Watch("http://x/metrics", 10.0)

    def look(after_s, tokens=0):
        now[0] += after_s
        text = raised(answers[-1], "eesd:decode_seconds_total", tokens / 50)
        text = raised(raised(text, "eesd:plain_seconds_total", tokens / 25), "vllm:generation_tokens_total", tokens)
        answers.append(text)
        watch.look()
        return watch.recent()

    look(0)
    assert look(1, 50)["speedup"] == pytest.approx(2.0)
    paused = [look(1) for _ in range(60)]
    assert paused[-1]["goodput"] == 0 and paused[-1]["speedup"] is None
    assert look(1, 50)["speedup"] == pytest.approx(2.0)
    assert look(60, 50)["speedup"] == pytest.approx(2.0)  # it did not answer meanwhile
    watch.view()
