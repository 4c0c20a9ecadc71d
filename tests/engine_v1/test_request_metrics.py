"""`--per-request-spec-decode-metrics`: a request's drafts as vLLM counts them are those that it had."""

from types import SimpleNamespace

import pytest

from vllm_eesd.host.scheduler_seams import placeholders, rounds_with_drafts

K = 4
SPEC = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed"}
#: Of one token, they join as decoding ones do, with placeholders; the last text is short of the end of a block.
PROMPTS = [[7], [300], [5, 17, 300], [11], list(range(40, 90))]
WISHES = [{}, {"eesd_max_draft_tokens": 2}, {"eesd_enabled": False}, {}, {"eesd_max_draft_tokens": 1}]
DETAILED = {"per_request_spec_decode_metrics": "detailed"}


def answers_of(llm, wishes=WISHES, **sampling):
    """Return (the outputs, the recorded rounds that drafted of each), prompt by prompt."""
    from vllm import SamplingParams

    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": 24} | sampling
    params = [SamplingParams(extra_args=wish, **common) for wish in wishes]
    llm.collective_rpc("eesd_take_rounds")
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    (rounds,) = llm.collective_rpc("eesd_take_rounds", args=(True,))
    of_request = {}
    for round_ in rounds:
        of_request.setdefault(round_["request_id"], []).append(round_)
    drafted = []
    for output in outputs:
        text = list(output.outputs[0].token_ids)
        (its_own,) = (
            its
            for its in of_request.values()
            if [token for round_ in its for token in round_["emitted"]][: len(text) - 1] == text[1:]
        )
        drafted.append([round_ for round_ in its_own if round_["draft"]])
    return outputs, drafted


def assert_counted(outputs, drafted):
    for output, rounds in zip(outputs, drafted, strict=True):
        metrics = output.outputs[0].spec_decode_metrics
        assert metrics.per_step_drafted == [len(round_["draft"]) for round_ in rounds]
        assert metrics.per_step_accepted == [round_["num_accepted"] for round_ in rounds]
        assert metrics.num_draft_tokens == sum(metrics.per_step_drafted)
        assert metrics.histogram == [metrics.per_step_accepted.count(length) for length in range(K + 1)]


@pytest.fixture(scope="module")
def llm(engine, random_target, cloned_head):
    spec = SPEC | {"model": cloned_head(random_target, 7, 7)}
    with engine(random_target, spec, max_num_seqs=3, **DETAILED) as llm:
        yield llm


@pytest.mark.feature("--per-request-spec-decode-metrics", "drafted and accepted, placeholders aside")
def test_the_drafts_of_each_request(llm):
    outputs, drafted = answers_of(llm)
    assert_counted(outputs, drafted)
    longest = [max((len(round_["draft"]) for round_ in rounds), default=0) for rounds in drafted]
    assert longest == [K, 2, 0, K, 1]
    assert sum(round_["num_accepted"] for rounds in drafted for round_ in rounds) > 30


def test_the_server_says_the_same_of_all(llm, monkeypatch):
    """vLLM's own counters, where EESD's are not to be had."""
    scheduler = type(llm.llm_engine.engine_core.engine_core.scheduler)
    steps, make = {}, scheduler.make_spec_decoding_stats

    def make_and_keep(self, *args, **kwargs):
        self.log_stats = True  # the engine's own is off
        counted = make(self, *args, **kwargs)
        self.log_stats = False
        steps[id(counted)] = counted
        return counted

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", make_and_keep)
    _, drafted = answers_of(llm)
    counted = [step for step in steps.values() if step is not None]
    rounds = [round_ for rounds in drafted for round_ in rounds]
    assert sum(step.num_drafts for step in counted) == len(rounds)
    assert sum(step.num_draft_tokens for step in counted) == sum(len(round_["draft"]) for round_ in rounds)
    assert sum(step.num_accepted_tokens for step in counted) == sum(round_["num_accepted"] for round_ in rounds)


@pytest.mark.parametrize("planted", ["placeholders", "rounds without drafts"])
def test_what_is_counted_wrongly_is_noticed(llm, monkeypatch, planted):
    from vllm_eesd.host import scheduler_seams

    if planted == "placeholders":
        monkeypatch.setattr(scheduler_seams, "placeholders", lambda scheduled, known, *_: known)
    else:
        monkeypatch.setattr(rounds_with_drafts(), "observe", rounds_with_drafts().__base__.observe)
    with pytest.raises(AssertionError):
        assert_counted(*answers_of(llm))


def test_placeholders():
    scheduled = {"padded": [-1] * 4, "cut": [5, 6, -1, -1], "whole": [1, 2], "both": [3, -1, -1]}
    assert placeholders(scheduled, {"cut": 2}, {}, None) == {"padded": 4, "cut": 2, "both": 2}
    rows = {"a": 1, "b": 0, "c": 2}
    drafts = dict.fromkeys(rows, [-1] * 4)
    # Three of b's were drafted, of which a grammar cut two; it had a's cut whole.
    assert placeholders(drafts, {"b": 3, "a": 4}, rows, [3, 4, 0]) == {"b": 3, "a": 4, "c": 4}


def test_plain_speculation_is_counted_as_before():
    from vllm_eesd.host import scheduler_seams

    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None), requests={})
    given = SimpleNamespace(scheduled_spec_decode_tokens={"a": [-1]}, num_invalid_spec_tokens=None)
    scheduler_seams.update_from_output(lambda *args: None, scheduler, given, SimpleNamespace(req_id_to_index={}))
    assert given.num_invalid_spec_tokens is None
    counted = scheduler_seams.make_spec_decoding_stats(lambda self, *args: args, scheduler, None, 1, 0, {"a": 1}, "a")
    assert counted == (None, 1, 0, {"a": 1}, "a")
