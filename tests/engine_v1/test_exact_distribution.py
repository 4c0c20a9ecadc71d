"""Sampled output has exactly the target's distribution: plain vLLM, EESD, every policy; and planted bugs are caught."""

import collections
import dataclasses
import itertools
import pkgutil
from typing import get_args

import exact_distribution as exact
import numpy as np
import pytest
import torch

from vllm_eesd.config import EESDConfig
from vllm_eesd.host import circuit_breaker
from vllm_eesd.host.v1 import shared_noise, verification
from vllm_eesd.host.v1.block_verification import choose
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.host.v1.proposer import EarlyExitProposer
from vllm_eesd.policy import CostModel

#: Some tokens of the vocabulary twice and some not at all, so that penalties differ between tokens.
PROMPT = (3, 1, 4, 1, 5)
SAMPLINGS = {
    "T=1": {"temperature": 1.0},
    "T=0.5": {"temperature": 0.5},
    "T=1.5": {"temperature": 1.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "T=1.5, top_k and top_p": {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    "repetition penalty": {"repetition_penalty": 1.8},
    "presence penalty": {"presence_penalty": 1.2},
    "frequency penalty": {"frequency_penalty": 0.9},
    "min_p": {"min_p": 0.3},
    "logit_bias": {"logit_bias": {2: 1.5, 6: -2.0}},
    "logprobs": {"logprobs": 1},
    "own seeds": {"seed": 1000},
    "greedy": {"temperature": 0.0},
}
#: One request of this kind sends its whole batch to vLLM's rejection sampler.
BY_VLLM = "logprobs"
#: Batches of these EESD verifies itself.
OURS = tuple(name for name in SAMPLINGS if name != BY_VLLM)
#: Verified by shared noise, with or without a seed. Beside one of them, all are where drafts are not drawn.
BY_NOISE = ("min_p", "logit_bias", "own seeds")
BY_RATIO = tuple(name for name in OURS if name not in BY_NOISE)
#: What a user may choose: a new policy, or a new way to sample drafts, joins this suite with its name.
POLICIES = get_args(EESDConfig.model_fields["policy"].annotation)
DRAFT_SAMPLE_METHODS = get_args(EESDConfig.model_fields["draft_sample_method"].annotation)
PLAIN = "plain"
#: Drafts are drawn from some of the target's tokens only: what it says beyond them must come from the residual.
PRUNED, DRAFT_TOKENS = "auto, draft vocabulary", (0, 2, 3, 4, 7)
TWO_LAYERS = "auto, a deep-context head of two layers"
#: Requests without a seed too are verified by equality with what the target draws by the drafts' noise.
SHARED_NOISE = "auto, shared noise"
#: Each goes its own way through vLLM's samplers or ours; a greedy request has one output only.
ONE_KIND = (
    "T=0.5",
    "T=1.5, top_k and top_p",
    "repetition penalty",
    "frequency penalty",
    "min_p",
    "logit_bias",
    "logprobs",
    "own seeds",
)

NUM_SAMPLES = 15_000
#: A planted bug shows in far fewer.
NUM_SAMPLES_PLANTED = 5_000
#: The chance that a right suite fails, shared out among its comparisons (Bonferroni).
FAMILY_ERROR = 1e-4
NUM_COMPARISONS = 1 + len(DRAFT_SAMPLE_METHODS) * (1 + len(POLICIES) + 2 + 2 + len(ONE_KIND)) + 5 + 3
SIGNIFICANCE = FAMILY_ERROR / NUM_COMPARISONS


#: Divides the table drafter's tokens, sampled and most probable ones alike.
LOW_CONFIDENCE = 0.55


class FreeDrafting(CostModel):
    """Costs at which drafting always pays: on a target this small it never would, and no clock may decide a test."""

    def observe_verify(self, num_reqs, num_tokens, ms):
        pass

    def observe_draft_step(self, num_rows, ms):
        pass

    def observe_draft_round(self, num_rows, ms):
        pass

    def lacks_plain(self, num_reqs):
        return False

    def verify_curve(self, num_reqs, max_drafts):
        return np.ones(max_drafts + 1)

    def draft_curve(self, max_rows):
        return np.zeros(max_rows + 1)


@pytest.fixture(scope="module")
def distributions(eight_token_target):
    """Sampling name -> exact probability of every output."""
    return distributions_after(PROMPT, eight_token_target)


def distributions_after(prompt, target):
    logits = exact.target_logits(target, prompt)
    return {name: exact.joint_distribution(logits, prompt, sampling) for name, sampling in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def llm(request, engine, eight_token_target, cloned_head, head_of_two_layers):
    """An engine: plain vLLM, or EESD with this draft_sample_method."""
    spec = None
    if request.param != PLAIN:
        # Layer 2 of 0..2 is left out: good, not perfect.
        if request.param == TWO_LAYERS:
            head = head_of_two_layers(eight_token_target, 0, [1, 2])
        else:
            head = cloned_head(eight_token_target, 1, 1, DRAFT_TOKENS if request.param == PRUNED else None)
        spec = {
            "method": "eesd",
            "model": head,
            "num_speculative_tokens": 3,
            "policy": "beta_ts",
            "draft_sample_method": request.param.split(",")[0],
            "unseeded_verification": "shared_noise" if request.param == SHARED_NOISE else "ratio",
        }
    options = {"max_num_seqs": 256, "max_model_len": 32, "num_gpu_blocks_override": 512, "block_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_eesd.host.round_setup.CostModel", FreeDrafting)
        with engine(eight_token_target, spec, **options) as llm:
            yield llm


def verdict_on(llm, distributions, names, num_samples=NUM_SAMPLES, prompt=PROMPT, policy=None):
    """Return (verdict, counters) on the outputs of `num_samples` requests, samplings taking turns; plain has none."""
    speculative = llm.llm_engine.vllm_config.speculative_config is not None
    if speculative:
        llm.collective_rpc("eesd_use_policy", args=(policy or "beta_ts",))
        llm.collective_rpc("eesd_reset_stats")
    counts = exact.count_outputs(llm, prompt, [SAMPLINGS[name] for name in names], num_samples)
    stats = llm.collective_rpc("eesd_stats")[0] if speculative else None
    return exact.judge(counts, [distributions[name] for name in names]), stats


def assert_exact(llm, distributions, names, policy=None):
    verdict, stats = verdict_on(llm, distributions, names, policy=policy)
    assert verdict.p_value > SIGNIFICANCE, verdict
    if stats is not None:  # accepting a draft and sampling in its stead both happened, thousands of times
        assert NUM_SAMPLES // 10 < stats["accepted"] < stats["drafted"] - NUM_SAMPLES // 10, stats


@pytest.fixture
def verified(monkeypatch):
    """Counts the steps with drafts by who verified them: "ours" and "vllm", and "noise" where noise was shared."""
    counts, wants_only_tokens = collections.Counter(), verification.wants_only_tokens

    def counting(sampling):
        ours = wants_only_tokens(sampling)
        counts["ours" if ours else "vllm"] += 1
        return ours

    def counting_rows(*args):
        counts["noise"] += 1
        return sample_rows(*args)

    sample_rows = shared_noise.sample_rows
    monkeypatch.setattr(verification, "wants_only_tokens", counting)
    monkeypatch.setattr(shared_noise, "sample_rows", counting_rows)
    return counts


@pytest.mark.feature("sampling, every policy, all kinds of requests in one batch", "the same distribution")
@pytest.mark.parametrize("llm", [PLAIN, *DRAFT_SAMPLE_METHODS], indirect=True)
def test_all_kinds_of_requests_in_every_batch(llm, distributions):
    assert_exact(llm, distributions, list(SAMPLINGS))


@pytest.mark.feature("sampling by shared noise", "the same distribution")
@pytest.mark.parametrize("llm", [SHARED_NOISE], indirect=True)
@pytest.mark.parametrize("policy", ["goodput", "confidence"])
def test_shared_noise_without_seeds(llm, distributions, verified, policy):
    assert_exact(llm, distributions, [name for name in SAMPLINGS if name != "own seeds"], policy)
    assert set(verified) == {"noise"}


@pytest.mark.parametrize("llm", [SHARED_NOISE], indirect=True)
def test_noise_that_is_shared_only_where_something_is_drafted_is_caught(llm, distributions, monkeypatch):
    """What was drafted by a number may decide whether that number is used: this must not choose the text's numbers."""

    def propose_odd_ones(self, *args):
        drafts = propose(self, *args)
        return [draft if draft and draft[0] % 2 else [] for draft in drafts]

    def sample_rows(sampler, logits, metadata, sampling, requests):
        fresh = {row: torch.Generator() for row in sampling.generators if not metadata.num_draft_tokens[row]}
        for generator in fresh.values():
            generator.manual_seed(int(torch.randint(2**62, ())))
        sampling = dataclasses.replace(sampling, generators=sampling.generators | fresh)
        return original(sampler, logits, metadata, sampling, requests)

    original, propose = shared_noise.sample_rows, EarlyExitProposer.propose_round
    monkeypatch.setattr(shared_noise, "sample_rows", sample_rows)
    monkeypatch.setattr(EarlyExitProposer, "propose_round", propose_odd_ones)
    verdict, _ = verdict_on(llm, distributions, ["T=1"], NUM_SAMPLES_PLANTED, policy="fixed")
    assert verdict.p_value < SIGNIFICANCE, verdict


@pytest.mark.feature("sampling, a draft vocabulary", "the same distribution")
@pytest.mark.parametrize("llm", [PRUNED], indirect=True)
def test_a_draft_vocabulary(llm, distributions, verified):
    assert_exact(llm, distributions, OURS)
    assert verified["ours"] and not verified["vllm"]


@pytest.mark.parametrize("llm", [TWO_LAYERS], indirect=True)
def test_a_head_of_two_layers(llm, distributions, verified):
    assert_exact(llm, distributions, OURS)
    assert verified["ours"] and not verified["vllm"]


@pytest.mark.parametrize("llm", DRAFT_SAMPLE_METHODS, indirect=True)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(llm, distributions, verified, policy):
    assert_exact(llm, distributions, BY_RATIO, policy)
    assert set(verified) == {"ours"}


@pytest.mark.parametrize("llm", DRAFT_SAMPLE_METHODS, indirect=True)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.feature(f"sampling, {name}", "the same distribution")) for name in ONE_KIND],
)
def test_one_kind_of_request(llm, distributions, verified, name):
    """Batches of one kind take other ways through the samplers: no top-k tensor, no greedy row, no generators."""
    assert_exact(llm, distributions, [name])
    assert set(verified) == {"noise" if name in BY_NOISE else "vllm" if name == BY_VLLM else "ours"}


