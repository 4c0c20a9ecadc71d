"""The judge of losslessness: a target so small that the probability of everything it can say is known exactly.

Eight tokens, four generated: 4096 possible answers to one prompt. Their probabilities come from the target's float32
logits, computed by transformers, and from what a request's sampling parameters mean, written down here a second
time in float64. An engine's answers are compared with them by a G-test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2, power_divergence

VOCAB_SIZE = 8
NUM_GENERATED = 4
#: Twice what the G-test's chi-squared approximation is usually granted (5): at 5, a thousand cells and no bias at all,
#: simulated p-values stay below 0.001 in 2 of 1000 cases, at 10 in 0 to 1.
MIN_EXPECTED = 10
#: A top-p cut that lies this close to a cumulative probability may go either way in float32 (its error is about 1e-6).
TOP_P_MARGIN = 1e-5
#: The same of a min-p cut, which is a share of the largest probability.
MIN_P_MARGIN = 1e-5


def write_target(directory: str) -> None:
    """Save an untied 3-layer random Llama whose next-token distributions are neither flat nor one-hot.

    Its last layer changes less than the others do, so that a draft without it is often right and often wrong.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[-1].self_attn.o_proj.weight.mul_(0.5)
        model.model.layers[-1].mlp.down_proj.weight.mul_(0.5)
    model.save_pretrained(directory)


