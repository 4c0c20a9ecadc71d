"""Policies and the posterior they read, without an engine."""

import numpy as np
import pytest
from outcomes import outcome

from vllm_eesd.policy import DRAWN, GREEDY, POLICIES, SHARED_NOISE, BetaPosterior, build_policy
from vllm_eesd.policy.posterior import MAX_PRIOR_KEYS

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
    assert all(policy.more(SLOTS, n, None).all() for n in range(32))


def test_beta_ts_always_drafts_the_first_token():
    policy = build_policy("beta_ts", BetaPosterior(4, 1e-3, 1e3), 0, {})
    assert all(policy.more(SLOTS, 0, None).all() for _ in range(100))


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (8, 2), (2, 8), (90, 10)])
def test_beta_ts_goes_on_as_often_as_the_posterior_mean(alpha, beta):
    """theta ~ Beta, chi ~ Bernoulli(theta): over many rounds chi = 1 with the posterior's mean."""
    slots = np.zeros(200_000, dtype=np.int64)
    policy = build_policy("beta_ts", BetaPosterior(1, alpha, beta), 7, {})
    share = policy.more(slots, 1, None).mean()
    mean = alpha / (alpha + beta)
    # Five standard errors of a Bernoulli share: a wrong formula misses by far more.
    assert share == pytest.approx(mean, abs=5 * np.sqrt(mean * (1 - mean) / len(slots)))


def test_the_same_seed_decides_the_same():
    answers = []
    for _ in range(2):
        policy = build_policy("beta_ts", BetaPosterior(4), 11, {})
        answers.append([policy.more(SLOTS, 1, None).tolist() for _ in range(50)])
    assert answers[0] == answers[1]


def test_policies_and_their_arguments_are_checked():
    with pytest.raises(
        ValueError,
        match="policy='greedy' is not valid: choose one of adaedl, beta_ts, .*, fixed, goodput$",
    ):
        build_policy("greedy", BetaPosterior(1), 0, {})
    with pytest.raises(ValueError, match="unknown key 'threshold' for policy 'fixed'; allowed: prior_key$"):
        build_policy("fixed", BetaPosterior(1), 0, {"threshold": 0.5})


@pytest.mark.parametrize("name", POLICIES)
def test_its_entry_says_whether_a_policy_takes_ngrams(name):
    assert build_policy(name, BetaPosterior(1), 0, {}).uses_ngrams == POLICIES[name].takes_ngrams
    if POLICIES[name].takes_ngrams:
        assert not build_policy(name, BetaPosterior(1), 0, {"ngram": False}).uses_ngrams


def test_metrics_say_what_is_believed_and_change_nothing():
    def make():
        policy = build_policy("beta_ts", BetaPosterior(4, 2.0, 2.0), 0, {})
        slots = np.arange(2)
        policy.observe(outcome(slots, [8, 8], [8, 8]))
        return policy, slots

    policy, slots = make()
    metrics = policy.metrics(slots)
    low, high = metrics["posterior_interval"]
    assert low < metrics["posterior_mean"] < high
    assert metrics["posterior_mean"] == pytest.approx(10 / 12, abs=0.02)
    assert 0 <= metrics["calibration_error"] <= 1 and metrics["costs"] == policy.costs.state()
    assert policy.metrics(slots[:0])["posterior_mean"] is None
    untouched, _ = make()
    drafting = [p.more(slots, 1, None).tolist() for p in (policy, untouched) for _ in range(20)]
    assert drafting[:20] == drafting[20:]


def test_learned_priors_follow_the_outcomes_of_all_that_share():
    posterior = BetaPosterior(4, 80, 20)
    posterior.learn_priors(memory=100.0, weight=5.0)
    assert posterior.parameters(SLOTS[:1])[:, 0].tolist() == [4.0, 1.0]
    for _ in range(500):
        posterior.observe(SLOTS[:2], np.ones(2), np.zeros(2))
    assert posterior.mean(SLOTS[3:])[0] < 0.1, "a new request starts from what the others taught"
    assert posterior.parameters(SLOTS[3:]).sum() == pytest.approx(5.0)


def test_priors_of_different_keys_are_apart_and_their_number_is_bounded():
    posterior = BetaPosterior(2, 1, 1)
    posterior.learn_priors(memory=100.0, weight=2.0)
    posterior.reset(SLOTS[:2], ["hard", ""])
    for _ in range(300):
        posterior.observe(SLOTS[:1], np.ones(1), np.zeros(1))
    posterior.reset(SLOTS[:2], ["hard", "other"])
    assert posterior.mean(SLOTS[:2])[0] < 0.1 < posterior.mean(SLOTS[:2])[1]
    for number in range(1000):
        posterior.reset(SLOTS[:1], [f"adapter-{number}"])
    assert len(posterior.state()) <= MAX_PRIOR_KEYS


