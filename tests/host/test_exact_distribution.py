"""Sampled output has exactly the target's distribution: plain vLLM, EESD, every policy; and planted bugs are caught."""

from typing import get_args

import exact_distribution as exact
import numpy as np
import pytest
import torch

from vllm_eesd.config import EESDConfig
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
    "own seeds": {"seed": 1000},
    "greedy": {"temperature": 0.0},
}
#: What a user may choose: a new policy, or a new way to sample drafts, joins this suite with its name.
POLICIES = get_args(EESDConfig.model_fields["policy"].annotation)
DRAFT_SAMPLE_METHODS = get_args(EESDConfig.model_fields["draft_sample_method"].annotation)
PLAIN, RAGGED = "plain", ("beta_ts", "greedy")
EESD = [(policy, method) for policy in POLICIES for method in DRAFT_SAMPLE_METHODS]

NUM_SAMPLES = 20_000
#: A planted bug shows in far fewer.
NUM_SAMPLES_PLANTED = 5_000
#: The chance that a right suite fails, shared out among its comparisons (Bonferroni).
FAMILY_ERROR = 1e-4
NUM_COMPARISONS = 1 + len(EESD) + (len(SAMPLINGS) - 1) + 3
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


def engine_name(parameter):
    return parameter if parameter == PLAIN else "-".join(parameter)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("targets") / "eight_tokens")
    exact.write_target(directory)
    return directory


@pytest.fixture(scope="module")
def distributions(target):
    """Sampling name -> exact probability of every output."""
    return distributions_after(PROMPT, target)


def distributions_after(prompt, target):
    logits = exact.target_logits(target, prompt)
    return {name: exact.joint_distribution(logits, prompt, sampling) for name, sampling in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def llm(request, engine, target, cloned_head):
    """An engine: plain vLLM, or EESD with (policy, draft_sample_method)."""
    spec = None
    if request.param != PLAIN:
        policy, method = request.param
        spec = {
            "method": "eesd",
            "model": cloned_head(target, 1, 1),  # layer 2 of 0..2 is left out: good, not perfect
            "num_speculative_tokens": 3,
            "policy": policy,
            "draft_sample_method": method,
        }
    options = {"max_num_seqs": 256, "max_model_len": 32, "num_gpu_blocks_override": 512, "block_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_eesd.host.v1.CostModel", FreeDrafting)
        with engine(target, spec, **options) as llm:
            yield llm


def verdict_on(llm, distributions, names, num_samples=NUM_SAMPLES, prompt=PROMPT):
    """Return (verdict, counters) on the outputs of `num_samples` requests, samplings taking turns; plain has none."""
    speculative = llm.llm_engine.vllm_config.speculative_config is not None
    if speculative:
        llm.collective_rpc("eesd_reset_stats")
    counts = exact.count_outputs(llm, prompt, [SAMPLINGS[name] for name in names], num_samples)
    stats = llm.collective_rpc("eesd_stats")[0] if speculative else None
    return exact.judge(counts, [distributions[name] for name in names]), stats


def assert_exact(llm, distributions, names):
    verdict, stats = verdict_on(llm, distributions, names)
    assert verdict.p_value > SIGNIFICANCE, verdict
    if stats is not None:  # accepting a draft and sampling in its stead both happened, thousands of times
        assert NUM_SAMPLES // 5 < stats["accepted"] < stats["drafted"] - NUM_SAMPLES // 5, stats


@pytest.mark.parametrize("llm", [PLAIN, *EESD], ids=engine_name, indirect=True)
def test_all_kinds_of_requests_in_every_batch(llm, distributions):
    assert_exact(llm, distributions, list(SAMPLINGS))


@pytest.mark.parametrize("llm", [RAGGED], ids=engine_name, indirect=True)
@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "greedy"])  # one output only
def test_one_kind_of_request(llm, distributions, name):
    """Batches of one kind take other ways through vLLM's sampler: no top-k tensor, no greedy row, no generators."""
    assert_exact(llm, distributions, [name])


