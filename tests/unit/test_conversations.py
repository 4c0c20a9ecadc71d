"""Conversations: what a line may hold, how it is tokenised, and which tokens the assistant wrote."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_chat import BOS, CHATML, FORGETFUL, STERN, WITH_BOS, WITH_GENERATION, chat_tokenizer

from vllm_eesd.bench import engines
from vllm_eesd.bench.prompts import Prompt, read_prompts
from vllm_eesd.conversations import (
    conversation,
    is_conversation,
    parse,
    prompt_ids,
    read_chat_template,
    user_prefix,
)
from vllm_eesd.distill.data import read_corpus, read_sources

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes: hi"},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so"},
]


def said(tokenizer, ids) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def pieces(tokenizer, talk) -> list[str]:
    """The answers, each as text."""
    edges = np.flatnonzero(np.diff([0, *talk.answers.astype(int), 0])).reshape(-1, 2)
    return [said(tokenizer, talk.ids[first:end]) for first, end in edges]


def one_line(call) -> str:
    with pytest.raises(ValueError) as error:
        call()
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK[:2]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}, TALK[1]]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes: hi"}]},
        {"id": 7, "conversations": [{"from": "user", "value": "hi"}, {"from": "Assistant", "value": "yes: hi"}]},
        {"messages": None, "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes: hi"}]},
    ],
)
def test_formats(row):
    assert is_conversation(row) and parse(row, "f:1") == TALK[:2]


def test_a_column_that_is_empty_in_a_line_is_not_there():
    assert not is_conversation({"messages": None, "text": "hi"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "messages is no list of messages"),
        ({"messages": "hi"}, "messages is no list of messages"),
        (["hi"], "messages is no list"),
        ({"messages": ["hi"]}, "message 1 has no role and content"),
        ({"messages": [{"role": "user"}]}, "message 1 has no role and content"),
        ({"messages": [TALK[0], {"role": "robot", "content": "x"}]}, "message 2: role='robot' is not known"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1: role='list' is not known"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 1: content is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1: content is no text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "message 1: content is no text"),
        ({"messages": [TALK[1], TALK[0]]}, "the assistant speaks before any user"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user speaks"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "message 1: from='tool' is not known"),
        ({"conversations": [{"role": "user", "content": "x"}]}, "message 1 has no from and value"),
    ],
)
def test_a_broken_line_is_told_where_and_what_is_allowed(row, words):
    message = one_line(lambda: parse(row, "talks.jsonl, line 3"))
    assert message.startswith("talks.jsonl, line 3") and words in message and "allowed: " in message


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, WITH_GENERATION])
def test_answers_are_told_from_the_rest(template):
    tokenizer = chat_tokenizer(template)
    talk = conversation(tokenizer, TALK)
    rendered = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert said(tokenizer, talk.ids) == rendered and talk.ids.dtype == np.int64 and talk.answers.dtype == bool
    # The end marker is the model's, the line's end behind it the template's.
    assert pieces(tokenizer, talk) == ["yes: hi<|end|>", "so<|end|>"]
    for count, first in ((1, 0), (3, 1)):
        prompt = prompt_ids(tokenizer, TALK[: count + 1])
        assert prompt == prompt_ids(tokenizer, TALK[:count]) == talk.ids[: len(prompt)].tolist()
        assert (
            talk.answers[len(prompt)]
            and not talk.answers[len(prompt) - 1]
            and talk.answers[: len(prompt)].any() == first
        )


def test_spaces_that_a_template_strips_or_adds():
    stripped = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] | trim }} <|end|>{% endfor %}"
    tokenizer = chat_tokenizer(stripped + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    talk = conversation(tokenizer, [TALK[0], {"role": "assistant", "content": " yes\n"}])
    assert pieces(tokenizer, talk) == [" yes <|end|>"]


def test_an_answer_without_an_end_marker_ends_with_what_was_said():
    template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer = chat_tokenizer(template + "{% if add_generation_prompt %}a: {% endif %}")
    assert pieces(tokenizer, conversation(tokenizer, TALK)) == ["yes: hi", "so"]


@pytest.mark.parametrize("template", [CHATML, WITH_BOS])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_begins_once(template, adds_bos):
    """A server does not let the tokenizer add anything to what a template wrote; nor does anything here."""
    tokenizer = chat_tokenizer(template, adds_bos)
    once = int(template == WITH_BOS)
    for ids in (conversation(tokenizer, TALK).ids, prompt_ids(tokenizer, TALK), user_prefix(tokenizer)[0]):
        assert list(ids).count(tokenizer.bos_token_id) == once


def test_a_template_that_writes_it_twice_is_read_once():
    tokenizer = chat_tokenizer("{{ bos_token }}" + WITH_BOS)
    assert list(conversation(tokenizer, TALK).ids).count(tokenizer.bos_token_id) == 1
    assert pieces(tokenizer, conversation(tokenizer, TALK)) == ["yes: hi<|end|>", "so<|end|>"]


def test_templates_that_cannot_be_used():
    assert "changes message 2" in one_line(lambda: conversation(chat_tokenizer(FORGETFUL), TALK))
    assert pieces(chat_tokenizer(FORGETFUL), conversation(chat_tokenizer(FORGETFUL), TALK[:2])) == ["yes: hi<|end|>"]
    assert "roles must alternate" in one_line(lambda: conversation(chat_tokenizer(STERN), TALK))
    assert "--chat-template FILE" in one_line(lambda: prompt_ids(chat_tokenizer(None), TALK))
    assert "refuses" in one_line(lambda: conversation(chat_tokenizer("{% if %}"), TALK))


def test_a_template_of_a_file_comes_first(tmp_path):
    (tmp_path / "t.jinja").write_text(WITH_GENERATION)
    template = read_chat_template(tmp_path / "t.jinja")
    tokenizer = chat_tokenizer(CHATML)
    assert said(tokenizer, prompt_ids(tokenizer, TALK[:1], template)) == "<|user|>hi<|end|>\n<|assistant|>"
    assert pieces(tokenizer, conversation(tokenizer, TALK, template)) == ["yes: hi<|end|>", "so<|end|>"]
    assert read_chat_template(None) is None
    assert "chat_template" in one_line(lambda: read_chat_template(tmp_path / "none.jinja"))


def test_what_a_user_says_follows_the_prefix():
    prefix, end = user_prefix(chat_tokenizer(CHATML))
    assert (
        said(chat_tokenizer(), prefix) == "<|system|>be kind<|end|>\n<|user|>"
        and said(chat_tokenizer(), end) == "<|end|>"
    )


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_a_file_may_hold_texts_and_conversations(tmp_path):
    share_gpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    path = write(tmp_path / "mixed.jsonl", {"text": "one"}, {"messages": TALK}, "", {"prompt": "two"}, share_gpt)
    tokenizer = chat_tokenizer()
    corpus = read_corpus([path], tokenizer, 64)
    assert [said(tokenizer, tokens) for tokens in corpus.text] == ["one<|end|>two<|end|>"]
    assert [len(messages) for messages in corpus.messages] == [4, 2]
    assert pieces(tokenizer, corpus.conversations[1]) == ["b<|end|>"]
    # As plain text they come one after the other, behind all else.
    *_, last = read_sources([path], tokenizer, 64)
    assert last.tolist() == [*corpus.conversations[0].ids, *corpus.conversations[1].ids]
    only = read_corpus([write(tmp_path / "only.jsonl", {"messages": TALK})], tokenizer, 64)
    assert only.text == [] and len(only.conversations) == 1


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (CHATML, {"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        (CHATML, {"message": []}, "messages"),
        (CHATML, "{", "not JSON"),
        (FORGETFUL, {"messages": TALK}, "changes message"),
        (None, {"messages": TALK}, "--chat-template"),
    ],
)
def test_a_broken_line_of_a_data_file_has_its_number(tmp_path, template, row, words):
    path = write(tmp_path / "talks.jsonl", {"text": "fine"}, "", row)
    message = one_line(lambda: read_corpus([path], chat_tokenizer(template), 64))
    assert f"{path}, line 3" in message and words in message


@pytest.fixture
def as_target(monkeypatch):
    """Let prompts be encoded by a tokenizer of these tests."""

    def use(tokenizer):
        config = type("Config", (), {"get_text_config": lambda self: None})()
        monkeypatch.setattr(engines, "load_target", lambda model, progress: (config, tokenizer))
        return lambda prompts, template=None: engines.encode_prompts("m", prompts, 8, print, template)[1]

    return use


def test_prompts_are_conversations_or_texts(tmp_path, as_target):
    path = write(tmp_path / "p.jsonl", {"messages": TALK, "source": "s"}, {"prompt": "hi"}, {"prompt": BOS + "hi"})
    prompts = read_prompts(path)
    assert [(prompt.text, prompt.source) for prompt in prompts] == [("why?", "s"), ("hi", ""), (BOS + "hi", "")]
    tokenizer = chat_tokenizer(WITH_BOS)
    talk, text, marked = as_target(tokenizer)(prompts)
    assert talk == prompt_ids(tokenizer, TALK) and said(tokenizer, talk).endswith("why?<|end|>\n<|assistant|>")
    assert said(tokenizer, text) == said(tokenizer, marked) == "<s>hi"  # a completion, as ever, and one beginning


def test_a_prompt_is_a_users_turn_where_there_is_a_template(tmp_path, as_target):
    turn, raw = Prompt("hi", is_turn=True), Prompt("hi")
    tokenizer = chat_tokenizer()
    assert as_target(tokenizer)([turn, raw]) == [prompt_ids(tokenizer, TALK[:1]), tokenizer("hi")["input_ids"]]
    bare = chat_tokenizer(None)
    assert as_target(bare)([turn, raw]) == 2 * [bare("hi")["input_ids"]]
    (tmp_path / "t.jinja").write_text(CHATML)
    assert as_target(bare)([turn], str(tmp_path / "t.jinja")) == [prompt_ids(tokenizer, TALK[:1])]


def test_a_broken_prompt_has_its_line(tmp_path, as_target):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"messages": [{"role": "user"}]})
    assert f"{path}:2: message 1" in one_line(lambda: read_prompts(path))
    prompts = read_prompts(write(tmp_path / "q.jsonl", {"prompt": "a"}, {"messages": TALK}))
    assert "q.jsonl:2: messages need a chat template" in one_line(lambda: as_target(chat_tokenizer(None))(prompts))