def target_logits(directory: str, prompt: Sequence[int]) -> list[np.ndarray]:
    """Return the logits after every possible output so far, read by transformers.

    Returns:
        For t = 0..NUM_GENERATED - 1 a float32 array [VOCAB_SIZE] * t + [VOCAB_SIZE]: one axis per token generated so
        far, then the next token.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = np.indices((VOCAB_SIZE,) * (NUM_GENERATED - 1)).reshape(NUM_GENERATED - 1, -1).T
    token_ids = np.concatenate([np.tile(prompt, (len(outputs), 1)), outputs], axis=1)
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids)).logits[:, len(prompt) - 1 :].numpy()
    by_output = logits.reshape((VOCAB_SIZE,) * (NUM_GENERATED - 1) + (NUM_GENERATED, VOCAB_SIZE))
    # Attention is causal: what stands behind the first t tokens of an output does not matter, so take zeros.
    return [by_output[(slice(None),) * t + (0,) * (NUM_GENERATED - 1 - t)][..., t, :] for t in range(NUM_GENERATED)]


def next_token_probabilities(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_p: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
) -> np.ndarray:
    """Return what a request with these sampling parameters must draw its next token from, [VOCAB_SIZE] float64.

    Args:
        logits: [VOCAB_SIZE].
        prompt: its token ids.
        output: the tokens generated so far.
        seed: changes nothing, nor does `logprobs`.
    Source: the documentation of vllm.SamplingParams; the order is biases, penalties, temperature,
        min-p, top-k, top-p.
    """
    logits = logits.astype(np.float64)
    for token, bias in (logit_bias or {}).items():
        logits[token] += bias
    counts = np.bincount(np.array(output, dtype=np.int64), minlength=VOCAB_SIZE)
    seen = (counts + np.bincount(prompt, minlength=VOCAB_SIZE)) > 0
    penalised = np.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    logits = np.where(seen, penalised, logits) - frequency_penalty * counts - presence_penalty * (counts > 0)
    if temperature == 0:
        return (np.arange(VOCAB_SIZE) == logits.argmax()).astype(np.float64)
    descending = np.argsort(-logits)
    weights = np.exp((logits - logits.max()) / temperature)
    if min_p:
        assert np.abs(weights - min_p).min() > MIN_P_MARGIN, "float32 may cut elsewhere: choose another min_p"
        weights[weights < min_p] = 0
    if top_k:
        weights[descending[top_k:]] = 0
    probabilities = weights / weights.sum()
    if top_p < 1:
        more_likely = np.cumsum(probabilities[descending]) - probabilities[descending]
        assert np.abs(more_likely - top_p).min() > TOP_P_MARGIN, "float32 may cut elsewhere: choose another top_p"
        probabilities[descending[more_likely >= top_p]] = 0
    return probabilities / probabilities.sum()


def joint_distribution(logits: Sequence[np.ndarray], prompt: Sequence[int], sampling: dict[str, Any]) -> np.ndarray:
    """Return the probability of every output, [VOCAB_SIZE] * NUM_GENERATED float64.

    Args:
        logits: of `target_logits`.
        prompt: its token ids.
        sampling: keyword arguments of `next_token_probabilities`.
    """
    joint = np.ones(())
    for after in logits:
        conditional = np.empty(after.shape)
        for output in np.ndindex(after.shape[:-1]):
            conditional[output] = next_token_probabilities(after[output], prompt, output, **sampling)
        joint = joint[..., None] * conditional
    return joint


def count_outputs(
    llm: Any, prompt: Sequence[int], samplings: Sequence[dict[str, Any]], num_samples: int, run: int = 0
) -> list[np.ndarray]:
    """Return how often the engine gave each output, per sampling an int array [VOCAB_SIZE] * NUM_GENERATED.

    All requests stand in one queue, the samplings taking turns, so that every batch mixes them.

    Args:
        llm: a vLLM engine in this process.
        prompt: its token ids.
        samplings: keyword arguments of `vllm.SamplingParams`; a `seed` is the first request's, the others count on.
        num_samples: requests, all samplings together.
        run: another number draws other samples.
    """
    import torch
    from vllm import SamplingParams

    torch.manual_seed(run)  # the engine's sampler draws from this process's generator
    requests = []
    for number in range(num_samples):
        sampling = samplings[number % len(samplings)]
        if "seed" in sampling:
            sampling = sampling | {"seed": sampling["seed"] + run * num_samples + number}
        requests.append(SamplingParams(max_tokens=NUM_GENERATED, ignore_eos=True, detokenize=False, **sampling))
    answers = llm.generate([{"prompt_token_ids": list(prompt)}] * num_samples, requests, use_tqdm=False)
    outputs = np.array([answer.outputs[0].token_ids for answer in answers])
    counts = np.zeros((len(samplings),) + (VOCAB_SIZE,) * NUM_GENERATED, dtype=np.int64)
    np.add.at(counts, (np.arange(num_samples) % len(samplings), *outputs.T), 1)
    return list(counts)


@dataclass(frozen=True)
class Verdict:
    """What the G-tests say.

    Attributes:
        p_value: of the most suspicious of the tests, times their number; 0 where something impossible was observed.
        per_length: the p-value of the first 1, 2, ... NUM_GENERATED tokens: the first small one shows where it begins.
        num_cells: cells compared at the full length.
        num_impossible: outputs observed whose probability is 0.
    """

    p_value: float
    per_length: tuple[float, ...]
    num_cells: int
    num_impossible: int


def judge(observed: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Verdict:
    """Compare independent samples with their distributions: G-tests of the first 1, 2, ... NUM_GENERATED tokens.

    A fault in one token is a few large deviations among 64 pairs and drowns among 4096 outputs; a fault in how rounds
    hang together shows only in the whole output. So each length is tested, and the samples' statistics are added.

    Args:
        observed: counts, one array per sample.
        expected: probabilities of the same shapes.
    """
    per_length, num_cells = [], 0
    for length in range(1, NUM_GENERATED + 1):
        behind = tuple(range(length, NUM_GENERATED))
        tests = [g_test(o.sum(behind).ravel(), e.sum(behind).ravel()) for o, e in zip(observed, expected, strict=True)]
        statistic, degrees = (sum(column) for column in zip(*tests, strict=True))
        per_length.append(float(chi2.sf(statistic, degrees)) if degrees else 1.0)
        num_cells = degrees + len(tests)
    impossible = sum(int(o[e == 0].sum()) for o, e in zip(observed, expected, strict=True))
    p_value = 0.0 if impossible else min(1.0, min(per_length) * len(per_length))
    return Verdict(p_value, tuple(per_length), num_cells, impossible)


def g_test(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Return (statistic, degrees of freedom) of a G-test over pooled cells, with Williams' correction.

    Args:
        counts: [num_outcomes] int64.
        probabilities: [num_outcomes] float64.
    Source: Williams, Improved likelihood ratio tests for complete contingency tables, Biometrika 63, 1976.
    """
    num_samples = counts.sum()
    cells = pool(num_samples * probabilities)
    expected = np.bincount(cells, weights=num_samples * probabilities)
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0, 0
    statistic, _ = power_divergence(np.bincount(cells, weights=counts), expected, lambda_="log-likelihood")
    # Without it small cells inflate G: simulated p-values without any bias fall below 0.001 four times too often.
    correction = 1 + ((num_samples / expected).sum() - 1) / (6 * num_samples * degrees)
    return float(statistic / correction), degrees


def pool(expected: np.ndarray) -> np.ndarray:
    """Return the cell of each outcome, [num_outcomes] int64: neighbours share one until it expects MIN_EXPECTED.

    Outcomes are ordered as arrays are, so neighbours have their first tokens in common.
    """
    cells, cell, mass = np.zeros(len(expected), dtype=np.int64), 0, 0.0
    for outcome, count in enumerate(expected):
        cells[outcome], mass = cell, mass + count
        if mass > MIN_EXPECTED:
            cell, mass = cell + 1, 0.0
    return np.minimum(cells, max(cell - 1, 0))  # what is left at the end joins the last full cell