@pytest.mark.feature("sampling, requests that join with one token", "the same distribution")
@pytest.mark.parametrize("llm", DRAFT_SAMPLE_METHODS, indirect=True)
@pytest.mark.parametrize("names", [OURS, tuple(SAMPLINGS)], ids=["ours", "vllm"])
def test_a_request_that_joins_with_one_token(llm, eight_token_target, monkeypatch, names):
    """vLLM pads it with drafts of -1 where it joins running ones, and 0.32's CPU kernel accepts some of those.

    So begins a prompt of one token, one whose other tokens all hit the prefix cache, and a preempted request.
    """
    num_padded, sample = [], verification.sample

    def counting(runner, host_sample, logits, metadata, *args):
        num_padded.append(int((metadata.draft_token_ids < 0).sum()))
        return sample(runner, host_sample, logits, metadata, *args)

    monkeypatch.setattr(verification, "sample", counting)
    prompt = (3,)
    verdict, _ = verdict_on(llm, distributions_after(prompt, eight_token_target), names, prompt=prompt)
    assert verdict.p_value > SIGNIFICANCE, verdict
    assert sum(num_padded) > NUM_SAMPLES


#: What a fault interrupts where drafts are drawn: the drawing itself, a step whose draft is kept, a whole round.
FAULTY = {
    "vllm_eesd.host.v1.draft_sampling:DraftSampling.draw": 40,
    "vllm_eesd.host.v1.draft_sampling:DraftSampling.begin_round": 30,
    "vllm_eesd.host.v1.draft_rows:DraftRows.step": 50,
    "vllm_eesd.policy:DraftLengthPolicy.observe": 30,
}


