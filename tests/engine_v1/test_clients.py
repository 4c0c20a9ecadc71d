"""What clients of the OpenAI server ask for beside a text, whole and streamed: JSON, tools, thoughts, budgets of them.

A chat model that knows a few answers by heart is served by plain vLLM and with EESD, whose head is the target's own
last layer, which knows five of six tokens: most drafts are right, until a budget or a grammar wants something else.
"""

import contextlib
import itertools
import json
from pathlib import Path

import chat_target
import numpy as np
import pytest
from chat_server import ChatServer

from vllm_eesd.host.v1 import shared_noise, verification

SAME = "the same answers, whole and streamed"
SPEC = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}
OPTIONS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}
REGEX = {"structured_outputs": {"regex": r"\[[0-9]{1,3}(, [0-9]{1,3}){2,6}\]"}}
CHOICE = {"structured_outputs": {"choice": ["positive", "negative", "positively"]}}
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 64}
#: The prompt begins a thought; or none is expected, so that a grammar holds from the first token on.
THINKING = {"chat_template_kwargs": {"thinking": True}}
THOUGHTLESS = {"chat_template_kwargs": {"enable_thinking": False}}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 8}, days={"type": "integer"}),
    tool("get_time", zone={"type": "string", "maxLength": 8}),
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def asked(questions, *variants, **common):
    """Return the bodies of chat requests: every question with every variant."""
    return [
        {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 80} | common | variant
        for question, variant in itertools.product(questions.split(), variants)
    ]


#: Without what makes plain vLLM 0.32 itself end a request: a tool call in a thought behind which a grammar waits.
CASES = {
    "chat, reasoning parser": asked("sum weather both story list call tags", {}, SAMPLED),
    "response_format, JSON schema": asked("sum list", {}, SAMPLED, **JSON_SCHEMA | THOUGHTLESS),
    "response_format, JSON object": asked("story list", {}, SAMPLED, **JSON_OBJECT | THOUGHTLESS),
    "a grammar behind the thought": asked("sum story", JSON_SCHEMA, JSON_SCHEMA | SAMPLED, JSON_OBJECT, CHOICE),
    "tool_choice=auto, hermes parser": asked("weather both call tags", {}, SAMPLED, tools=TOOLS, tool_choice="auto"),
    "tool_choice=required": asked("sum list", {}, SAMPLED, THOUGHTLESS, tools=TOOLS, tool_choice="required"),
    "tool_choice of one function": asked("sum list", {}, SAMPLED, THOUGHTLESS, tools=TOOLS, tool_choice=NAMED),
    "thinking_token_budget": asked(
        "sum story",
        *({"thinking_token_budget": budget} | more for budget in (0, 6, 19) for more in ({}, SAMPLED)),
        {"thinking_token_budget": 5} | THINKING | SAMPLED,
    ),
    "thinking_token_budget, a grammar behind the thought": asked(
        "sum story", *(JSON_SCHEMA | more for more in ({}, SAMPLED, {"min_p": 0.05} | SAMPLED)), thinking_token_budget=7
    ),
}
#: Those of vLLM beside xgrammar, which it takes by itself.
BACKENDS = ("guidance", "outlines")
OF_BACKENDS = asked("sum list", JSON_SCHEMA, REGEX | SAMPLED, CHOICE | SAMPLED, **THOUGHTLESS)
OF_BACKENDS += asked("sum", JSON_SCHEMA)
#: Asked beside the others of EESD only; without a seed, so their answers are not compared. Budgets are here because
#: plain vLLM gives that of a request which has ended to the one that moves into its row.
COMPANY = asked("tags sum", {"temperature": 0.8}, {"temperature": 0.8, "thinking_token_budget": 4}, max_tokens=30)


def ask(server, bodies, stream=False, company=()):
    """Return the answers; as many requests at a time as the server runs."""
    answers, number = [], 16 - len(company)
    for first in range(0, len(bodies), number):
        some = bodies[first : first + number]
        answers += server.ask([*company, *some], stream)[len(company) :]
    return answers


