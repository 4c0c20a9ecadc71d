"""Two engines at one address, `vllm serve -dp 2`: the same answers; each engine's numbers and files are its own."""

import concurrent.futures
import json
import time

import pytest
from test_server import PROMPTS
from vllm_serve import metric, samples, serving

from vllm_eesd.traces.read import read

LENGTH, LIMIT_S = 48, 240
FILES = {"state_file": ("state.json", "state.1.json"), "trace_file": ("rounds.jsonl", "rounds.1.jsonl")}


@pytest.fixture(scope="module")
def asked(embedded_model, plain_answers):
    """(the prompts, token ids; what plain vLLM answers)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    (answers,) = plain_answers(str(embedded_model), (prompts, LENGTH), max_model_len=512)
    return prompts, answers


@pytest.fixture(scope="module", params=[("--api-server-count", "1"), ()], ids=["one API server", "by default two"])
def served(request, embedded_model, tmp_path_factory):
    """(address, the directory that its engines write to)."""
    directory = tmp_path_factory.mktemp("engines")
    args = {field: str(directory / names[0]) for field, names in FILES.items()}
    options = ["-dp", "2", *request.param, "--enforce-eager", "--max-model-len", "512"]
    options += ["--speculative-config", json.dumps({"method": "eesd"} | args)]
    with serving(embedded_model, *options, log=tmp_path_factory.mktemp("log") / "log") as address:
        yield address, directory


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def emitted_by(address, engine):
    return metric(address, "eesd:emitted_tokens_total", engine=engine)


@pytest.mark.feature("data parallel, one API server or several", "the same answers; a series and files of each engine")
def test_eight_clients_of_two_engines(served, asked):
    import openai

    address, directory = served
    prompts, expected = asked
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)
    wishes = {"ignore_eos": True, "return_token_ids": True}

    def answer(prompt):
        common = {"model": "code", "max_tokens": LENGTH, "temperature": 0, "extra_body": wishes}
        return tuple(client.completions.create(prompt=prompt, **common).choices[0].token_ids)

    num_asked = 0

    def both_have_worked():
        """Ask; what was learned is kept every ten seconds, and whose turn it is is the API servers' to say."""
        nonlocal num_asked
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(answer, prompts)) == expected
        num_asked += len(prompts)
        written = {path.name for path in directory.iterdir()}
        return written >= {*FILES["state_file"]} and all(emitted_by(address, engine) for engine in (0, 1))

    until(both_have_worked)
    # A request's first token is its prompt's.
    until(lambda: sum(emitted_by(address, engine) for engine in (0, 1)) == num_asked * (LENGTH - 1))
    assert sorted(labels for labels, _ in samples(address, "eesd:rounds_total")) == ['engine="0"', 'engine="1"']
    assert {path.name for path in directory.iterdir()} == {name for names in FILES.values() for name in names}
    for engine in (0, 1):
        tokens, requests = (
            metric(address, f"vllm:{name}_total", engine=engine) for name in ("generation_tokens", "request_success")
        )
        assert emitted_by(address, engine) == tokens - requests
        rounds = read(directory / FILES["trace_file"][engine])
        assert sum(len(round_["emitted"]) for round_ in rounds) == emitted_by(address, engine)
        assert "priors" in json.loads((directory / FILES["state_file"][engine]).read_text())
