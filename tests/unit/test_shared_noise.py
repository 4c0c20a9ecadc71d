"""Verification by shared noise on V1, without an engine: each row of logits is sampled as a plain step would."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_eesd.host.v1 import shared_noise, verification
from vllm_eesd.host.v1.verification import accept_greedy

VOCAB_SIZE, NUM_REQS = 40, 5
#: What some requests ask for; the others nothing. Row 3 is greedy.
ASKED = {
    0: {"min_p": 0.05, "repetition_penalty": 1.3, "seed": 11},
    1: {"logit_bias": {3: 2.5, 7: -1.0}, "top_k": 12, "seed": 12},
    2: {"min_tokens": 6, "stop_token_ids": [1, 2, 3, 4, 5, 6], "frequency_penalty": 0.5, "top_p": 0.8},
    3: {"temperature": 0.0, "presence_penalty": 0.4},
    4: {"logprob_token_ids": [5, 6], "seed": 13},
}
BAD_WORDS = {1: [[9], [4, 8]]}
NUM_DRAFTS = [2, 3, 0, 3, 1]
#: The requests have said so much before.
NUM_OUTPUTS = [3, 0, 5, 4, 2]


@pytest.fixture(scope="module")
def sampler():
    from vllm.v1.sample.sampler import Sampler

    return Sampler()


def processors(params, outputs):
    """vLLM's own ones of a batch of these requests."""
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    kinds = LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
    made = [kind(config, torch.device("cpu"), False) for kind in kinds]
    added = [(row, of_row, [], output) for row, (of_row, output) in enumerate(zip(params, outputs, strict=True))]
    for processor in made:
        processor.update_state(BatchUpdate(batch_size=len(params), removed=[], added=added, moved=[]))
    return LogitsProcessors(made)


def metadata_of(rows, outputs, generators):
    """vLLM's SamplingMetadata of a batch of these requests, who said so much."""
    from vllm import SamplingParams
    from vllm.v1.sample.metadata import SamplingMetadata

    params = [SamplingParams(**({"temperature": 0.9, "max_tokens": 50} | ASKED[row])) for row in rows]

    def tensor(name, dtype=torch.float32):
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

    temperature = tensor("temperature")
    top_k = tensor("top_k", torch.int32)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        top_p=tensor("top_p"),
        top_k=torch.where(top_k > 0, top_k, VOCAB_SIZE),
        generators=generators,
        max_num_logprobs=2,
        no_penalties=False,
        prompt_token_ids=torch.tensor([[7, 8, row] for row in rows]),
        frequency_penalties=tensor("frequency_penalty"),
        presence_penalties=tensor("presence_penalty"),
        repetition_penalties=tensor("repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=torch.stack([torch.arange(VOCAB_SIZE) == 20 + row for row in rows]),
        bad_words_token_ids={i: BAD_WORDS[row] for i, row in enumerate(rows) if row in BAD_WORDS},
        logitsprocs=processors(params, outputs),
        logprob_token_ids={i: [5, 6] for i, row in enumerate(rows) if "logprob_token_ids" in ASKED[row]} or None,
    )


def generators_of(rows):
    seeds = {i: ASKED[row]["seed"] for i, row in enumerate(rows) if "seed" in ASKED[row]}
    return {i: torch.Generator().manual_seed(seed) for i, seed in seeds.items()}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("requests", [(0, 1, 2, 3, 4), (0, 1, 4), (1,)], ids=str)
def test_every_row_is_sampled_as_by_a_plain_step(sampler, requests, seed):
    noise = np.random.default_rng(seed)
    outputs = [noise.integers(0, VOCAB_SIZE, number).tolist() for number in NUM_OUTPUTS]
    num_logits = sum(NUM_DRAFTS) + NUM_REQS
    logits = torch.from_numpy(noise.standard_normal((num_logits, VOCAB_SIZE), dtype=np.float32) * 2)
    starts = np.cumsum([0, *(num + 1 for num in NUM_DRAFTS)])
    # A plain engine, one token after the other; some drafts are what it says, the others are not.
    drafts, said, alone = [], {}, {row: generators_of([row]) for row in range(NUM_REQS)}
    states, logprobs = {}, {}
    for row in range(NUM_REQS):
        torch.manual_seed(seed)
        draft = []
        for step in range(NUM_DRAFTS[row] + 1):
            text = outputs[row] + draft
            plain = sampler(logits[[starts[row] + step]].clone(), metadata_of([row], [text], alone[row]))
            token = plain.sampled_token_ids.item()
            if not said.get(row) or said[row] == draft:
                said[row] = [*said.get(row, []), token]
                states[row] = {i: generator.get_state() for i, generator in alone[row].items()}
                logprobs[row] = plain.logprobs_tensors
            draft.append(token if noise.random() < 0.7 else int(noise.integers(VOCAB_SIZE)))
        drafts.append(draft[:-1])
    batch = metadata_of(range(NUM_REQS), outputs, generators_of(range(NUM_REQS)))
    flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    spec = SimpleNamespace(draft_token_ids=flat, num_draft_tokens=NUM_DRAFTS, max_spec_len=max(NUM_DRAFTS))
    rows = shared_noise.sample_rows(sampler, logits.clone(), spec, batch, requests)
    sampled = accept_greedy(rows.tokens, rows.drafts)
    rows.set_back(sampled)
    seeded = [row for row in requests if "seed" in ASKED[row] or row == 3]
    for row in seeded:
        emitted = [token for token in sampled[requests.index(row)].tolist() if token >= 0]
        assert emitted == said[row], row
        for state in states[row].values():
            assert torch.equal(batch.generators[row].get_state(), state)
    assert {row for row in range(NUM_REQS) if row in batch.generators} == {0, 1, 4}