@pytest.mark.parametrize("llm", [RAGGED], ids=engine_name, indirect=True)
def test_a_request_that_joins_with_one_token(llm, target, monkeypatch):
    """vLLM pads it with drafts of -1 where it joins running ones, and 0.32's CPU kernel accepts some of those.

    So begins a prompt of one token, one whose other tokens all hit the prefix cache, and a preempted request.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    num_padded, forward = [], RejectionSampler.forward

    def counting(self, metadata, *args, **kwargs):
        num_padded.append(int((metadata.draft_token_ids < 0).sum()))
        return forward(self, metadata, *args, **kwargs)

    monkeypatch.setattr(RejectionSampler, "forward", counting)
    prompt = (3,)
    verdict, _ = verdict_on(llm, distributions_after(prompt, target), list(SAMPLINGS), prompt=prompt)
    assert verdict.p_value > SIGNIFICANCE, verdict
    assert sum(num_padded) > NUM_SAMPLES


class TableDrafter:
    """Stands in for the draft model: its distribution is a table q(next | previous), so that a test knows q exactly.

    Args:
        monkeypatch: undoes it.
        joint: the target's, whose average over contexts is a fair q.
        sampled: draw drafts from q and have them verified against q; otherwise draft the maximum, as one-hot.
    """

    def __init__(self, monkeypatch, joint, sampled):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from vllm_eesd.host.v1 import DraftRows

        self.sampled, self._generator = sampled, np.random.default_rng(0)
        pairs = joint.sum(axis=(0, 3))
        self.q = (pairs / pairs.sum(axis=1, keepdims=True)).astype(np.float32)
        self.q_of_drafts, self.num_dropped = None, 0

        def draft_probs(runner, metadata):
            previous = runner.input_ids.gpu[metadata.logits_indices][metadata.target_logits_indices]
            self.q_of_drafts = torch.from_numpy(self.q[previous.numpy()])
            return self.q_of_drafts if sampled else None

        monkeypatch.setattr(DraftRows, "step", lambda _, rows, offset, token_ids: self._step(token_ids))
        monkeypatch.setattr(GPUModelRunner, "_get_spec_decode_draft_probs", draft_probs)

    def _step(self, token_ids):
        q = self.q[token_ids]
        drafted = q.argmax(1)
        if self.sampled:
            drafted = (q.cumsum(1) < self._generator.random((len(q), 1))).sum(1).clip(max=exact.VOCAB_SIZE - 1)
        return drafted, q[np.arange(len(q)), drafted]


def drop_unlikely_drafts(monkeypatch, drafter):
    """A draft ends before its first token of low confidence."""
    from vllm_eesd.host.v1 import EarlyExitProposer

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

    def sample_recovered_tokens(max_spec_len, num_draft, cu_num_draft, draft_token_ids, draft_probs, target_probs, *_):
        return target_probs.multinomial(1).squeeze(1).to(draft_token_ids.dtype)

    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.sample_recovered_tokens", sample_recovered_tokens)


def accept_by_q(monkeypatch, drafter):
    """Acceptance takes the draft model's probabilities for the target's."""
    from vllm.v1.sample import rejection_sampler

    sample = rejection_sampler._rejection_random_sample

    def rejection_random_sample(output, cu_num_draft, draft_token_ids, draft_probs, target_probs, *rest):
        sample(output, cu_num_draft, draft_token_ids, draft_probs, drafter.q_of_drafts, *rest)

    monkeypatch.setattr(rejection_sampler, "_rejection_random_sample", rejection_random_sample)


PLANTED = {
    "unlikely tokens dropped, sampled drafts": (drop_unlikely_drafts, True),
    "no residual, sampled drafts": (skip_the_residual, True),
    "no residual, one-hot drafts": (skip_the_residual, False),
    "q for p, sampled drafts": (accept_by_q, True),
    "q for p, one-hot drafts": (accept_by_q, False),
}


@pytest.mark.parametrize("llm", [RAGGED], ids=engine_name, indirect=True)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_is_caught(llm, distributions, monkeypatch, planted):
    plant, sampled = PLANTED[planted]
    plant(monkeypatch, TableDrafter(monkeypatch, distributions["T=1"], sampled))
    verdict, _ = verdict_on(llm, distributions, ["T=1"], NUM_SAMPLES_PLANTED)
    assert verdict.p_value < SIGNIFICANCE, verdict


@pytest.mark.parametrize("llm", [RAGGED], ids=engine_name, indirect=True)
def test_sampled_drafts_without_a_bug_are_exact(llm, distributions, monkeypatch):
    """The planted bugs are what is caught above, not the table. Probabilistic drafting takes this way through vLLM."""
    TableDrafter(monkeypatch, distributions["T=1"], sampled=True)
    assert_exact(llm, distributions, list(SAMPLINGS))


@pytest.mark.parametrize("llm", [RAGGED], ids=engine_name, indirect=True)
def test_a_deterministic_draft_may_be_dropped(llm, distributions, monkeypatch):
    """One-hot verification emits p whatever token was drafted, so nothing is biased by which ones are submitted."""
    drafter = TableDrafter(monkeypatch, distributions["T=1"], sampled=False)
    drop_unlikely_drafts(monkeypatch, drafter)
    assert_exact(llm, distributions, list(SAMPLINGS))
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
