"""Draws by vLLM's noise on V1, with their margins: vLLM's token, the margin, and who may be told of it."""

import numpy as np
import pytest
import torch
from test_verification import draw_next, runner_of, step_of, whole

from vllm_eesd.host.v1 import gumbel
from vllm_eesd.host.v1.draft_sampling import DraftSampling

VOCAB = 5000
#: Tokens whose scores are closer may change places: logits are float32, and logarithms are taken by two libraries.
NEAR_TIE = 1e-5


@pytest.fixture(scope="module")
def sampler():
    """vLLM's own, on a CPU."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    return TopKTopPSampler()


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def scores(logits, seeds):
    """Logits and noise, one by one in Python's integers."""

    def mixed(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    bits = [
        [mixed((mixed(seed) + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11 for i in range(len(logits[0]))]
        for seed in seeds
    ]
    return logits.double().numpy() - np.log(-np.log((np.array(bits, dtype=np.float64) + 0.5) / 2**53))


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_tokens_are_vllms_and_margins_those_of_the_scores(sampler, scale):
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1)) * scale
    logits[::3, 7:] = -torch.inf
    logits[1, 1:] = -torch.inf  # one token is all there is
    seeds = range(40)
    theirs, _ = sampler(logits.clone(), dict(enumerate(generators(*seeds))), None, None)
    tokens, margins = gumbel.draw_with_margins(logits, generators(*seeds))
    drawn = [torch.randint(2**31, (1,), generator=generator).item() for generator in generators(*seeds)]
    first, second = np.sort(scores(logits, drawn))[:, :-3:-1].T
    np.testing.assert_allclose(margins, first - second, rtol=1e-9)
    assert ((theirs.numpy() == tokens) | (margins < NEAR_TIE)).all()
    assert margins[1] == np.inf and np.isfinite(margins[2:]).all()


def test_rows_that_say_nothing_have_a_token_and_no_margin():
    logits = torch.full((2, 10), -torch.inf)
    logits[1] = torch.nan
    tokens, margins = gumbel.draw_with_margins(logits, generators(1, 2))
    assert tokens.tolist() == [0, 0] and margins.tolist() == [0.0, 0.0]


def test_other_noise_than_vllms_is_noticed(sampler):
    assert gumbel.is_noise_of(sampler) and not gumbel.is_noise_of(draw_next)


NUM_ROUNDS = 50
#: Rows of a step: verified by the ratio of probabilities, by equality, and greedy.
RATIO, SHARED, GREEDY = range(3)


def told(sampler):
    """Return the confidences of many rounds, [NUM_ROUNDS, 3], and the margins of both rows that are drawn."""
    torch.manual_seed(0)
    of_request, logits = (
        torch.Generator().manual_seed(NUM_ROUNDS + 1),
        torch.randn(3, 50, generator=torch.Generator().manual_seed(2)),
    )
    runner = runner_of([0.8, 0.8, 0.0], generators={SHARED: of_request})
    runner.sampler.topk_topp_sampler = sampler
    sampling, confidences = DraftSampling(), []
    sampling.meet(step_of(runner))
    largest = logits.softmax(dim=-1).amax(dim=-1).numpy()
    for _ in range(NUM_ROUNDS):
        sampling.begin_round(step_of(runner))
        _, confidence = sampling.draw(np.arange(3), logits, logits.argmax(dim=-1).numpy(), largest, whole)
        confidences.append(confidence)
        of_request.manual_seed(len(confidences))
    return np.array(confidences), largest


def assert_only_shared_noise_is_looked_at(sampler):
    confidences, largest = told(sampler)
    assert (confidences[:, [RATIO, GREEDY]] == largest[[RATIO, GREEDY]]).all()
    assert len(np.unique(confidences[:, SHARED])) == NUM_ROUNDS
    assert confidences.dtype == np.float32 and (confidences >= 0).all() and (confidences <= 1).all()


def test_a_confidence_looks_at_the_noise_of_drafts_verified_by_equality_only(sampler):
    assert_only_shared_noise_is_looked_at(sampler)


class AllRows(np.ndarray):
    """Confidences of which a write to some rows is one to all rows."""

    def __setitem__(self, where, values):
        super().__setitem__(slice(None), np.resize(values, len(self)))


def test_a_margin_that_leaks_into_another_rows_confidence_is_noticed(sampler, monkeypatch):
    draw = DraftSampling.draw

    def leaking(self, rows, logits, best, confidence, whole):
        return draw(self, rows, logits, best, confidence.view(AllRows), whole)

    monkeypatch.setattr(DraftSampling, "draw", leaking)
    with pytest.raises(AssertionError):
        assert_only_shared_noise_is_looked_at(sampler)


def test_where_the_noise_is_unknown_no_confidence_looks_at_it():
    confidences, largest = told(draw_next)
    assert (confidences == largest).all()
