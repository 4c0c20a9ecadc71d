"""What V1 verifies itself, without an engine: as the reference does, which batches, from which distributions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_eesd.kernels.reference.rejection import rejection

from vllm_eesd.host.v1.batch import V1Step
from vllm_eesd.host.v1.block_verification import Proposals, choose, verify_blocks
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.host.v1.verification import accept_greedy, only_temperature, wants_only_tokens

VOCAB_SIZE = 3  # so few that drafts are often right


def metadata_of(drafts):
    """What the runner says of these drafts, a list of token ids per request."""
    num_drafts = np.array([len(draft) for draft in drafts])
    ends = (num_drafts + 1).cumsum()
    rows = [np.arange(end - num - 1, end - 1) for end, num in zip(ends, num_drafts, strict=True)]
    return SimpleNamespace(
        draft_token_ids=torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32),
        num_draft_tokens=num_drafts.tolist(),
        cu_num_sampled_tokens=torch.from_numpy(ends.astype(np.int32)),
        target_logits_indices=torch.from_numpy(np.concatenate(rows).astype(np.int32)),
        max_spec_len=int(num_drafts.max()),
    )


@settings(max_examples=200, deadline=None)
@given(
    drafts=st.lists(st.lists(st.integers(-1, VOCAB_SIZE - 1), max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_greedy_tokens_are_the_references(drafts, seed):
    metadata = metadata_of(drafts)
    cu_num_logits = torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0))
    num_logits = int(cu_num_logits[-1])
    logits = torch.randn(num_logits, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    input_token_ids = torch.full((num_logits,), 7, dtype=torch.int32)
    input_token_ids[metadata.target_logits_indices + 1] = metadata.draft_token_ids
    greedy = {"temperature": torch.zeros(len(drafts)), "uniforms": torch.rand(num_logits, 2)}
    expected = rejection(logits, input_token_ids, cu_num_logits, metadata.max_spec_len, **greedy)
    ours = accept_greedy(logits.argmax(-1).tolist(), metadata)
    assert ours.dtype == np.int32
    assert np.array_equal(ours, expected.sampled.numpy())


@settings(max_examples=300, deadline=None)
@given(
    drafts=st.lists(st.lists(st.integers(-1, VOCAB_SIZE - 1), max_size=4), min_size=1, max_size=6).filter(any),
    seed=st.integers(0, 9999),
)
def test_sampled_tokens_are_the_references(drafts, seed):
    """Greedy requests, drawn and certain drafts, placeholders: token for token."""
    metadata, noise = metadata_of(drafts), torch.Generator().manual_seed(seed)
    cu_num_logits = torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0))
    num_reqs, num_logits = len(drafts), int(cu_num_logits[-1])
    logits = torch.randn(num_logits, VOCAB_SIZE, generator=noise)
    ids = torch.full((num_logits,), 7)
    ids[metadata.target_logits_indices + 1] = metadata.draft_token_ids.long()
    temperature = torch.tensor([0.0, 0.7, 1.5])[torch.randint(3, (num_reqs,), generator=noise)]
    certain = torch.rand(num_reqs, generator=noise) < 0.3
    draft_logits = torch.randn(num_reqs, metadata.max_spec_len, VOCAB_SIZE, generator=noise)
    first_q, q = np.full(num_reqs, -1), []
    for request, draft in enumerate(drafts):
        if certain[request] or not temperature[request]:
            draft_logits[request] = -torch.inf
            draft_logits[request, range(len(draft)), np.maximum(draft, 0)] = 0.0
        elif draft:
            first_q[request] = len(q)
            q.extend((draft_logits[request, : len(draft)] / temperature[request]).softmax(-1).numpy())
    uniforms = torch.rand(num_logits, 2, generator=noise, dtype=torch.float64)
    options = {"temperature": temperature, "draft_logits": draft_logits, "uniforms": uniforms}
    expected = rejection(logits, ids, cu_num_logits, metadata.max_spec_len, block_verification=True, **options)
    sampled = np.empty((num_reqs, metadata.max_spec_len + 1), dtype=np.int32)
    scale = torch.where(temperature > 0, temperature, 1.0).repeat_interleave(cu_num_logits.diff())
    p, q = (logits / scale[:, None]).softmax(-1).numpy(), np.array(q, dtype=np.float32).reshape(-1, VOCAB_SIZE)
    is_greedy = (temperature == 0).repeat_interleave(cu_num_logits.diff())
    best = torch.where(is_greedy, logits.argmax(-1), -1)
    judged = ids.numpy(), cu_num_logits.long().numpy(), best.numpy(), uniforms.numpy()
    verify_blocks(p, Proposals(q, first_q), *judged, sampled)
    assert np.array_equal(sampled, expected.sampled.numpy())


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 1000])
def test_a_choice_inverts_the_running_sum(vocab_size):
    noise = np.random.default_rng(vocab_size)
    weights = noise.random(vocab_size).astype(np.float32)
    weights[noise.random(vocab_size) < 0.3] = 0.0
    weights[vocab_size // 2] = 1.0
    running = weights.astype(np.float64).cumsum()
    for uniform in (0.0, 1 - 2.0**-53, *noise.random(200)):
        chosen = choose(weights, uniform, -1)
        assert weights[chosen] > 0
        # Rounding may put a number beside a border on either side of it.
        assert running[chosen] - weights[chosen] - 1e-9 <= uniform * running[-1] <= running[chosen] + 1e-9
    assert choose(np.zeros(vocab_size, dtype=np.float32), 0.5, 7) == 7


def plain_batch(**changes):
    from vllm.v1.sample.logits_processor import LogitsProcessors

    state = {
        "no_penalties": True,
        "max_num_logprobs": None,
        "logprob_token_ids": None,
        "top_k": None,
        "top_p": None,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SimpleNamespace(**state | changes)


def processors(min_toks):
    """Those that vLLM always loads, and requests with `min_tokens`."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    processor.min_toks = min_toks
    return LogitsProcessors([processor])