def test_counts_fade_with_drafts_only():
    posterior = BetaPosterior(4, 2, 3)
    posterior.fade(0.5)
    posterior.observe(SLOTS[:2], np.array([4, 4]), np.array([4, 4]))
    posterior.observe(SLOTS[:2], np.array([1, 0]), np.array([0, 0]))
    np.testing.assert_allclose(posterior.parameters(SLOTS[:2]), [[2 + 2, 2 + 4], [3 + 1, 3]])
    posterior.observe(SLOTS[:2], np.array([0, 0]), np.array([0, 0]))
    np.testing.assert_allclose(posterior.parameters(SLOTS[:2])[0], [2 + 2, 2 + 4])


@pytest.mark.parametrize("name", ["confidence", "draft_verify", "adaedl"])
def test_thresholds_stop_behind_an_unsure_token_and_never_before_one(name):
    policy = build_policy(name, BetaPosterior(4), 0, {})
    policy.reset(SLOTS)
    assert policy.more(SLOTS, 0, None).all()
    answers = policy.more(SLOTS, 1, np.array([0.01, 0.3, 0.9, 0.999], dtype=np.float32))
    assert answers.tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", ["draft_verify", "adaedl"])
def test_adapting_thresholds_rise_after_rejections_and_fall_after_acceptances(name):
    policy = build_policy(name, BetaPosterior(4), 0, {})
    policy.reset(SLOTS)
    for _ in range(10):
        policy.observe(outcome(SLOTS[:3], [4, 4, 0], [0, 4, 0]))
    start = policy.initial_threshold
    assert policy.threshold[0] == pytest.approx(start + 10 * 0.001)
    assert policy.threshold[1] == pytest.approx(start - 10 * 0.001)
    assert policy.threshold[2] == start, "a round without drafts says nothing"


def test_calibrated_ts_goes_on_as_often_as_the_calibrated_confidence():
    policy = build_policy("calibrated_ts", BetaPosterior(1, 3, 3), 7, {})
    slots = np.zeros(100_000, dtype=np.int64)
    share = policy.more(slots, 1, np.full(len(slots), 0.75, dtype=np.float32)).mean()
    # Five standard errors; an empty calibration believes a confidence, here the centre of its bin.
    assert share == pytest.approx(0.75, abs=5 * np.sqrt(0.75 * 0.25 / len(slots)))


@pytest.mark.parametrize("kind", [DRAWN, SHARED_NOISE])
@pytest.mark.parametrize("name", ["calibrated_ts", "goodput"])
def test_what_drafts_of_a_kind_taught_decides_about_that_kind_only(name, kind):
    """Drawn drafts of confidence 0.75 are hardly ever accepted: a drawn draft stops after one, a greedy one goes on."""
    policy = build_policy(name, BetaPosterior(2, 60, 20), 0, {})
    slots = np.arange(2)
    policy.reset(slots, None, [GREEDY, kind])
    for _ in range(200):
        policy.observe(outcome(slots, np.array([4, 4]), np.array([4, 0]), np.full((2, 4), 0.75)))
    confidence, went_on = np.full(2, 0.75, dtype=np.float32), np.zeros(2)
    for _ in range(100):
        policy.begin(slots, np.array([8, 8]))
        went_on += policy.more(slots, 1, confidence) / 100
    assert went_on[0] > 0.8 and went_on[1] < 0.2


def test_requests_of_each_kind_of_draft_start_from_a_prior_of_their_own():
    policy = build_policy("goodput", BetaPosterior(4, 5, 5), 0, {})
    policy.reset(np.arange(2), None, [GREEDY, DRAWN])
    for _ in range(50):
        policy.observe(outcome(np.arange(2), np.array([4, 4]), np.array([4, 0])))
    policy.reset(np.arange(1, 4), None, [SHARED_NOISE, GREEDY, DRAWN])
    shared_noise, greedy, drawn = policy.posterior.mean(np.arange(1, 4))
    assert greedy > 0.8 and drawn < 0.2 and shared_noise == 0.5


@pytest.mark.parametrize("value", [-0.1, 1.1, "high", True, float("nan")])
def test_a_wrong_threshold_is_refused(value):
    with pytest.raises(ValueError, match="policy_args.threshold="):
        build_policy("confidence", BetaPosterior(1), 0, {"threshold": value})
