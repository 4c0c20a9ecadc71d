"""Thinking budgets on V1, without an engine: rounds of drafts emit what a plain step after the other would."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_eesd.host.v1 import shared_noise
from vllm_eesd.host.v1.thinking import BudgetsOfRows, count_by_request, rows_with_a_budget
from vllm_eesd.host.v1.verification import accept_greedy

VOCAB_SIZE, LENGTH, MAX_DRAFTS = 30, 60, 4
START, END = [1], [2, 3]
#: (prompt, budget, seed); without a budget, a request is not tracked, without a seed it is greedy.
REQUESTS = [
    ([9, 1], 0, None),
    ([9, 1], 3, 5),
    ([9, 8], 4, None),
    ([9, 8], None, 6),
    ([9, 1, 2, 3], 2, 7),
    ([1, 9, 9, 9, 9], 9, 8),
    ([9], 1, 9),
    ([1, 9, 9, 9], 2, None),
]


def logits_after(text):
    """Fixed for a text; a thought begins or ends by itself now and then."""
    noise = np.random.default_rng([*text[-2:], len(text)])
    logits = torch.from_numpy(noise.standard_normal(VOCAB_SIZE).astype(np.float32))
    if noise.random() < 0.4:
        logits[noise.choice([1, 1, 2, 3])] += 6
    return logits


def holder_of(requests, outputs, num_spec_tokens):
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    config = SimpleNamespace(reasoning_start_token_ids=START, reasoning_end_token_ids=END)
    holder = ThinkingBudgetStateHolder(config, 64, num_spec_tokens, torch.device("cpu"), False)
    added = [
        (row, SimpleNamespace(thinking_token_budget=budget), prompt, outputs[row])
        for row, (prompt, budget, _) in enumerate(requests)
    ]
    holder.sync_batch(BatchUpdate(batch_size=len(requests), removed=[], added=added, moved=[]))
    return holder


def metadata_of(requests, outputs, holder, generators):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    temperature = torch.tensor([0.0 if seed is None else 1.0 for *_, seed in requests])
    nothing = torch.zeros(len(requests))
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=not generators,
        all_random=len(generators) == len(requests),
        top_p=None,
        top_k=None,
        generators=generators,
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        thinking_budget_state_holder=holder,
    )


def generators_of(requests):
    return {row: torch.Generator().manual_seed(s) for row, (*_, s) in enumerate(requests) if s is not None}


@pytest.fixture(scope="module")
def sampler():
    from vllm.v1.sample.sampler import Sampler

    return Sampler()


@pytest.fixture(scope="module")
def plain(sampler):
    """What plain vLLM says to each request, a token a step."""
    said = []
    for request in REQUESTS:
        outputs, generators = [[]], generators_of([request])
        holder = holder_of([request], outputs, 0)
        for _ in range(LENGTH):
            logits = logits_after(request[0] + outputs[0])[None]
            metadata = metadata_of([request], outputs, holder, generators)
            outputs[0].append(sampler(logits, metadata).sampled_token_ids.item())
        said.append(outputs[0])
    return said


def say_in_rounds(sampler, plain, noise):
    """Return what rounds of drafts say, of which some are what plain vLLM says next, for all requests in one batch."""
    outputs = [[] for _ in REQUESTS]
    holder, generators = holder_of(REQUESTS, outputs, MAX_DRAFTS), generators_of(REQUESTS)
    count_by_request(holder, [budget is not None for _, budget, _ in REQUESTS])
    while min(map(len, outputs)) < LENGTH:
        drafts = []
        for output, expected in zip(outputs, plain, strict=True):
            draft = expected[len(output) : len(output) + noise.integers(MAX_DRAFTS + 1)]
            drafts.append([t if noise.random() < 0.8 else int(noise.integers(-1, VOCAB_SIZE)) for t in draft])
        texts = [
            request[0] + output + draft[:number]
            for request, output, draft in zip(REQUESTS, outputs, drafts, strict=True)
            for number in range(len(draft) + 1)
        ]
        logits = torch.stack([logits_after([max(token, 0) for token in text]) for text in texts])
        flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
        lengths = [len(draft) for draft in drafts]
        spec = SimpleNamespace(draft_token_ids=flat, num_draft_tokens=lengths, max_spec_len=max(lengths))
        metadata = metadata_of(REQUESTS, outputs, holder, generators)
        rows = shared_noise.sample_rows(sampler, logits, spec, metadata, range(len(REQUESTS)))
        sampled = accept_greedy(rows.tokens, rows.drafts)
        rows.set_back(sampled)
        for output, tokens in zip(outputs, sampled.tolist(), strict=True):
            output += [token for token in tokens if token >= 0]
    return [output[:LENGTH] for output in outputs]


@pytest.mark.parametrize("seed", range(5))
def test_thoughts_end_where_they_do_in_plain_steps(sampler, plain, seed):
    assert say_in_rounds(sampler, plain, np.random.default_rng(seed)) == plain


def test_the_budgets_change_what_is_said(sampler, plain):
    """Or the test above would pass without any."""
    for row, request in enumerate(REQUESTS):
        free = [(request[0], None, request[2])]
        outputs, generators = [[]], generators_of(free)
        for _ in range(LENGTH):
            metadata = metadata_of(free, outputs, holder_of(free, outputs, 0), generators)
            outputs[0].append(sampler(logits_after(request[0] + outputs[0])[None], metadata).sampled_token_ids.item())
        assert (outputs[0] != plain[row]) == (request[1] is not None), row


@pytest.mark.parametrize("bug", ["states are not kept", "a row's state is not the row before's"])
def test_a_state_that_is_not_the_last_tokens_is_caught(sampler, plain, bug, monkeypatch):
    if bug == "states are not kept":
        monkeypatch.setattr(BudgetsOfRows, "keep", lambda self, last_rows: None)
    else:
        made = BudgetsOfRows.__init__

        def apart(self, holder, of_requests):
            made(self, holder, of_requests)
            self._requests = list(range(len(of_requests)))

        monkeypatch.setattr(BudgetsOfRows, "__init__", apart)
        monkeypatch.setattr(BudgetsOfRows, "keep", lambda self, last: None)
    assert say_in_rounds(sampler, plain, np.random.default_rng(0)) != plain


def test_a_step_without_drafts_forces_the_end_in_the_requests_own_row(sampler):
    """vLLM's holder forces it in the first row there, where the engine drafts."""
    requests = [([9, 8], None, None), ([9, 1], 0, None)]
    forced = []
    for mend in (False, True):
        outputs = [[], []]
        holder = holder_of(requests, outputs, MAX_DRAFTS)
        if mend:
            count_by_request(holder, [False, True])
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[:, 20] = 1.0
        metadata = metadata_of(requests, outputs, holder, {})
        forced.append(sampler(logits, metadata).sampled_token_ids[:, 0].tolist())
    assert forced == [[END[0], 20], [20, END[0]]]


def test_who_has_a_budget():
    holder = holder_of(REQUESTS, [[] for _ in REQUESTS], 0)
    assert rows_with_a_budget(holder) == {row for row, request in enumerate(REQUESTS) if request[1] is not None}
    assert rows_with_a_budget(None) == set()


def test_a_request_that_moves_into_anothers_row_has_no_budget_of_it():
    """vLLM's holder leaves the state of a request that has ended in the row that another moves into."""
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    requests = [([9, 1], 0, None), ([9, 1], 3, None), ([9, 8], None, None), ([9, 1], 5, None)]
    holder = holder_of(requests, [[] for _ in requests], MAX_DRAFTS)
    own = holder._state[3]
    # The first two have ended: the others move into their rows.
    moved = [(3, 0, MoveDirectionality.UNIDIRECTIONAL), (2, 1, MoveDirectionality.UNIDIRECTIONAL)]
    holder.sync_batch(BatchUpdate(batch_size=2, removed=[], added=[], moved=moved))
    assert rows_with_a_budget(holder) == {0, 1}
    count_by_request(holder, [True, False])
    assert holder._state == {0: own}
