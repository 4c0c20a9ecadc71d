"""The page of a generation: every character of it is text, every round is there, and it needs nothing else."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_eesd import cli
from vllm_eesd.traces.dense import DenseRecorder, DenseTrace, write
from vllm_eesd.traces.page import Generation, figures, render
from vllm_eesd.traces.spell import spell

# Token ids are characters, so that any text can be a token sequence.
PROMPT = 'if a < b && c:\n    print("<script>alert(1)</script>")\n'
OUTPUT = "# $title </script> é\n\treturn x\n"


def decode(tokens):
    return "".join(map(chr, tokens))


def record(draft, accepted, own, at_s):
    return {
        "request": "0",
        "at_s": at_s,
        "draft": [ord(c) for c in draft],
        "copied": False,
        "confidences": [0.9 - 0.1 * n if n else None for n in range(len(draft))],
        "accepted": accepted,
        "emitted": [ord(c) for c in draft[:accepted] + own],
        "batch": 1,
        "draft_steps_ms": [0.5] * len(draft),
        "draft_rest_ms": 0.1 if draft else 0.0,
        "verify_ms": 3.0,
        "plain_ms": 2.5,
        "draft_step_ms": 0.4,
        "posterior_mean": 0.8,
        "posterior_interval": [0.6, 0.95],
    }


@pytest.fixture
def rounds():
    """Three bonus, two corrected and a plain round, and one that emits more than the output takes."""
    made, rest, at_s = [], OUTPUT[1:], 0.5
    plan = [("right", 5), ("wrong", 2), ("none", 0), ("right", 3), ("wrong", 0), ("right", 6)] + [("right", 5)] * 9
    for kind, length in plan:
        draft = rest[:length] + ("<%>" if kind == "wrong" else "")
        made.append(record(draft, min(length, len(rest)), (rest[length:] or "!")[0], at_s))
        rest, at_s = rest[length + 1 :], at_s + 0.006
        if not rest:
            return made
    raise AssertionError("the plan is too short")


@pytest.fixture
def page(rounds):
    first, spelled = spell(decode, [ord(c) for c in PROMPT], [ord(c) for c in OUTPUT], rounds)
    return render(Generation("a <model>", [("policy", "good & put")], PROMPT, first, spelled))


class Reader(HTMLParser):
    """Collects the text of #text, the spans of rounds, the scripts, and whatever loads something."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.text, self.rounds, self.scripts, self.loads = "", {}, [], []
        self._open, self._script = [], None
        self.feed(page)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loads += [tag] if tag in ("link", "img", "iframe", "object", "embed", "base") else []
        self.loads += [(tag, name) for name in attributes if name in ("src", "href", "srcset", "action", "onclick")]
        if tag == "script":
            self.scripts.append("")
        if tag in ("meta", "input"):
            return
        self._open.append((tag, attributes))
        if tag == "span" and "data-round" in attributes:
            self.rounds[int(attributes["data-round"])] = []

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "script":
            self.scripts[-1] += data
        if any(attributes.get("id") == "text" for _, attributes in self._open):
            self.text += data
            number = [a["data-round"] for _, a in self._open if "data-round" in a]
            if number:
                kind = [a["class"] for _, a in self._open if "token" in a.get("class", "")][0]
                self.rounds[int(number[0])].append((data, kind.removeprefix("token ")))


def test_the_text_is_the_prompt_and_the_output_whatever_they_hold(page):
    assert Reader(page).text == PROMPT + OUTPUT


def test_a_token_that_is_markup_stays_text(rounds):
    pieces = {1: "<b>&amp;", 2: "</span>", 3: "<script>x()</script>", 4: "'\""}
    made = record("", 0, "?", 0.0) | {"draft": [1, 2, 4], "confidences": [0.9] * 3, "accepted": 2, "emitted": [1, 2, 3]}
    first, spelled = spell(lambda tokens: "".join(map(pieces.get, tokens)), [], [4, 1, 2, 3], [made])
    read = Reader(render(Generation("t", [], "", first, spelled)))
    assert read.text == "".join(pieces[token] for token in (4, 1, 2, 3)) and len(read.scripts) == 2


def test_every_round_is_a_run_of_the_kind_it_was(page, rounds):
    read = Reader(page)
    assert sorted(read.rounds) == list(range(len(rounds)))
    kinds = [pieces[-1][1] for pieces in read.rounds.values()]
    assert kinds[:6] == ["bonus", "corrected", "plain", "bonus", "corrected", "bonus"]
    assert [kind for _, kind in read.rounds[0]] == ["accepted"] * 5 + ["bonus"]
    (data, *_) = read.scripts
    assert [token[1] for token in json.loads(data)[1]["drafted"]] == ["accepted"] * 2 + [
        "rejected",
        "unjudged",
        "unjudged",
    ]