def test_a_generators_states_are_noted_draw_by_draw():
    generator = torch.Generator().manual_seed(1)
    noted = shared_noise.NotedGenerators({0: generator, 1: generator, 3: generator})
    drawn = {row: torch.randint(2**31, (1,), generator=of_row).item() for row, of_row in noted.items()}
    again = torch.Generator().manual_seed(1)
    assert [drawn[row] for row in (0, 1, 3)] == torch.randint(2**31, (3,), generator=again).tolist()
    again.set_state(noted.states[1])
    assert torch.randint(2**31, (1,), generator=again).item() == drawn[3]


@pytest.mark.parametrize("columns", [(4, 2), (2, 4), (3, 3)], ids=str)
def test_logprobs_of_named_tokens_beside_those_of_the_likeliest(columns):
    """Requests of one step may want different numbers of them, and some are verified by shared noise, others not."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    def logprobs(num_rows, width, value):
        ids = torch.arange(num_rows * width, dtype=torch.int32).reshape(num_rows, width) + value
        return LogprobsTensors(ids, -ids.float(), ids[:, 0].clone())

    whole, theirs = columns
    output = SamplerOutput(torch.zeros(2, 3, dtype=torch.int32), logprobs(6, whole, 100))
    drafts = shared_noise.JudgedDrafts(torch.tensor([7]), [1], 2)
    rows = shared_noise.SampledRows(np.array([1]), drafts, [7, 8], logprobs(2, theirs, 500), {})
    made = shared_noise.replace_rows(output, rows, np.array([[7, 8, -1]], dtype=np.int32))
    assert made.sampled_token_ids.tolist() == [[0, 0, 0], [7, 8, -1]]
    of_step = made.logprobs_tensors
    assert of_step.logprobs.shape == of_step.logprob_token_ids.shape == (6, max(columns))
    assert torch.equal(of_step.logprobs[:3, :whole], -logprobs(6, whole, 100).logprob_token_ids[:3].float())
    assert torch.equal(of_step.logprob_token_ids[3:5, :theirs], logprobs(2, theirs, 500).logprob_token_ids)
    assert torch.equal(of_step.selected_token_ranks[3:5], torch.tensor([500, 500 + theirs], dtype=torch.int32))
    assert of_step.logprobs[:3, whole:].isneginf().all() and of_step.logprobs[3:, theirs:].isneginf().all()


def test_generators_come_back_after_a_fault():
    generators = {2: torch.Generator()}
    kept = dict(generators)
    with pytest.raises(RuntimeError), shared_noise.hidden(generators):
        assert not generators
        raise RuntimeError("injected")
    assert generators == kept


def test_what_cannot_be_verified_is_sampled_as_by_a_plain_step():
    """From the first row of each request, whatever was drafted, and with what the batch is sampled with."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    batch = metadata_of(range(NUM_REQS), [[1] * number for number in NUM_OUTPUTS], {})
    other = type("Other", (MinTokensLogitsProcessor,), {})
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=64))
    batch = dataclasses.replace(batch, logitsprocs=LogitsProcessors([other(config, torch.device("cpu"), False)]))
    batch = dataclasses.replace(batch, spec_token_ids=[[1] * number for number in NUM_DRAFTS])
    runner = SimpleNamespace(input_batch=SimpleNamespace(sampling_metadata=batch, req_ids=list("abcde")))
    seen = []

    def host_sample(runner, logits, metadata):
        seen.append((logits[:, 0].tolist(), metadata, runner.input_batch.sampling_metadata))
        return "what a plain step gives"

    spec = SimpleNamespace(max_spec_len=max(NUM_DRAFTS), num_draft_tokens=NUM_DRAFTS)
    logits = torch.arange(sum(NUM_DRAFTS) + NUM_REQS).float()[:, None].expand(-1, VOCAB_SIZE)
    assert verification.sample(runner, host_sample, logits, spec, None) == "what a plain step gives"
    [(rows, metadata, sampling)] = seen
    assert rows == [0, 3, 7, 8, 12] and metadata is None and sampling.spec_token_ids is None
    assert sampling.logitsprocs is batch.logitsprocs and runner.input_batch.sampling_metadata is batch


def test_who_wants_min_p_or_a_bias_or_has_a_budget():
    outputs = [[1] * number for number in NUM_OUTPUTS]
    holder = SimpleNamespace(_state={3: {}})
    batch = dataclasses.replace(metadata_of(range(NUM_REQS), outputs, {}), thinking_budget_state_holder=holder)
    assert shared_noise.processed_rows(batch.logitsprocs.all, None, NUM_REQS) == {0, 1}
    assert shared_noise.processed_rows(batch.logitsprocs.all, holder, NUM_REQS) == {0, 1, 3}
    rest = shared_noise.without_them(batch)
    assert shared_noise.processed_rows(rest.logitsprocs.all, rest.thinking_budget_state_holder, NUM_REQS) == set()
    (kept,) = rest.logitsprocs.all
    assert kept.min_toks and shared_noise.knows(rest.logitsprocs.all)
