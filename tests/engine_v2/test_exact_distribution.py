"""Sampled output has the target's distribution where drafts are sampled too, and a planted bug is seen."""

from typing import get_args

import exact_distribution as exact
import pytest
import torch

from vllm_eesd.config import EESDConfig

PROMPT = (3, 1, 4, 1, 5)
SAMPLING = {"temperature": 1.0}
POLICIES = get_args(EESDConfig.model_fields["policy"].annotation)
#: In the same batch; so few samples show little more than that they are possible ones, on a GPU there are enough.
OTHERS = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 1.5, "seed": 1000},
    {"temperature": 1.5, "repetition_penalty": 1.8},
]
if torch.cuda.is_available():  # Triton's interpreter cannot run vLLM's kernel for these
    OTHERS += [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.5, "top_k": 6, "top_p": 0.8}]
#: Where kernels are interpreted a sample takes a third of a second: few, of which a planted bug needs fewer.
NUM_SAMPLES, NUM_SAMPLES_PLANTED = (15_000 if torch.cuda.is_available() else 110), 50
SIGNIFICANCE = 1e-4
OPTIONS = {"max_num_seqs": 64, "max_model_len": 32, "num_gpu_blocks_override": 256, "block_size": 32}


@pytest.fixture(scope="module")
def expected(eight_token_target):
    logits = exact.target_logits(eight_token_target, PROMPT)
    return [exact.joint_distribution(logits, PROMPT, sampling) for sampling in (SAMPLING, *OTHERS)]


def sample(engine, target, head, expected, num_samples, requests, policies=(), **spec):
    """Return the verdict on an engine's outputs, and its counters.

    Args:
        expected: the distribution of all `requests` but the last ones, then theirs, one by one.
        policies: take turns, each with its share of the samples; the engine's own where there are none.
    """
    spec |= {"method": "eesd", "model": head, "num_speculative_tokens": 3}
    with engine(target, spec, **OPTIONS) as llm:
        runs = []
        for run, name in enumerate(policies or (None,)):
            if name is not None:
                llm.collective_rpc("eesd_use_policy", args=(name,))
            runs.append(exact.count_outputs(llm, PROMPT, requests, num_samples // max(len(policies), 1), run))
        counts = [sum(parts) for parts in zip(*runs, strict=True)]
        (stats,) = llm.collective_rpc("eesd_stats")
    alike = len(requests) - len(expected) + 1
    return exact.judge([sum(counts[:alike]), *counts[alike:]], expected), stats


@pytest.mark.parametrize("ends_in", ["torch", "kernels"])
def test_sampled_output_has_the_targets_distribution(
    engine, eight_token_target, cloned_head, head_of_two_layers, expected, ends_in, force_kernels, monkeypatch
):
    """From a draft vocabulary, which is all that drafting from the whole one is, and its logits scattered.

    With kernels from a deep-context head of two layers.
    """
    calls, draft_tokens = None, (0, 2, 3, 4, 6, 7)
    if ends_in == "kernels":
        calls, head = force_kernels(monkeypatch), head_of_two_layers(eight_token_target, 1, [2], draft_tokens)
    else:
        head = cloned_head(eight_token_target, 1, 1, draft_tokens)  # the last layer is left out: good, not perfect
    policy = {"policy": "confidence", "policy_args": {"threshold": 0.4}}
    requests = [SAMPLING] * 7 + OTHERS
    verdict, stats = sample(
        engine, eight_token_target, head, expected, NUM_SAMPLES, requests, policies=POLICIES, **policy
    )
    assert verdict.p_value > SIGNIFICANCE, verdict
    assert 0.2 < stats["accepted"] / stats["drafted"] < 0.95
    assert stats["draft_length_histogram"][1] and stats["draft_length_histogram"][2]
    assert calls is None or calls["exit_head"] and calls["kv_fill"]


def test_likely_drafts_passed_off_as_sampled_are_noticed(
    engine, eight_token_target, cloned_head, expected, monkeypatch
):
    """The test above can fail: the most probable token, verified as if it had been drawn, comes out too often."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    draw = EarlyExitSpeculator._sample

    def most_probable(self, logits, confidence):
        draw(self, logits, confidence)  # keeps the logits for verification
        return logits.argmax(dim=-1), confidence

    monkeypatch.setattr(EarlyExitSpeculator, "_sample", most_probable)
    head = cloned_head(eight_token_target, 1, 1)
    verdict, _ = sample(engine, eight_token_target, head, expected[:1], NUM_SAMPLES_PLANTED, [SAMPLING], policy="fixed")
    assert verdict.p_value < SIGNIFICANCE


def test_a_draft_that_ends_before_an_unlikely_token_is_noticed(
    engine, eight_token_target, cloned_head, expected, monkeypatch
):
    """A threshold compared with the drawn token itself: what was drawn decides whether it is submitted."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    draw, end = EarlyExitSpeculator._sample, EarlyExitSpeculator._run_round
    likely = []

    def noting(self, logits, confidence):
        tokens, confidence = draw(self, logits, confidence)
        likely.append(tokens == logits.argmax(dim=-1))
        return tokens, confidence

    def cut(self, step, *args):
        likely.clear()
        end(self, step, *args)
        kept = torch.stack(likely, dim=1).int().cumprod(dim=1).sum(dim=1).cpu().numpy()
        drafted, slots = self.rounds.num_drafted, step.slots()
        drafted[slots] = drafted[slots].clip(max=kept[: len(slots)])

    monkeypatch.setattr(EarlyExitSpeculator, "_sample", noting)
    monkeypatch.setattr(EarlyExitSpeculator, "_run_round", cut)
    head = cloned_head(eight_token_target, 1, 1)
    verdict, stats = sample(
        engine, eight_token_target, head, expected[:1], 4 * NUM_SAMPLES_PLANTED, [SAMPLING], policy="fixed"
    )
    assert stats["drafted"] and verdict.p_value < SIGNIFICANCE
