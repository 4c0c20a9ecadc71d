"""Sampled output has the target's distribution, temperature, top-k and top-p included."""

import collections
import math
from types import SimpleNamespace

import pytest
import torch

SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "fixed"}
SAMPLES = 3000
PROMPT = [7, 300, 12, 45]


def test_sampling_parameters_reach_every_drafted_row():
    """The seam at expand_batch_to_tokens: vLLM 0.32's CPU kernel leaves its output unwritten."""
    from vllm.v1.sample import rejection_sampler

    from vllm_eesd.host import plugin

    plugin.prepare_worker("V1", "V1")
    cumulative = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (torch.tensor([0.5, 9.0, 1.5]), torch.tensor([4, 9, 2], dtype=torch.int32)):
        expanded = rejection_sampler.expand_batch_to_tokens(values, cumulative, 5)
        assert expanded.tolist() == [values[0]] * 2 + [values[2]] * 3
    greedy = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.0, 0.7]), torch.tensor([1, 3]), 3, 0, 1)
    assert greedy.tolist() == pytest.approx([1.0, 0.7, 0.7])


@pytest.mark.parametrize("sampled", [False, True], ids=["one-hot", "sampled"])
def test_placeholder_drafts_are_rejected(sampled):
    """The seam at rejection_sample: vLLM 0.32's CPU kernel accepts -1 with the probability beside its row."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from vllm_eesd.host import plugin

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernels for other devices reject placeholders themselves")
    current_platform.register_triton_kernel_overrides()  # a worker does it when it starts
    plugin.prepare_worker("V1", "V1")
    torch.manual_seed(0)
    num_reqs, target = 20_000, torch.tensor([0.05, 0.15, 0.2, 0.6])
    drafts = torch.tensor([1, -1, -1, -1, -1], dtype=torch.int32).repeat(num_reqs)
    metadata = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(2 * num_reqs), generators={})
    output = rejection_sampler.rejection_sample(
        drafts,
        [3, 2] * num_reqs,
        3,
        torch.tensor([3, 2] * num_reqs, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.full((len(drafts), 4), 0.25) if sampled else None,
        target.log().repeat(len(drafts), 1),
        torch.full((2 * num_reqs, 1), 3, dtype=torch.int32),
        metadata,
    ).view(num_reqs, 2, 4)
    drafted, padded = output.unbind(1)
    assert (padded[:, 1:] == -1).all() and (drafted[:, 2:] == -1).all()
    behind_accepted = drafted[drafted[:, 1] >= 0][:, 1]
    assert len(behind_accepted) > 0.1 * num_reqs
    for emitted in (padded[:, 0], behind_accepted):
        share = emitted.bincount(minlength=4) / len(emitted)
        # Five standard deviations of the share of a token; accepting by the stray 0.6 is off by twenty and more.
        assert ((share - target).abs() < 5 * (target * (1 - target) / len(emitted)).sqrt()).all()


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7, "top_k": 4}, {"temperature": 1.5, "top_k": 6, "top_p": 0.8}], ids=str
)
@pytest.mark.feature("sampling, several tokens together", "the same distribution")
def test_the_joint_distribution_of_three_tokens_is_plain_vllms(engine, random_target, cloned_head, sampling):
    """Two-sample chi-squared over three-token continuations; seeds are fixed, so the outcome is too."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False, **sampling)
    counts = []
    for spec in (None, SPEC | {"model": cloned_head(random_target, 6, 7)}):
        with engine(random_target, spec, max_num_seqs=256) as llm:
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * SAMPLES, params, use_tqdm=False)
            counts.append(collections.Counter(tuple(o.outputs[0].token_ids[:3]) for o in outputs))
            if spec:
                (stats,) = llm.collective_rpc("eesd_stats")
    assert 0.02 < stats["accepted"] / stats["drafted"] < 0.98  # acceptance and residual sampling both happened
    statistic, degrees = two_sample_chi_squared(*counts)
    assert degrees >= 10
    # The normal approximation's 5 sigma: one false alarm in millions, while a wrong temperature is off by hundreds.
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def two_sample_chi_squared(first, second):
    """Return (statistic, degrees of freedom) of two equally large samples, cells of fewer than 10 pooled into one."""
    cells, pooled = [], [0, 0]
    for key in first.keys() | second.keys():
        pair = [first[key], second[key]]
        if sum(pair) >= 10:
            cells.append(pair)
        else:
            pooled = [a + b for a, b in zip(pooled, pair, strict=True)]
    if sum(pooled):
        cells.append(pooled)
    return sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1