@pytest.mark.parametrize("llm", ["auto"], indirect=True)
@pytest.mark.fault
def test_faults_while_drafts_are_drawn_bias_nothing(llm, distributions, monkeypatch, counts, drafter_of):
    """A draft must never be verified against the distribution of another one, one that a fault left behind."""
    faults = []

    def now_and_then(original, every):
        calls = itertools.count(1)

        def faulty(*args, **kwargs):
            number = next(calls)
            # Every other fault strikes before anything is done, the others after all of it.
            if number % (2 * every) == 0:
                faults.append(original.__qualname__)
                raise RuntimeError("injected")
            result = original(*args, **kwargs)
            if number % every == 0:
                faults.append(original.__qualname__)
                raise RuntimeError("injected")
            return result

        return faulty

    for place, every in FAULTY.items():
        name, _, attribute = place.rpartition(".")
        owner = pkgutil.resolve_name(name)
        monkeypatch.setattr(owner, attribute, now_and_then(owner.__dict__[attribute], every))
    monkeypatch.setattr(circuit_breaker, "MAX_FAULTS", NUM_SAMPLES)
    assert_exact(llm, distributions, list(SAMPLINGS))
    assert len(set(faults)) == len(FAULTY) and len(faults) > 20
    breaker = drafter_of(llm).breaker
    assert breaker.num_faults >= len(faults) and not breaker.is_open
    counts["planted faults survived"] += len(faults)


