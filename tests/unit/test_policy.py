"""Policies and the posterior they read, without an engine."""

import numpy as np
import pytest

from vllm_eesd.policy import BetaPosterior, build_policy

SLOTS = np.arange(4)


def test_the_posterior_counts_only_what_was_observed():
    """k drafts with a accepted: a successes, one failure if a < k, and nothing for the tokens behind it."""
    posterior = BetaPosterior(4, prior_alpha=2, prior_beta=3)
    posterior.observe(SLOTS, num_verified=np.array([5, 5, 5, 0]), num_accepted=np.array([5, 2, 0, 0]))
    assert posterior.parameters(SLOTS).tolist() == [[7, 4, 2, 2], [3, 4, 4, 3]]


def test_a_new_request_starts_from_the_prior():
    posterior = BetaPosterior(4, 2, 3)
    posterior.observe(SLOTS, np.full(4, 5), np.full(4, 1))
    posterior.reset(np.array([1]))
    assert posterior.parameters(SLOTS[:2]).tolist() == [[3, 2], [4, 3]]


@pytest.mark.parametrize("prior", [(0, 1), (1, -1), (float("nan"), 1)])
def test_an_improper_prior_is_refused(prior):
    with pytest.raises(ValueError, match="pseudo-counts must be > 0"):
        BetaPosterior(1, *prior)


def test_fixed_never_stops():
    policy = build_policy("fixed", BetaPosterior(4), 0, {})
    assert all(policy.draft_more(SLOTS, n, None).all() for n in range(32))


def test_beta_ts_always_drafts_the_first_token():
    policy = build_policy("beta_ts", BetaPosterior(4, 1e-3, 1e3), 0, {})
    assert all(policy.draft_more(SLOTS, 0, None).all() for _ in range(100))


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (8, 2), (2, 8), (90, 10)])
def test_beta_ts_goes_on_as_often_as_the_posterior_mean(alpha, beta):
    """theta ~ Beta, chi ~ Bernoulli(theta): over many rounds chi = 1 with the posterior's mean."""
    slots = np.zeros(200_000, dtype=np.int64)
    policy = build_policy("beta_ts", BetaPosterior(1, alpha, beta), 7, {})
    share = policy.draft_more(slots, 1, None).mean()
    mean = alpha / (alpha + beta)
    # Five standard errors of a Bernoulli share: a wrong formula misses by far more.
    assert share == pytest.approx(mean, abs=5 * np.sqrt(mean * (1 - mean) / len(slots)))


def test_the_same_seed_decides_the_same():
    answers = []
    for _ in range(2):
        policy = build_policy("beta_ts", BetaPosterior(4), 11, {})
        answers.append([policy.draft_more(SLOTS, 1, None).tolist() for _ in range(50)])
    assert answers[0] == answers[1]


def test_policies_and_their_arguments_are_checked():
    with pytest.raises(
        ValueError,
        match="policy='greedy' is not valid: choose one of adaedl, beta_ts, .*, fixed, goodput$",
    ):
        build_policy("greedy", BetaPosterior(1), 0, {})
    with pytest.raises(ValueError, match="unknown key 'threshold' for policy 'fixed'; allowed: prior_key, state_file"):
        build_policy("fixed", BetaPosterior(1), 0, {"threshold": 0.5})


def test_metrics_say_what_is_believed_and_change_nothing():
    def make():
        policy = build_policy("beta_ts", BetaPosterior(4, 2.0, 2.0), 0, {})
        slots = np.arange(2)
        policy.observe(slots, np.array([8, 8]), np.array([8, 8]))
        return policy, slots

    policy, slots = make()
    metrics = policy.metrics(slots)
    low, high = metrics["posterior_interval"]
    assert low < metrics["posterior_mean"] < high
    assert metrics["posterior_mean"] == pytest.approx(10 / 12, abs=0.02)
    assert 0 <= metrics["calibration_error"] <= 1 and metrics["costs"] == policy.costs.state()
    assert policy.metrics(slots[:0])["posterior_mean"] is None
    untouched, _ = make()
    drafting = [p.draft_more(slots, 1, None).tolist() for p in (policy, untouched) for _ in range(20)]
    assert drafting[:20] == drafting[20:]
