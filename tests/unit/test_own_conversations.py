"""Conversations of the target's own: its answers are its own to the token, made once, and every command reads them."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_chat import CHATML, FORGETFUL, chat_tokenizer

from vllm_eesd.distill import calibrate, probe, regenerate
from vllm_eesd.distill.answers import Sampling, Ways, answer, answer_prompts, answered, user_turns, ways_of
from vllm_eesd.distill.held_out import measure
from vllm_eesd.distill.model import new_head
from vllm_eesd.distill.regenerate import Asking, OwnConversations, OwnTurns
from vllm_eesd.distill.run import run
from vllm_eesd.distill.target import load_target
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig

VOCAB, SEQ_LEN, END = 64, 32, 2
# Sums of a few hundred float32 terms in another order.
FLOAT32_TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chat_dir(model_dir, tmp_path_factory):
    """The tiny target with a tokenizer that has a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(model_dir, directory)
    chat_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def target(chat_dir):
    return load_target(str(chat_dir), 1, "cpu")


def talk(*turns) -> list[dict[str, str]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(turns)]


TALKS = [
    talk(f"say {number} a", "no", f"and {number}?", "none") if number % 3 else talk(f"{number}.")
    for number in range(30)
]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in TALKS))
    return path


def make_args(chat_dir, output, **changes) -> Namespace:
    given = {"model": str(chat_dir), "exit_layer": 1, "data": [], "output": str(output), "steps": 2, "batch": 4}
    given |= {"seq_len": SEQ_LEN, "lr": 3e-3, "generator": "transformers", "answer_tokens": 12, "head_layers": 1}
    return Namespace(**(given | changes))


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert len(message.splitlines()) == 1 and all(word in message for word in words), message


