"""What requests can ask of vLLM, one case each, and all that a caller sees of an answer."""

import math
from typing import NamedTuple

import pytest

MAX_TOKENS = 20
#: Batches of different shapes: the last bits of float32 differ. Tokens no further apart may also change ranks.
LOGPROB_TOLERANCE = 1e-4
JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
GRAMMAR = 'root ::= "SELECT " column (", " column)* " FROM t"\ncolumn ::= "a" | "b" | "c"'


class Case(NamedTuple):
    """One row of docs/compatibility.md.

    Attributes:
        params: of SamplingParams; "structured" stands for StructuredOutputsParams.
        alters: whether the answers must differ from those without `params`, or the option was not seen at all.
        drafts: whether the target judges any; None where a grammar may have cut them all.
        in_company: False where the answers to other requests of the batch are not plain vLLM's usual ones: beside a
            request that names tokens it gives their logprobs to none of those that ask for the likeliest.
    """

    params: dict
    alters: bool = True
    drafts: bool | None = True
    in_company: bool = True


CASES = {
    "temperature 0": Case({}, alters=False),
    "temperature, greedily bounded by top_k": Case({"temperature": 1.3, "top_k": 1}, alters=False),
    "temperature, greedily bounded by top_p": Case({"temperature": 1.3, "top_p": 1e-6}, alters=False),
    "presence_penalty": Case({"presence_penalty": 1.5}),
    "frequency_penalty": Case({"frequency_penalty": 0.8}),
    "repetition_penalty": Case({"repetition_penalty": 1.5}),
    "bad_words": Case({"bad_words": ["self", " self", "return", " return"]}),
    "allowed_token_ids": Case({"allowed_token_ids": list(range(4, 700))}),
    "stop": Case({"stop": ["object", "capacity"]}),
    "stop, kept in the text": Case({"stop": ["object", "capacity"], "include_stop_str_in_output": True}),
    "stop_token_ids": Case({"stop_token_ids": list(range(0, 4096, 3))}),
    "min_tokens": Case({"min_tokens": 9, "stop_token_ids": list(range(0, 4096, 3))}),
    "logit_bias": Case({"logit_bias": {token: 8.0 for token in range(0, 4096, 7)}}),
    "min_p, which leaves one token": Case({"temperature": 1.3, "min_p": 1.0}, alters=False),
    "min_p, logit_bias and logprobs": Case(
        {"temperature": 1.3, "min_p": 1.0, "logit_bias": {5: 3.0, 300: 6.0}, "logprobs": 2}
    ),
    "ignore_eos": Case({"ignore_eos": True}, alters=False),
    "max_tokens=1": Case({"max_tokens": 1}, drafts=False),
    "n": Case({"n": 3, "temperature": 1.0, "top_k": 1}),
    "logprobs": Case({"logprobs": 5}),
    "logprobs of named tokens": Case({"logprobs": 2, "logprob_token_ids": [5, 6]}, in_company=False),
    "logprobs of named tokens, and penalties": Case(
        {"logprob_token_ids": [5, 6, 700], "presence_penalty": 0.7, "bad_words": ["self", " self"]}, in_company=False
    ),
    "logprobs of named tokens, sampled": Case(
        {"temperature": 1.3, "top_k": 1, "logprob_token_ids": [9]}, in_company=False
    ),
    "logprobs, of the token alone": Case({"logprobs": 0}),
    "logprobs, of many tokens": Case({"logprobs": 60, "max_tokens": 6}),
    "flat_logprobs": Case({"logprobs": 3, "flat_logprobs": True}),
    "repetition_detection": Case({"repetition_detection": {"max_pattern_size": 4, "min_count": 2}, "max_tokens": 60}),
    "skip_reading_prefix_cache": Case({"skip_reading_prefix_cache": True}, alters=False),
    "special tokens in the text": Case(
        {"skip_special_tokens": False, "spaces_between_special_tokens": False}, alters=False
    ),
    "detokenize": Case({"detokenize": False}),
    "stream_interval": Case({"stream_interval": 3}, alters=False),
    "prompt_logprobs": Case({"prompt_logprobs": 3}),
    "logprobs and penalties": Case({"logprobs": 2, "frequency_penalty": 0.8, "bad_words": ["self", " self"]}),
    "structured output, JSON schema": Case({"structured": {"json": JSON_SCHEMA}}),
    "structured output, regex": Case({"structured": {"regex": r"\[[0-9]{1,3}(, [0-9]{1,3}){2,6}\]"}}),
    "structured output, choice": Case({"structured": {"choice": ["positive", "negative", "positively"]}}, drafts=None),
    "structured output, grammar": Case({"structured": {"grammar": GRAMMAR}}),
    "structured output, any JSON object": Case({"structured": {"json_object": True}}),
    "structured output, one text only": Case({"structured": {"regex": "(a b c d e ){12}"}, "max_tokens": 100}),
    "structured output, logprobs and penalties": Case(
        {"structured": {"json": JSON_SCHEMA}, "logprobs": 2, "frequency_penalty": 0.8}
    ),
    "eesd_enabled": Case({"extra_args": {"eesd_enabled": False}}, alters=False, drafts=False),
    "eesd_max_draft_tokens": Case({"extra_args": {"eesd_max_draft_tokens": 1}}, alters=False),
}


