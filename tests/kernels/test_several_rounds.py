"""Output sampled over several rounds has the target's law: numbers that are counted by position are not drawn twice.

A position behind the accepted drafts is drafted and judged again in the next round. Where what was drawn for it first
had a part in what happened since, the same number there biases the output, which no test of one round can see.
"""

import itertools

import pytest
import torch
from vllm_eesd.kernels.reference import noise
from vllm_eesd.kernels.reference import rejection as reference

VOCAB_SIZE, NUM_TOKENS, K, NUM_SAMPLES = 4, 4, 3, 60_000
#: What vLLM adds to a position where it draws drafts.
DRAFTING = 1 << 30
PROMPT = (1, 0)


def after(tokens, length):
    """Which row of a table of logits follows each text: that of its last two tokens."""
    rows = torch.arange(len(tokens))
    return tokens[rows, length - 2] * VOCAB_SIZE + tokens[rows, length - 1]


def tables():
    g = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB_SIZE**2, VOCAB_SIZE, generator=g) * 1.2
    return target, target + torch.randn(target.shape, generator=g) * 1.2


def law():
    """The target's probability of every output, [VOCAB_SIZE ** NUM_TOKENS] float64; the first token counts most."""
    p = tables()[0].double().softmax(-1)
    outputs = itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS)
    texts = [(*PROMPT, *output) for output in outputs]
    factors = [[p[text[i] * VOCAB_SIZE + text[i + 1], text[i + 2]] for i in range(NUM_TOKENS)] for text in texts]
    return torch.tensor(factors, dtype=torch.float64).prod(-1)


def sampled(block_verification, lengths_by_confidence):
    """How often each output came, every sample with a seed of its own, as Model Runner V2 draws and judges.

    Args:
        lengths_by_confidence: a round drafts only if the round before was confident behind its second draft, whether or
            not that was ever verified.
    """
    target, draft = tables()
    seeds, rows = torch.arange(1, NUM_SAMPLES + 1) * 7919, torch.arange(NUM_SAMPLES)
    texts = torch.tensor(PROMPT).repeat(NUM_SAMPLES, 1)
    texts = torch.nn.functional.pad(texts, (0, NUM_TOKENS + K + 1))
    lengths, end = torch.full((NUM_SAMPLES,), len(PROMPT)), len(PROMPT) + NUM_TOKENS
    may_draft = torch.ones(NUM_SAMPLES, dtype=torch.bool)
    while (lengths < end).any():
        going_on, start = lengths < end, lengths.clamp(max=end)
        draft_logits, confidences = [], []
        target_logits = [target[after(texts, start)]]
        for step in range(K):
            draft_logits.append(draft[after(texts, start + step)])
            confidences.append(draft_logits[-1].softmax(-1).amax(-1))
            counters = noise.draw_counters(start - 1 + step, torch.full_like(start, step)) + DRAFTING
            gumbel = noise.gumbel(seeds[:, None], counters[:, None], torch.arange(VOCAB_SIZE))
            texts[rows, start + step] = (draft_logits[-1] + gumbel).argmax(-1)
            target_logits.append(target[after(texts, start + step + 1)])
        inputs = texts[rows[:, None], start[:, None] - 1 + torch.arange(K + 1)]
        inputs[:, 1:][~may_draft] = -1
        verified = reference.rejection(
            torch.stack(target_logits, dim=1).flatten(0, 1),
            inputs.flatten(),
            torch.arange(NUM_SAMPLES + 1, dtype=torch.int32) * (K + 1),
            K,
            temperature=torch.ones(NUM_SAMPLES),
            draft_logits=torch.stack(draft_logits, dim=1),
            seeds=seeds,
            positions=(start[:, None] - 1 + torch.arange(K + 1)).flatten(),
            block_verification=block_verification,
        )
        if lengths_by_confidence:
            may_draft = confidences[2] > 0.6
        for step in range(K + 1):
            emitted = going_on & (step < verified.num_sampled)
            texts[rows[emitted], lengths[emitted] + step] = verified.sampled[emitted, step].long()
        lengths = torch.where(going_on, lengths + verified.num_sampled, lengths)
    outputs = texts[:, len(PROMPT) : end]
    index = (outputs * VOCAB_SIZE ** torch.arange(NUM_TOKENS - 1, -1, -1)).sum(1)
    return torch.bincount(index, minlength=VOCAB_SIZE**NUM_TOKENS)


@pytest.mark.parametrize("lengths_by_confidence", [False, True], ids=["longest drafts", "by confidence"])
@pytest.mark.parametrize("block_verification", [False, True], ids=["token", "block"])
def test_output_of_several_rounds_has_the_targets_law(assert_same_law, block_verification, lengths_by_confidence):
    assert_same_law(sampled(block_verification, lengths_by_confidence), law())


def test_the_same_test_twice_at_a_position_is_noticed(assert_same_law, monkeypatch):
    """As vLLM 0.32 verifies blocks."""
    monkeypatch.setattr(reference, "step_seed", lambda seed, step: seed)
    with pytest.raises(AssertionError, match="chi-squared"):
        assert_same_law(sampled(True, False), law())


def test_the_same_draw_twice_at_a_position_is_noticed(assert_same_law, monkeypatch):
    monkeypatch.setattr(noise, "draw_counters", lambda positions, steps: positions)
    with pytest.raises(AssertionError, match="chi-squared"):
        assert_same_law(sampled(False, True), law())
