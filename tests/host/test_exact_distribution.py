"""Sampled output has exactly the target's distribution: plain vLLM, EESD, every policy; and planted bugs are caught."""

from typing import get_args

import exact_distribution as exact
import numpy as np
import pytest
import torch

from vllm_eesd.config import EESDConfig

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
#: What a user may choose: a new policy or draft sampling joins this suite with its name.
POLICIES = get_args(EESDConfig.model_fields["policy"].annotation)
DRAFT_SAMPLE_METHODS = get_args(EESDConfig.model_fields["draft_sample_method"].annotation)
#: `policy_args` of a policy that would otherwise hardly draft for a target this small.
POLICY_ARGS: dict[str, dict] = {}
PLAIN, DEFAULT = "plain", ("beta_ts", "greedy")
EESD = [(policy, method) for policy in POLICIES for method in DRAFT_SAMPLE_METHODS]

NUM_SAMPLES = 20_000
NUM_SAMPLES_PLANTED = 10_000
#: The chance that a right suite fails once, shared out among all its comparisons (Bonferroni).
FAMILY_ERROR = 1e-4
SIGNIFICANCE = FAMILY_ERROR / (2 * len(SAMPLINGS) + 1 + len(EESD) + 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("targets") / "eight_words")
    exact.write_target(directory)
    return directory


@pytest.fixture(scope="module")
def distributions(target):
    """Sampling name -> exact probability of every output."""
    logits = exact.target_logits(target)
    return {name: exact.joint_distribution(logits, sampling) for name, sampling in SAMPLINGS.items()}


@pytest.fixture(scope="module")
def llm(request, engine, target, cloned_head):
    """An engine: plain vLLM, or EESD with (policy, draft_sample_method)."""
    spec = None
    if request.param != PLAIN:
        policy, method = request.param
        spec = {
            "method": "eesd",
            # Layer 3 of 4 is skipped: right often enough to be accepted, wrong often enough to be rejected.
            "model": cloned_head(target, 2, 2),
            "num_speculative_tokens": 3,
            "policy": policy,
            "policy_args": POLICY_ARGS.get(policy, {}),
            "draft_sample_method": method,
        }
    with engine(target, spec, max_num_seqs=256, max_model_len=32) as llm:
        yield llm


def verdict_on(llm, distributions, names, num_samples=NUM_SAMPLES):
    """Return the verdict on the engine's outputs, after seeing that drafts were both accepted and rejected."""
    stats_of = getattr(llm.llm_engine.vllm_config.speculative_config, "eesd", None) and (
        lambda: llm.collective_rpc("eesd_stats")[0]
    )
    if stats_of:
        llm.collective_rpc("eesd_reset_stats")
    counts = exact.count_outputs(llm, [SAMPLINGS[name] for name in names], num_samples - num_samples % len(names))
    if stats_of:
        stats = stats_of()
        print(names, stats)
    v = exact.judge(counts, [distributions[name] for name in names])
    print(v)
    return v


@pytest.mark.parametrize("llm", [PLAIN, DEFAULT], ids=str, indirect=True)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_one_kind_of_request(llm, distributions, name):
    assert verdict_on(llm, distributions, [name]).p_value > SIGNIFICANCE


@pytest.mark.parametrize("llm", [PLAIN, *EESD], ids=str, indirect=True)
def test_all_kinds_in_every_batch(llm, distributions):
    assert verdict_on(llm, distributions, list(SAMPLINGS)).p_value > SIGNIFICANCE


class BigramDrafter:
    """Stands in for the draft model: q(next | previous) is a table, so that a test knows q and may sample from it.

    Args:
        monkeypatch: undoes it.
        sampled: draft by drawing from q and verify against q; otherwise draft the most probable token, as one-hot.
    """

    def __init__(self, monkeypatch, sampled):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from vllm_eesd.host.v1 import DraftRows

        self.generator = np.random.default_rng(4)
        self.q = torch.from_numpy(self.generator.normal(size=(exact.VOCAB_SIZE,) * 2)).softmax(-1).float()
        self.sampled = sampled
        monkeypatch.setattr(DraftRows, "step", lambda rows_, rows, offset, token_ids: self.step(token_ids))
        if sampled:
            monkeypatch.setattr(GPUModelRunner, "_get_spec_decode_draft_probs", self.draft_probs)

    def step(self, token_ids):
        q = self.q[token_ids].numpy()
        if self.sampled:
            drafted = (q.cumsum(1) < self.generator.random((len(q), 1))).sum(1).clip(max=exact.VOCAB_SIZE - 1)
        else:
            drafted = q.argmax(1)
        return drafted, q[np.arange(len(q)), drafted]

    def draft_probs(self, metadata):
        raise NotImplementedError