@pytest.mark.feature("sampling, n-gram drafts", "the same distribution")
@pytest.mark.parametrize("llm", DRAFT_SAMPLE_METHODS, indirect=True)
@pytest.mark.parametrize("names", [OURS, tuple(SAMPLINGS)], ids=["ours", "vllm"])
def test_ngram_drafts(llm, distributions, every_ngram_taken, names):
    verdict, stats = verdict_on(llm, distributions, names, policy="goodput")
    assert verdict.p_value > SIGNIFICANCE, verdict
    assert NUM_SAMPLES // 15 < stats["copied_accepted"] < stats["copied"] - NUM_SAMPLES // 15, stats
    assert stats["drafted"] > stats["copied"]


@pytest.mark.parametrize("llm", ["auto"], indirect=True)
def test_an_ngram_draft_taken_for_a_drawn_one_is_caught(llm, distributions, every_ngram_taken, monkeypatch, verified):
    proposals = DraftSampling.proposals

    def all_drawn(self, request_ids, num_drafts, vocab_size):
        found = proposals(self, request_ids, num_drafts, vocab_size)
        q = list(found.q)
        for request in np.flatnonzero(found.first_q < 0):
            found.first_q[request] = len(q)
            q += [np.full(vocab_size, 1 / vocab_size, dtype=np.float32)] * num_drafts[request]
        return found._replace(q=np.array(q))

    monkeypatch.setattr(DraftSampling, "proposals", all_drawn)
    verdict, _ = verdict_on(llm, distributions, ["T=1"], NUM_SAMPLES_PLANTED, policy="goodput")
    assert verdict.p_value < SIGNIFICANCE, verdict


class TableDrafter:
    """Stands in for the draft model: its distribution is a table q(next | previous), so that a test knows q exactly.

    Args:
        monkeypatch: undoes it.
        joint: the target's, whose average over contexts is a fair q.
    """

    def __init__(self, monkeypatch, joint):
        from vllm_eesd.host.model.draft_step import DraftStep

        pairs = joint.sum(axis=(0, 3))
        self.q = torch.from_numpy((pairs / pairs.sum(axis=1, keepdims=True)).astype(np.float32))
        self.num_dropped = 0

        def forward(step, input_ids, positions, context):
            best = self.q[input_ids].max(dim=-1)
            return best.indices, best.values, self.q[input_ids].log()

        monkeypatch.setattr(DraftStep, "forward", forward)


def drop_unlikely_drafts(monkeypatch, drafter):
    """A draft ends before its first token of low confidence."""
    from vllm_eesd.host.v1.proposer import EarlyExitProposer

    propose = EarlyExitProposer.propose_round

    def propose_round(self, runner, scheduler_output, sampled_token_ids, *args):
        drafts = propose(self, runner, scheduler_output, sampled_token_ids, *args)
        for emitted, draft in zip(sampled_token_ids, drafts, strict=True):
            previous = [*emitted[-1:], *draft][: len(draft)]
            keep = int(np.append(drafter.q[previous, draft] < LOW_CONFIDENCE, True).argmax())
            drafter.num_dropped += len(draft) - keep
            del draft[keep:]
        return drafts

    monkeypatch.setattr(EarlyExitProposer, "propose_round", propose_round)