@pytest.mark.parametrize("changes", [{"max_num_logprobs": 0}, {"logprob_token_ids": {0: [1]}}], ids=str)
def test_what_vllm_must_sample(changes):
    assert wants_only_tokens(plain_batch())
    assert not wants_only_tokens(plain_batch(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"no_penalties": False},
        {"top_k": torch.tensor([3])},
        {"top_p": torch.tensor([0.5])},
        {"allowed_token_ids_mask": torch.zeros(1, 3, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logitsprocs": SimpleNamespace(all=[object()])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_logits(changes):
    assert not only_temperature(plain_batch(**changes))


def test_processors_that_nobody_asked_for_do_not_matter():
    assert only_temperature(plain_batch(logitsprocs=processors({})))
    assert not only_temperature(plain_batch(logitsprocs=processors({0: (2, [], set(), False)})))


def runner_of(temperatures, grammar=(), generators=None, top_p=None):
    """A runner whose batch has requests "0", "1", ...; those in `grammar` have one."""
    ids = [str(row) for row in range(len(temperatures))]
    params = {i: SimpleNamespace(structured_outputs="json" if int(i) in grammar else None) for i in ids}
    batch = SimpleNamespace(
        req_ids=ids,
        temperature_cpu=np.array(temperatures, dtype=np.float32),
        generators=generators or {},
        no_top_k=True,
        no_top_p=top_p is None,
        top_p_cpu_tensor=top_p,
    )
    requests = {i: SimpleNamespace(sampling_params=p) for i, p in params.items()}
    return SimpleNamespace(input_batch=batch, requests=requests, sampler=SimpleNamespace(topk_topp_sampler=draw_next))


def draw_next(logits, generators, top_k, top_p):
    """As vLLM's TopKTopPSampler: a row of noise from each row's generator."""
    noise = torch.ones_like(logits)
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1), None


def whole(values, elsewhere):
    """Drafts are drawn from the target's whole vocabulary."""
    return values


#: Of drafts whose confidence does not matter.
UNKNOWN = np.full(4, np.nan, dtype=np.float32)


def step_of(runner, finished=(), preempted=None):
    """The step it has just run."""
    scheduled = SimpleNamespace(
        finished_req_ids=set(finished), preempted_req_ids=preempted, total_num_scheduled_tokens=0
    )
    return V1Step(runner, scheduled, [])


def test_drafts_are_drawn_from_what_verification_is_told():
    """At the request's temperature; greedy rows and those under a grammar take the most probable token."""
    torch.manual_seed(0)
    sampling, logits = DraftSampling(), torch.tensor([[0.0, 1.0, 2.0]] * 4)
    temperatures, grammar, num_rounds = [0.0, 0.5, 1.5, 1.0], {3}, 4000
    counts = torch.zeros(4, 3)
    for _ in range(num_rounds):
        sampling.begin_round(step_of(runner_of(temperatures, grammar)))
        drafted = sampling.draw(np.arange(4), logits, np.full(4, 2), UNKNOWN[:4], whole)[0]
        counts[torch.arange(4), torch.from_numpy(drafted)] += 1
    assert counts[[0, 3], 2].tolist() == [num_rounds] * 2
    told = sampling.proposals(list("0123"), [1, 1, 1, 1], 3)
    assert told.first_q.tolist() == [-1, 0, 1, -1]
    dense = told.dense([1, 1, 1, 1], [2, 0, 0, 1])
    assert dense[0].tolist() == [[0, 0, 1]] and dense[3].tolist() == [[0, 1, 0]]
    for row in (1, 2):
        q = torch.from_numpy(told.q[row - 1])
        assert torch.equal(dense[row, 0], q) and torch.allclose(q, (logits[row] / temperatures[row]).softmax(-1))
        # Five standard deviations of a token's share.
        assert ((counts[row] / num_rounds - q).abs() < 5 * (q * (1 - q) / num_rounds).sqrt()).all()


def test_drafts_are_cut_by_top_p_as_the_targets_tokens_are():
    torch.manual_seed(0)
    logits, top_p = torch.randn(3, 5_000) * 6, torch.tensor([1.0, 0.5, 0.9])
    sampling = DraftSampling()
    sampling.begin_round(step_of(runner_of([1.0, 1.0, 1.0], top_p=top_p)))
    sampling.draw(np.array([0, 2]), logits[[0, 2]], np.zeros(2, dtype=np.int64), UNKNOWN[:2], whole)
    q = torch.from_numpy(sampling.proposals(["0", "2"], [1, 1], 5_000).q)
    assert torch.allclose(q[0], logits[0].softmax(-1))
    inside = q[1] > 0
    mass = logits[2].softmax(-1)[inside]
    assert 0.9 <= mass.sum() < 0.9 + mass.min() and torch.allclose(q[1, inside], mass / mass.sum())


def test_distributions_wait_for_requests_that_the_scheduler_passed_over():
    sampling = DraftSampling()
    steps = [torch.randn(2, 5), torch.randn(1, 5)]
    sampling.begin_round(step_of(runner_of([1.0, 1.0])))
    sampling.draw(np.array([0, 1]), steps[0], np.zeros(2, dtype=np.int64), UNKNOWN[:2], whole)
    sampling.draw(np.array([1]), steps[1], np.zeros(1, dtype=np.int64), UNKNOWN[:1], whole)
    passed_over = runner_of([1.0])
    passed_over.requests["1"] = passed_over.requests["0"]
    sampling.begin_round(step_of(passed_over))  # "0" has been verified, "1" was not in the batch
    assert not len(sampling.proposals(["0"], [2], 5).q)
    told, drawn_from = sampling.proposals(["0", "1"], [0, 2], 5), torch.stack([steps[0][1], steps[1][0]]).softmax(-1)
    assert told.first_q.tolist() == [-1, 0] and np.array_equal(told.q, drawn_from.numpy())
    assert np.array_equal(told.dense([0, 2], [3, 4])[1], drawn_from) and not told.dense([0, 2], [3, 4])[0].any()
    assert np.array_equal(sampling.proposals(["1"], [1], 5).q, drawn_from[:1].numpy())  # the scheduler cut one
    sampling.begin_round(step_of(passed_over, {"1"}))
    assert not len(sampling.proposals(["1"], [2], 5).q)


def test_distributions_of_requests_whose_end_no_round_heard_of_are_forgotten():
    sampling = DraftSampling()
    sampling.begin_round(step_of(runner_of([1.0, 1.0])))
    sampling.draw(np.array([1]), torch.randn(1, 5), np.zeros(1, dtype=np.int64), UNKNOWN[:1], whole)
    sampling.begin_round(step_of(runner_of([1.0])))  # "1" is nowhere any more
    assert not len(sampling.proposals(["1"], [1], 5).q)


def test_placeholders_are_certain_whatever_was_drawn_before():
    """A request that was preempted with three drafts comes back with one token, which vLLM pads by K drafts of -1."""
    sampling = DraftSampling()
    sampling.begin_round(step_of(runner_of([1.0, 1.0])))
    for _ in range(3):
        sampling.draw(np.arange(2), torch.randn(2, 5), np.zeros(2, dtype=np.int64), UNKNOWN[:2], whole)
    told = sampling.proposals(["0", "1"], [16, 3], 5)
    dense = told.dense([16, 3], [*[-1] * 16, 4, 2, -1])
    assert dense.shape == (2, 16, 5)
    assert (dense[0, :, 0] == 1).all() and not dense[0, :, 1:].any()
    assert np.array_equal(dense[1, :2], told.q[3:5])
    assert dense[1, 2].tolist() == [1, 0, 0, 0, 0] and not dense[1, 3:].any()


def test_a_preempted_request_leaves_nothing_behind():
    sampling, runner = DraftSampling(), runner_of([1.0, 1.0])
    sampling.begin_round(step_of(runner))
    sampling.draw(np.arange(2), torch.randn(2, 5), np.zeros(2, dtype=np.int64), UNKNOWN[:2], whole)
    runner.input_batch.req_ids = ["0"]
    runner.input_batch.temperature_cpu = runner.input_batch.temperature_cpu[:1]
    sampling.begin_round(step_of(runner, preempted={"1"}))
    assert not sampling._drawn_from


def test_a_seeded_request_drafts_what_its_generator_will_draw():
    """At its temperature, in every round from where the generator stands, under a grammar too, and it stays there."""
    logits, generator = torch.randn(3, 50), torch.Generator().manual_seed(5)
    runner = runner_of([1.0, 0.7, 0.7], grammar=[2], generators={1: generator, 2: torch.Generator().manual_seed(5)})
    sampling = DraftSampling()
    for _ in range(3):
        state = generator.get_state()
        sampling.begin_round(step_of(runner))
        drafts = [
            sampling.draw(np.arange(first, 3), logits[first:], np.zeros(3 - first, dtype=int), UNKNOWN[first:3], whole)[
                0
            ]
            for first in (0, 1)
        ]
        assert torch.equal(generator.get_state(), state)
        told = sampling.proposals(list("012"), [1, 2, 2], 50)
        assert told.first_q.tolist() == [0, -1, -1]
        expected = [draw_next(logits[[1]] / 0.7, {0: generator}, None, None)[0].item() for _ in drafts]
        assert [draft[-2] for draft in drafts] == expected