@torch.no_grad()
def greedy(target, prompt, limit) -> list[int]:
    """What the target says, one token after the other, without a cache or padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


def some_prompts(count) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(6, VOCAB, rng.integers(1, 20)).tolist() for _ in range(count)]


def test_answers_are_the_targets_own(target):
    """Of prompts of all lengths together, some of which end early and leave the batch."""
    prompts, told = some_prompts(40), []
    limits = [3 + row % 30 for row in range(40)]
    said = answer(target, prompts, [0.0] * 40, limits, [END], seed=0, tell=told.append)
    assert said == [greedy(target, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    assert told == [32, 40]
    # Any other token may be an end as well, and belongs to the answer.
    row = max(range(40), key=lambda row: len(said[row]))
    ends = [END, said[row][1]]
    assert answer(target, [prompts[row]], [0.0], [9], ends, seed=0) == [said[row][: said[row].index(ends[1]) + 1]]


def test_sampled_answers(target):
    prompts = some_prompts(8)

    def sample(seed=3, temperatures=(0.0, 1.0), **how):
        return answer(target, prompts, list(temperatures) * 4, [20] * 8, [END], seed, **how)

    plain, first, second, other = sample(temperatures=(0.0, 0.0)), sample(), sample(), sample(seed=4)
    assert first == second != other
    assert first[::2] == plain[::2] and first[1::2] != plain[1::2]
    # Of the one likeliest token, or of the likeliest that make up next to nothing, nothing else can come.
    assert sample(top_k=1) == sample(top_p=1e-6) == plain


def test_answered_marks_the_answer_only(target):
    prompts = some_prompts(3)
    for prompt, said in zip(prompts, answered(target, prompts, 10, 0.0, [END], seed=0), strict=True):
        assert said.ids.tolist() == prompt + greedy(target, prompt, 10)
        assert said.answers.tolist() == [place >= len(prompt) for place in range(len(said.ids))]


def test_prompts_are_what_users_say_last():
    tokenizer = chat_tokenizer()
    messages = talk("a", "b", "c")
    assert user_turns(messages) == [0, 2] and user_turns([*messages, messages[0]]) == [0, 3]
    prompts = answer_prompts(tokenizer, [messages, talk("d")], 9, 100)
    assert [tokenizer.decode(prompt)[-16:] for prompt in prompts] == [f"{x}<|end|>\n<|assistant|>"[-16:] for x in "acd"]
    assert len(answer_prompts(tokenizer, [messages, talk("d")], 2, 100)) == 2
    refused(lambda: answer_prompts(tokenizer, [messages], 9, 5), "2 user turns", "5 tokens")


def test_ways_of_a_target(chat_dir, target, tmp_path):
    assert ways_of(str(chat_dir), target.config, chat_tokenizer()) == Ways(Sampling(), [END])
    shutil.copytree(chat_dir, tmp_path / "target")
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [END, 7], "do_sample": True}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(given))
    ways = ways_of(str(tmp_path / "target"), target.config, chat_tokenizer())
    assert ways == Ways(Sampling(0.6, 0.9, 20), [END, 7])


def asking(target, template=CHATML, **changes) -> Asking:
    given = {"temperatures": [1.0], "answer_tokens": 12, "longest": 128, "seed": 0, "weights": target.fingerprint}
    return Asking(chat_tokenizer(template), Ways(Sampling(), [END]), **(given | changes))


def test_every_turn_is_answered_anew(target, tmp_path):
    own = OwnConversations(tmp_path, asking(target), TALKS)
    own.make("transformers", partial(answer, target))
    rows = list(own.journal.rows())
    tokenizer = chat_tokenizer()
    assert len(rows) == len(TALKS) and {row["temperature"] for row in rows} == {0.0, 1.0}
    for number, (row, asked, said) in enumerate(zip(rows, TALKS, own.conversations(), strict=True)):
        assert row["temperature"] == number % 2 and said.ids.tolist() == row["ids"]
        # Up to an answer without an end all users are answered, and nothing of the file's own answers is left.
        whole = row["finished"]
        assert row["messages"][::2] == asked[::2][: len(row["answers"])] and len(row["messages"]) == 2 * len(
            row["answers"]
        )
        assert not whole or len(row["answers"]) == len(asked[::2])
        for turn, (start, end) in enumerate(row["answers"]):
            assert said.answers[start:end].all() and not said.answers[start - 1]
            if number % 2 == 0:
                assert row["ids"][start:end] == greedy(target, row["ids"][:start], 12)
            if turn == 0:
                assert tokenizer.decode(row["ids"][:start]) == tokenizer.apply_chat_template(
                    asked[:1], tokenize=False, add_generation_prompt=True
                )
            else:
                between = row["ids"][row["answers"][turn - 1][1] : start]
                assert tokenizer.decode(between) == f"\n<|user|>{asked[2]['content']}<|end|>\n<|assistant|>"
    assert any(len(row["answers"]) == 2 for row in rows) and any(not row["finished"] for row in rows)


def test_a_conversation_that_cannot_go_on_ends(target, tmp_path):
    """The template leaves out the first turn where a second follows: what the target read is no beginning of that."""
    own = OwnConversations(tmp_path, asking(target, FORGETFUL), TALKS[:6])
    own.make("transformers", partial(answer, target))
    assert [len(row["answers"]) for row in own.journal.rows()] == [1] * 6
    short = OwnConversations(tmp_path / "short", asking(target, longest=30), TALKS[:6])
    short.make("transformers", partial(answer, target))
    assert all(len(row["ids"]) <= 30 for row in short.journal.rows())


def test_interrupted_and_resumed_to_the_same_bytes(target, tmp_path, monkeypatch):
    monkeypatch.setattr(regenerate, "BATCH", 8)
    whole = OwnConversations(tmp_path / "whole", asking(target), TALKS)
    whole.make("transformers", partial(answer, target))

    def interrupted(*args, **how):
        if how["seed"] // 1_009 == 2:
            raise KeyboardInterrupt
        return answer(target, *args, **how)

    cut = OwnConversations(tmp_path / "cut", asking(target), TALKS)
    with pytest.raises(KeyboardInterrupt):
        cut.make("transformers", interrupted)
    assert cut.journal.batches == 2 and not cut.is_complete
    with cut.journal.path.open("ab") as file:
        file.write(b'{"messages": [')  # killed while it wrote
    again = OwnConversations(tmp_path / "cut", asking(target), TALKS)
    calls = []
    again.make("transformers", lambda *args, **how: calls.append(how["seed"]) or answer(target, *args, **how))
    assert again.is_complete and min(calls) // 1_009 == 2
    for name in ("regenerated.jsonl", "regenerated.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for other in (
        OwnConversations(tmp_path / "cut", asking(target, temperatures=[0.5]), TALKS),
        OwnConversations(tmp_path / "cut", asking(target, weights=1.0), TALKS),
        OwnConversations(tmp_path / "cut", asking(target, CHATML + " "), TALKS),
        OwnConversations(tmp_path / "cut", asking(target), TALKS[1:]),
    ):
        refused(lambda other=other: other.make("transformers", None), "regenerated.jsonl", "other settings", "remove")
    refused(lambda: again.make("vllm", None), "regenerated.jsonl", "remove")


def test_the_target_asks_itself(target, tmp_path, monkeypatch):
    monkeypatch.setattr(regenerate, "BATCH", 64)
    prefix = regenerate.user_prefix(chat_tokenizer())[0]
    asked = []

    def ask(prompts, temperatures, *args, **how):
        assert prompts == [prefix] * 64 and set(temperatures) == {1.0}
        said = answer(target, prompts, temperatures, *args, **how)
        asked.extend(said)
        return said

    turns = OwnTurns(tmp_path, asking(target), 20)
    turns.make("transformers", ask)
    texts = [messages[0]["content"] for messages in turns.messages()]
    assert len(texts) == 20 == len({" ".join(text.lower().split()) for text in texts}) and turns.is_complete
    ended = {chat_tokenizer().decode(ids[:-1]).strip() for ids in asked if ids[-1] == END}
    assert set(texts) <= ended and not any("<" in text for text in texts) and all(map(str.strip, texts))
    again = OwnTurns(tmp_path, asking(target), 20)
    again.make("transformers", None)
    assert again.messages() == turns.messages()


@pytest.mark.parametrize(
    "said", [[END], [8, 8], [4, 8, END], [32 + 6, END]], ids=["empty", "endless", "another role", "no letter"]
)
def test_what_is_no_turn_is_dropped(target, tmp_path, said):
    turns = OwnTurns(tmp_path, asking(target), 20)
    refused(lambda: turns.make("transformers", lambda prompts, *_, **__: [said] * len(prompts)), "asks nothing")
    same = OwnTurns(tmp_path / "same", asking(target), 20)
    same.make("transformers", lambda prompts, *_, **__: [[8, 9, END]] * len(prompts))
    assert same.messages() == [talk("cd")] or len(same.messages()) == 1
    again = OwnTurns(tmp_path / "same", asking(target), 20)
    assert again.is_complete, "it had no more to ask, and what it answers must stay the same"
    again.make("transformers", None)
    assert again.messages() == same.messages()


def test_a_head_is_made_of_conversations(in_bfloat16, chat_dir, talks, tmp_path, capsys):
    assert run(make_args(chat_dir, tmp_path / "head", data=[str(talks)], train_on="all")) == 0
    assert ExitHeadConfig.load(tmp_path / "head").exit_layer == 1
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["data"]["conversations"]["tokens"] > 500 and record["after"].keys() == {"text", "greedy"}
    assert "conversations: 28 to train on, 2 held out" in capsys.readouterr().out


def test_a_head_is_made_of_the_targets_answers(in_bfloat16, chat_dir, talks, tmp_path, capsys):
    more = {"data": [str(talks)], "regenerate": True, "work": str(tmp_path / "work")}
    assert run(make_args(chat_dir, tmp_path / "head", **more)) == 0
    assert "regenerating: " in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "work" / "regenerated.jsonl").read_text().splitlines()]
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["data"]["conversations"]["tokens"] == sum(len(row["ids"]) for row in rows)
    refused(lambda: run(make_args(chat_dir, tmp_path / "head", **more, temperature=[0.3])), "regenerated.jsonl")


def test_a_head_is_made_of_nothing_but_the_target(in_bfloat16, chat_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regenerate, "BATCH", 64)
    work = tmp_path / "work"
    assert run(make_args(chat_dir, tmp_path / "head", turns=24, answer_tokens=40, work=str(work))) == 0
    assert len((work / "regenerated.jsonl").read_text().splitlines()) == 22  # every 20th is held out
    assert "asking itself: " in capsys.readouterr().out and (tmp_path / "head" / "model.safetensors").is_file()


def test_what_cannot_be_trained_on(model_dir, chat_dir, talks, tmp_path):
    refused(lambda: run(make_args(model_dir, tmp_path / "head")), "data is empty", "chat template")
    refused(lambda: run(make_args(chat_dir, tmp_path / "head", self_generate=1)), "data is empty")
    (tmp_path / "users.jsonl").write_text(20 * (json.dumps({"messages": talk("a b c d e f g h i j")}) + "\n"))
    refused(lambda: run(make_args(chat_dir, tmp_path / "head", data=[str(tmp_path / "users.jsonl")])), "--regenerate")
    (tmp_path / "text.txt").write_text("abc " * 2_000)
    texts = make_args(chat_dir, tmp_path / "head", data=[str(tmp_path / "text.txt")], regenerate=True)
    refused(lambda: run(texts), "regenerate", "no conversations")
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"messages": TALKS[0]}) + "\n")
    refused(lambda: run(make_args(chat_dir, tmp_path / "head", data=[str(few)])), "data", "too few")
    assert not (tmp_path / "head").exists()


def test_measured_answers_weigh_by_their_length(target):
    head = new_head(target, "last")
    prompts = some_prompts(2)
    said = [
        answered(target, prompts[:1], 20, 0.0, [], seed=0)[0],
        answered(target, prompts[1:], 12, 0.0, [], seed=0)[0],
    ]
    parts = [measure(target, head, [one]) for one in said]
    # What follows the last token is not known: each token of an answer is predicted once.
    lengths = [20, 12]
    whole = sum(part["kl"] * length for part, length in zip(parts, lengths, strict=True)) / sum(lengths)
    assert measure(target, head, said)["kl"] == pytest.approx(whole, abs=FLOAT32_TOLERANCE)


def test_calibrate_and_probe_read_conversations(in_bfloat16, chat_dir, talks, tmp_path, capsys):
    assert run(make_args(chat_dir, tmp_path / "head", data=[str(talks)])) == 0
    given = {"model": str(chat_dir), "windows": 6, "seq_len": SEQ_LEN, "json": str(tmp_path / "o.json")}
    given |= {"chat_template": None, "head": str(tmp_path / "head"), "data": [str(talks)]}
    assert calibrate.run(Namespace(**given)) == 0
    assert (
        json.loads((tmp_path / "o.json").read_text())["rounds"] > 0 and (tmp_path / "head/calibration.json").is_file()
    )
    (tmp_path / "text.txt").write_text("a text of some words. " * 40)
    assert calibrate.run(Namespace(**(given | {"data": [str(talks), str(tmp_path / "text.txt")]}))) == 0
    given |= {"text": [str(talks)], "head_layers": 1, "plot": None}
    assert probe.run(Namespace(**given)) == 0
    assert "verdict" in capsys.readouterr().out
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"messages": TALKS[0]}) + '\n{"messages": 5}\n')
    refused(lambda: calibrate.run(Namespace(**(given | {"data": [str(broken)]}))), f"{broken}, line 2")
    refused(lambda: probe.run(Namespace(**(given | {"text": [str(broken)]}))), f"{broken}, line 2")
    refused(lambda: run(make_args(chat_dir, tmp_path / "other", data=[str(broken)])), f"{broken}, line 2")