def sampling_params(params):
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    params = {"temperature": 0, "max_tokens": MAX_TOKENS} | params
    if "structured" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params.pop("structured"))
    if "repetition_detection" in params:
        params["repetition_detection"] = RepetitionDetectionParams(**params.pop("repetition_detection"))
    return SamplingParams(**params)


def plain_logprobs(positions):
    """Return vLLM's log-probabilities as [{token id: (logprob, rank)}].

    Without the tokens that a grammar excludes: which of them are among the best ones, at -inf all, is chance.
    """
    if positions is None:
        return None
    return [
        {token: (entry.logprob, entry.rank) for token, entry in (position or {}).items() if entry.logprob > -math.inf}
        for position in positions
    ]


def answers_of(outputs):
    """Return all that a caller sees of each completion."""
    return [
        {
            "tokens": tuple(completion.token_ids),
            "text": completion.text,
            "ends": (completion.finish_reason, completion.stop_reason),
            "logprobs": plain_logprobs(completion.logprobs),
            "prompt_logprobs": plain_logprobs(output.prompt_logprobs),
        }
        for output in outputs
        for completion in output.outputs
    ]


def assert_same(answers, expected):
    assert len(answers) == len(expected)
    for number, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        for name in ("tokens", "text", "ends"):
            assert answer[name] == other[name], (number, name)
        for name in ("logprobs", "prompt_logprobs"):
            assert (answer[name] is None) == (other[name] is None), (number, name)
            for position, known in zip(answer[name] or [], other[name] or [], strict=True):
                assert_same_position(position, known)


def assert_same_position(position, known):
    """Compare the log-probabilities of one position; ranks may differ only among tokens that are as good as tied.

    A rank is vLLM's: how many tokens are at least as likely. Of tokens that neither lists nothing is known, so the rank
    of one far behind the listed ones must be the same.
    """

    def unlisted_in(theirs, ours):
        return sorted(logprob for token, (logprob, _) in ours.items() if token not in theirs)

    # The last listed one may be as good as tied with the first unlisted one.
    assert unlisted_in(known, position) == near(unlisted_in(position, known)), (position, known)
    logprobs = [logprob for logprob, _ in (known | position).values()]
    for token in position.keys() & known.keys():
        (logprob, rank), (other, other_rank) = position[token], known[token]
        assert logprob == near(other), (token, position, known)
        first = 1 + sum(one > other + LOGPROB_TOLERANCE for one in logprobs)
        last = sum(one >= other - LOGPROB_TOLERANCE for one in logprobs)
        assert rank == other_rank or first <= rank <= last, (token, position, known)


def near(expected):
    return pytest.approx(expected, abs=LOGPROB_TOLERANCE, rel=0)
