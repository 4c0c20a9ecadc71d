"""Clients of a public chat model with its shipped head: what they ask for is answered as by plain vLLM.

SmolLM2-135M-Instruct calls no tools of its own accord, so it is made to.
"""

import pytest
from chat_server import ChatServer
from test_clients import CHOICE, JSON_OBJECT, JSON_SCHEMA, NAMED, REGEX, TOOLS

from vllm_eesd.public_model import public_model

OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
#: As the model's authors advise, and a seed.
SAMPLED = {"temperature": 0.7, "top_p": 0.95, "seed": 7}
QUESTIONS = ("What is the capital of Norway, and what is it known for?", "Count from 3 to 12, separated by commas.")
WISHES = (
    {},
    SAMPLED,
    JSON_SCHEMA,
    JSON_OBJECT | SAMPLED,
    REGEX,
    CHOICE,
    {"tools": TOOLS, "tool_choice": "required", "max_tokens": 48},
    {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 48} | SAMPLED,
)
BODIES = [
    {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24} | wish
    for question in QUESTIONS
    for wish in WISHES
]


@pytest.fixture(scope="module")
def model():
    try:
        return public_model()
    except ValueError as error:  # its package is not installed
        pytest.skip(str(error))


def answers_of(model, spec=None):
    with ChatServer(str(model.directory), spec, OPTIONS) as server:
        answers = server.ask(BODIES), server.ask(BODIES, stream=True)
        return answers, server.worker("eesd_stats") if spec else None


@pytest.mark.feature("a public chat model: JSON, grammars, tools", "the same answers, whole and streamed")
def test_a_client_is_answered_as_by_plain_vllm(model):
    (plain, plain_streamed), _ = answers_of(model)
    (whole, streamed), stats = answers_of(model, {"method": "eesd", "model": str(model.head)})
    assert (whole, streamed) == (plain, plain_streamed)
    for body, answer, joined in zip(BODIES, plain, plain_streamed, strict=True):
        # Of a call that is cut short plain vLLM says one thing whole and another streamed.
        assert answer == joined or answer["ends"] == "length" and "tools" in body, body
        assert answer.get("content") or answer.get("tool_calls"), body
    assert plain[WISHES.index(JSON_SCHEMA)]["content"][:1] == "{"
    assert any(answer["tool_calls"] for answer in plain_streamed)
    assert stats["accepted"] > 50 and not stats["drafter_faults"]