def skip_the_residual(monkeypatch, drafter):
    """What takes a rejected token's place is drawn from p instead of from what p has over q."""
    verify_blocks = verification.verify_blocks

    def from_p(p, proposals, input_token_ids, cu_num_logits, best, uniforms, sampled):
        verify_blocks(p, proposals, input_token_ids, cu_num_logits, best, uniforms, sampled)
        for request, first in enumerate(cu_num_logits[:-1]):
            accepted = int((sampled[request] >= 0).sum()) - 1
            sampled[request, accepted] = choose(p[first + accepted], uniforms[first + accepted, 1], 0)

    monkeypatch.setattr(verification, "verify_blocks", from_p)


def accept_by_q(monkeypatch, drafter):
    """Acceptance takes the draft model's probabilities for the target's."""
    verify_blocks = verification.verify_blocks

    def with_q(p, proposals, input_token_ids, cu_num_logits, *judged):
        p_of_drafts = p.copy()
        for first, end in itertools.pairwise(cu_num_logits.tolist()):
            for row in range(first, end - 1):
                p_of_drafts[row] = drafter.q[input_token_ids[row]]
        verify_blocks(p_of_drafts, proposals, input_token_ids, cu_num_logits, *judged)

    monkeypatch.setattr(verification, "verify_blocks", with_q)


def assert_caught(llm, distributions, monkeypatch, verified, plant):
    plant(monkeypatch, TableDrafter(monkeypatch, distributions["T=1"]))
    verdict, _ = verdict_on(llm, distributions, ["T=1"], NUM_SAMPLES_PLANTED)
    assert set(verified) == {"ours"}
    assert verdict.p_value < SIGNIFICANCE, verdict


@pytest.mark.parametrize("llm", DRAFT_SAMPLE_METHODS, indirect=True)
@pytest.mark.parametrize("plant", [skip_the_residual, accept_by_q])
def test_a_planted_bug_is_caught(llm, distributions, monkeypatch, verified, plant):
    assert_caught(llm, distributions, monkeypatch, verified, plant)


@pytest.mark.parametrize("llm", ["auto"], indirect=True)
def test_a_drawn_draft_must_not_be_dropped(llm, distributions, monkeypatch, verified):
    assert_caught(llm, distributions, monkeypatch, verified, drop_unlikely_drafts)


@pytest.mark.parametrize("llm", ["auto"], indirect=True)
def test_sampled_drafts_without_a_bug_are_exact(llm, distributions, monkeypatch):
    """The planted bugs are what is caught above, not the table."""
    TableDrafter(monkeypatch, distributions["T=1"])
    assert_exact(llm, distributions, OURS)


@pytest.mark.parametrize("llm", ["greedy"], indirect=True)
def test_a_deterministic_draft_may_be_dropped(llm, distributions, monkeypatch):
    """One-hot verification emits p whatever token was drafted, so nothing is biased by which ones are submitted."""
    drafter = TableDrafter(monkeypatch, distributions["T=1"])
    drop_unlikely_drafts(monkeypatch, drafter)
    assert_exact(llm, distributions, OURS)
    assert drafter.num_dropped > NUM_SAMPLES // 5


def test_the_judge_itself(distributions):
    """Samples of the true distribution get p-values as they should be; a small bias and an impossible output do not."""
    generator, right = np.random.default_rng(0), distributions["T=1"]

    def draw(joint, num_samples):
        return generator.multinomial(num_samples, joint.ravel()).reshape(joint.shape)

    p_values = np.array([exact.judge([draw(right, 5000)], [right]).per_length for _ in range(200)])
    for limit in (0.05, 0.5):
        # Four standard deviations of a share of 200 samples, either way.
        assert np.abs((p_values < limit).mean(axis=0) - limit).max() < 4 * np.sqrt(limit * (1 - limit) / 200)
    biased = 0.9 * right + 0.1 * distributions["T=0.5"]
    assert exact.judge([draw(biased, NUM_SAMPLES)], [right]).p_value < SIGNIFICANCE
    impossible = draw(distributions["top_k"], NUM_SAMPLES)
    impossible[tuple(np.argwhere(distributions["top_k"] == 0)[0])] += 1
    assert exact.judge([impossible], [distributions["top_k"]]).p_value == 0
