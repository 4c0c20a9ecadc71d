"""The shipped prompts are what models/make makes, and what their names promise."""

import ast
import importlib
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, MODEL = ROOT / "models" / "prompts", ROOT / "models" / "eesd-code-10m"


@cache
def maker(name="make_workloads"):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "models" / "make"))
        return importlib.import_module(name)


@cache
def tokenizer():
    transformers = pytest.importorskip("transformers", reason="prompts are counted in the model's tokens")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def shipped(name):
    return [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def num_tokens(prompt):
    return len(tokenizer()(prompt["prompt"])["input_ids"])


def test_the_shipped_prompts_are_the_ones_made_here():
    made = maker().make_workloads(shipped("held_out_code"), 16, tokenizer())
    assert made == {name: shipped(name) for name in made}
    assert sum(path.stat().st_size for path in PROMPTS.iterdir()) < 350_000


def test_the_chat_questions_are_ten_of_each_of_eight_categories():
    lines = shipped("chat")
    assert lines == maker("make_chat").conversations()
    categories = Counter(line["category"] for line in lines)
    assert len(categories) == 8 and set(categories.values()) == {10}
    assert len({line["category"] for line in lines[:8]}) == 8  # whichever first ones are taken, all take part
    questions = [line["messages"][0]["content"] for line in lines]
    assert len(set(questions)) == 80 and all(len(question.split()) >= 7 for question in questions)
    assert all([message["role"] for message in line["messages"]] == ["user"] for line in lines)


def test_long_documents_ask_for_summaries_and_for_passages_that_stand_in_them():
    script = maker("make_long_documents")
    lines = shipped("long_documents")
    assert len(lines) == 12 and all("Apache-2.0" in line["source"] or "PSF-2.0" in line["source"] for line in lines)
    for line in lines:
        document, request = line["messages"][0]["content"].split("\n\n---\n\n")
        assert 6_000 < len(document) < 30_000  # of a larger vocabulary's tokens three to five characters each
        if line["category"] == "summary":
            assert request in script.SUMMARIES
        else:
            task, passage = request.split("\n\n", 1)
            assert task in script.EDITS and passage in document
            assert script.PASSAGE[0] - 4 <= len(passage) <= script.PASSAGE[1]
    assert Counter(line["category"] for line in lines) == {"summary": 6, "edit": 6}


def test_documents_are_cut_at_paragraphs_and_short_ones_are_refused():
    script = maker("make_long_documents")
    text = "\n\n".join(["one two"] * 10)
    assert script.cut(text, 7, lambda part: len(part.split())) == "\n\n".join(["one two"] * 3)
    assert script.cut(text, 22, lambda part: len(part.split())) == text
    with pytest.raises(ValueError, match="a document has 20 tokens, at least 32 are needed"):
        script.cut(text, 40, lambda part: len(part.split()))
    with pytest.raises(ValueError, match="no paragraph of 200 to 900 characters"):
        script.passage_of(text)
    source, told = script.module("statistics")
    assert "mean" in source and "/lib/python" not in source and "PSF-2.0" in told


def test_long_contexts_fill_the_positions_and_leave_room_for_64_tokens():
    positions = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    lengths = [num_tokens(prompt) for prompt in shipped("long_context")]
    assert all(1850 <= length <= positions - 64 for length in lengths)
    assert len({prompt["prompt"][-200:] for prompt in shipped("long_context")}) == len(lengths)


def test_too_little_code_for_a_long_context_is_refused():
    with pytest.raises(ValueError, match="too few to fill 1920 tokens"):
        maker().long_context(shipped("held_out_code")[:3], lambda text: num_tokens({"prompt": text}))


def test_a_conversation_ends_where_the_next_reply_starts():
    for prompt in shipped("multi_turn"):
        requests = [line for line in prompt["prompt"].splitlines() if line.startswith(("# Show me", "# Now call"))]
        assert len(requests) == 4 and prompt["prompt"].endswith(requests[-1] + "\n\n")
        before, after = prompt["prompt"].split(requests[1])[0], prompt["prompt"].split(requests[1])[1]
        old, new = requests[1].split("`")[1], requests[1].split("`")[3]
        assert old in before and new in after.split(requests[2])[0]


def test_the_mixture_is_a_third_of_each_in_turn():
    mixed = shipped("mixed")
    for start, name in enumerate(("held_out_code", "repetitive_code", "random_tokens")):
        assert mixed[start::3] == shipped(name)[:16]


FUNCTION = """@cache
def area(width, height=1):
    "Of a rectangle."
    return width * height + width"""


@pytest.mark.parametrize(
    "kind, asked, head",
    [
        (0, "Call `area` `area_copy` instead", "@cache\ndef area_copy(width, height=1):"),
        (1, "Add a parameter `verbose` before the others", "@cache\ndef area(verbose, width, height=1):"),
        (2, "Call `width` in it `width_copy` instead", "@cache\ndef area(width_copy, height=1):"),
    ],
)
def test_an_edit_shows_a_function_asks_for_a_change_and_begins_the_answer(kind, asked, head):
    made = maker("make_edits").edit({"prompt": FUNCTION, "source": "a.py:1-4"}, kind)
    assert made == {"prompt": f"{FUNCTION}\n\n\n# {asked}.\n{head}", "source": "a.py:1-4"}


def test_a_function_without_parameters_gets_one():
    _, changed = maker("make_edits").change("def area():\n    return 1", 1)
    assert changed == "def area(verbose):\n    return 1"


def test_the_shipped_edits_are_whole_functions():
    for prompt in shipped("edits"):
        code, answer = prompt["prompt"].split("\n\n\n# ")
        (function,) = ast.parse(code).body
        assert function.end_lineno == len(code.split("\n")) and "def " in answer