def test_nothing_is_loaded_from_elsewhere(page):
    read = Reader(page)
    assert read.loads == [] and len(read.scripts) == 2
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page)
    assert "default-src 'none'" in page


def test_the_time_line_has_every_round_to_scale(page, rounds):
    groups = re.findall(r'<g data-round="(\d+)">(.*?)</g>', page)
    assert [int(number) for number, _ in groups] == list(range(len(rounds)))
    widths = dict(re.findall(r'<rect class="(draft|verify)" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', groups[0][1]))
    assert widths == {"draft": "2.600", "verify": "3.000"}


def test_the_figures_are_the_rounds_sums(rounds):
    shown = dict(figures(rounds))
    emitted = sum(len(r["emitted"]) for r in rounds)
    assert shown["tokens from rounds"] == str(emitted)
    total = sum(3.0 + 0.5 * len(r["draft"]) + (0.1 if r["draft"] else 0) for r in rounds)
    assert shown["estimated speedup"] == f"{2.5 * emitted / total:.2f}x"


def test_a_request_without_rounds_is_a_page_too():
    first, spelled = spell(decode, [ord("a")], [ord("b")], [])
    assert first == "b"
    assert Reader(render(Generation("t", [], "a", first, spelled))).text == "ab"


def test_an_output_that_ends_within_a_round_ends_the_text_there(rounds):
    output = [ord(c) for c in OUTPUT[:4]]
    first, spelled = spell(decode, [], output, rounds[:1])
    assert first + "".join(text for text, verdict in spelled[0]["drafted"] if verdict == "accepted") == OUTPUT[:4]
    assert spelled[0]["own"] == ""


def test_rounds_of_another_request_are_refused(rounds):
    with pytest.raises(ValueError, match="not those of an output of 3"):
        spell(decode, [], [1, 2, 3], rounds)


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """`eesd trace TRACE ...`: the page's text, or the error."""
    monkeypatch.setattr("vllm_eesd.bench.trace.load_target", lambda *_: (None, SimpleNamespace(decode=decode)))

    def run(*argv):
        if cli.main(["trace", *map(str, argv), "-o", str(tmp_path / "page.html")]) == 0:
            return Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
        return capsys.readouterr().err

    return run


def test_what_was_recorded_is_a_page_of_words(tmp_path, shown):
    """Drafts of three characters, of which those at even positions are right."""
    recorder, prompt, output = DenseRecorder(3), list(map(ord, PROMPT)), list(map(ord, OUTPUT))
    recorder.begin("a", prompt)
    for at, token in enumerate(output):
        draft = output[at + 1 : at + 4] if at % 2 == 0 else [*output[at + 1 : at + 2], 0, 0]
        recorder.add(["a"], [[token]], [draft], np.full((1, 3), 0.5, dtype=np.float32))
    (request,) = recorder.requests()
    write(tmp_path / "t.gz", DenseTrace("m", "w", 3, {}, [replace(request, prompt=None, emitted=None), request]))
    read = shown(tmp_path / "t.gz", "--request", 2)
    assert (PROMPT + OUTPUT).startswith(read.text) and len(read.text) > len(PROMPT + OUTPUT) - 5
    assert [kind for _, kind in read.rounds[0]] == ["accepted"] * 3 + ["bonus"]
    assert "line 1" not in shown(tmp_path / "t.gz") and "recorded without texts" in shown(tmp_path / "t.gz")
    assert "--request 3 is not in" in shown(tmp_path / "t.gz", "--request", 3)


def test_a_served_request_is_a_page_of_words(tmp_path, rounds, shown):
    lines = [{"format": "eesd-rounds", "version": 1}, *rounds, rounds[0] | {"request": "1"}]
    (tmp_path / "r").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert shown(tmp_path / "r", "--model", "m").text.startswith(OUTPUT[1:])
    assert len(shown(tmp_path / "r", "--model", "m", "--request", 2).rounds) == 1
    assert "--model is missing" in shown(tmp_path / "r")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(page, tmp_path, scheme):
    """The script runs: only it fills the panel; light is light and dark is dark."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}", "--window-size=900,700"]
    url = f"{(tmp_path / 'page.html').as_uri()}#round=2"
    picture = tmp_path / "page.png"
    subprocess.run([browser, *flags, f"--screenshot={picture}", url], timeout=120, capture_output=True, check=True)
    dumped = subprocess.run([browser, *flags, "--dump-dom", url], timeout=120, capture_output=True, check=True)
    dom = dumped.stdout.decode()
    assert "<h2>Round 2</h2>" in dom and "not judged" in dom and "round 2 of" in dom
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[:2] == (700, 900)
    corner = pixels[0, 0, :3].mean()
    assert corner > 0.9 if scheme == "light" else corner < 0.2
    assert len({tuple(row) for row in pixels[::7, ::7, :3].reshape(-1, 3).round(2)}) > 20, "more than an empty page"