@contextlib.contextmanager
def grammars_of(server, backend):
    """Have the server make its grammars by another backend."""
    config = server.engine.vllm_config.structured_outputs_config
    manager = server.engine.engine_core.engine_core.structured_output_manager

    def take(name):
        config.backend, manager.backend, manager.backend_name, manager._grammar_bitmask = name, None, None, None

    before = config.backend
    take(backend)
    try:
        yield
    finally:
        take(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("targets") / "chat"
    chat_target.write(directory)
    return str(directory)


@pytest.fixture(scope="module")
def plain(target, request):
    """Plain vLLM's answers: case -> (whole, streamed), of the cases that tests of this run are about."""
    tests = [item for item in request.session.items if item.module is request.module]
    names = {name for item in tests if hasattr(item, "callspec") for name in item.callspec.params.values()}
    answers = {}
    with ChatServer(target, options=OPTIONS) as server:
        for name in [*CASES, *BACKENDS]:
            if name in names:
                bodies = CASES.get(name, OF_BACKENDS)
                with grammars_of(server, name) if name in BACKENDS else contextlib.nullcontext():
                    answers[name] = ask(server, bodies), ask(server, bodies, stream=True)
    return answers


@pytest.fixture(scope="module")
def server(target, cloned_head, plain):
    """After plain vLLM's engine, whose end takes the process's groups away."""
    size = json.loads(Path(target, "config.json").read_text())["vocab_size"]
    head = cloned_head(target, 2, 2, [token for token in range(size) if token % 6])
    with ChatServer(target, SPEC | {"model": head}, OPTIONS) as server:
        yield server


def differing(server, bodies, expected):
    """Return (what was asked, its answer, the expected one) where these are not the same, whole or streamed."""
    answers = ask(server, bodies, company=COMPANY), ask(server, bodies, True, COMPANY)
    triples = [triple for both in zip(answers, expected, strict=True) for triple in zip(bodies, *both, strict=True)]
    return [triple for triple in triples if triple[1] != triple[2]]


def assert_same(server, bodies, expected):
    server.worker("eesd_reset_stats")
    assert differing(server, bodies, expected)[:1] == []
    stats = server.worker("eesd_stats")
    assert 0 < stats["accepted"] < stats["drafted"] and not stats["drafter_faults"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.feature(name, SAME)) for name in CASES])
def test_a_client_is_answered_as_by_plain_vllm(server, plain, name):
    assert_same(server, CASES[name], plain[name])


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.feature(f"structured output, {name}", SAME)) for name in BACKENDS]
)
def test_grammars_of_other_backends(server, plain, backend):
    with grammars_of(server, backend):
        assert_same(server, OF_BACKENDS, plain[backend])


@pytest.mark.feature("structured output, lm-format-enforcer", "not in this vLLM")
def test_lm_format_enforcer_does_not_work_with_plain_vllm():
    """It looks for a module that vLLM has no more."""
    with pytest.raises(ImportError):
        import lmformatenforcer.integrations.vllm  # noqa: F401


def test_what_is_asked_shows_in_the_answers(plain):
    """Grammars, parsers and budgets did their work, or the tests above would compare texts."""
    whole = {name: answers for name, (answers, _) in plain.items()}
    for name, answers in whole.items():
        assert sum("refused" in answer for answer in answers) <= len(answers) / 2, name
    for name in {"response_format, JSON schema", *BACKENDS} & whole.keys():
        assert any(answer.get("content", "")[:1] == "{" for answer in whole[name]), name
    if calls := whole.get("tool_choice=auto, hermes parser"):
        assert [len(answer["tool_calls"]) for answer in calls[::2]] == [1, 2, 2, 0]
    for name in {"tool_choice=required", "tool_choice of one function"} & whole.keys():
        assert any(answer.get("tool_calls") for answer in whole[name]), name
    if budgeted := whole.get("thinking_token_budget"):
        nothing, some, more = (len(budgeted[number]["reasoning"]) for number in (7, 9, 11))
        assert nothing < some < more


def by_the_row_before(sample_rows, server):
    """Plant: a request is sampled from what the grammar of the row before has left."""
    return lambda sampler, logits, *args: sample_rows(sampler, logits.roll(1, 0), *args)


def as_if_all_were_emitted(set_back, server):
    """Plant: a thought is counted, and noise is drawn, to the last draft and not to the last one accepted."""

    def keep(self, sampled):
        num_rows = np.array(self.drafts.num_draft_tokens)[:, None] + 1
        set_back(self, np.where(np.arange(sampled.shape[1]) < num_rows, 0, -1))

    return keep


def one_more_after_a_call(accept_greedy, server):
    """Plant: what was drafted after the end of a tool call is accepted, whatever the target says."""
    end = server.engine.get_tokenizer().convert_tokens_to_ids("</tool_call>")

    def keep(best, metadata):
        kept = accept_greedy(best, metadata)
        after = (kept[:, :-1] == end) & (kept[:, 1:] >= 0)
        kept[:, 1:][after] = 5
        return kept

    return keep


PLANTED = [
    (by_the_row_before, shared_noise, "sample_rows", "response_format, JSON schema"),
    (as_if_all_were_emitted, shared_noise.SampledRows, "set_back", "thinking_token_budget"),
    (one_more_after_a_call, verification, "accept_greedy", "tool_choice=auto, hermes parser"),
]


@pytest.mark.parametrize(("plant", "owner", "attribute", "name"), PLANTED, ids=[of[0].__name__ for of in PLANTED])
def test_a_wrong_verification_is_noticed(server, plain, plant, owner, attribute, name, monkeypatch):
    monkeypatch.setattr(owner, attribute, plant(getattr(owner, attribute), server))
    assert differing(server, CASES[name], plain[name])
