"""Norm, LM head and the choice of a token in plain torch, for a CPU and as the reference of `exit_head.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .noise import gumbel
from .row_reductions import row_argmax, row_choice, row_top2


class Sampling(NamedTuple):
    """How rows are sampled: per-request state, as Model Runner V2 keeps it, and one of three kinds of noise."""

    temperature: torch.Tensor  # [max_num_reqs] float32, 0 for greedy requests
    seeds: torch.Tensor | None = None  # [max_num_reqs] int64; with positions, V2's noise
    positions: torch.Tensor | None = None  # [num_tokens] int64, counter of a row's random numbers
    exponentials: torch.Tensor | None = None  # [num_tokens, vocab_size] float32, the caller's Exp(1) draws instead
    idx_mapping: torch.Tensor | None = None  # [num_tokens] int64, a row's request; -1 (a padded row) is greedy
    uniforms: torch.Tensor | None = None  # [num_tokens] in [0, 1): the CPU's choice, by inverting the running sum

    def checked(self, num_tokens: int, inverts: bool = False) -> Sampling:
        """Return this with an idx_mapping.

        Args:
            num_tokens: rows.
            inverts: whether uniforms will do: a whole row is at hand, on a CPU.
        Raises:
            ValueError: no noise.
        """
        if inverts and self.uniforms is not None:
            pass
        elif self.exponentials is None and (self.seeds is None or self.positions is None):
            raise ValueError("sampling.seeds: None; a temperature needs seeds and positions, or exponentials")
        if self.idx_mapping is not None:
            return self
        return self._replace(idx_mapping=torch.arange(num_tokens, device=self.temperature.device))


class DraftTokens(NamedTuple):
    """What one draft step says about each row; [num_tokens] each. Statistics are those of softmax(logits), before any
    temperature; None where they were not asked for."""

    token_ids: torch.Tensor  # int64, in the target's vocabulary
    logsumexp: torch.Tensor | None = None  # float32
    top1_prob: torch.Tensor | None = None  # float32, probability of the likeliest token
    margin: torch.Tensor | None = None  # float32, between the two largest logits
    entropy: torch.Tensor | None = None  # float32, nats


class Partials(NamedTuple):
    """One vocabulary shard's share of `DraftTokens`; gather these over ranks, stack them, `merge_partials`."""

    token_ids: torch.Tensor  # [num_tokens] int64, the shard's best, in the target's vocabulary
    statistics: torch.Tensor  # [num_tokens, 5] float32: SCORE, MAXIMUM, SECOND, SUMEXP, WEIGHTED


# Columns of `Partials.statistics`: the best token's score (logit, or logit / temperature + noise), the two largest
# logits, sum exp(logit - maximum), sum exp(logit - maximum) * (logit - maximum).
SCORE, MAXIMUM, SECOND, SUMEXP, WEIGHTED = range(5)


def exit_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_scale: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    logits_out: torch.Tensor | None = None,
    confidence: bool = False,
    entropy: bool = False,
) -> DraftTokens:
    """Return one drafted token per row: RMSNorm, LM head, argmax or Gumbel-max, confidences.

    Logits are rounded to the hidden states' dtype before anything is made of them, as if they had been written; the
    lowest id wins a tie.

    Args:
        hidden_states: [num_tokens, hidden_size], rows contiguous, any row stride.
        weight: [vocab_size, hidden_size], the LM head; hidden_states' dtype, or float8 with `weight_scale`.
        norm_weight: [hidden_size], None where the hidden states are normed already.
        eps: of the RMSNorm.
        weight_scale: [vocab_size] float32, what a row of a float8 weight is multiplied by.
        sampling: temperatures and noise; None if all rows are greedy.
        d2t: [vocab_size] int64, the target's id of each row of `weight`, ascending; None if they are the same.
        logits_out: [num_tokens, target's vocab_size], takes the logits at their target ids; other columns stay.
        confidence: also logsumexp, top1_prob, margin.
        entropy: also the entropy (and the confidences).
    """
    logits = _project(hidden_states, weight, norm_weight, eps, weight_scale)
    if logits_out is not None:
        store_logits(logits_out, logits, d2t)
    return choose_tokens(
        logits,
        sampling=sampling,
        d2t=d2t,
        confidence=confidence,
        entropy=entropy,
    )


def exit_head_partials(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_scale: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    first_token_id: int = 0,
    logits_out: torch.Tensor | None = None,
) -> Partials:
    """Return `exit_head`'s result over one shard of the vocabulary, mergeable with the other shards'.

    Args:
        weight, weight_scale, d2t, sampling.exponentials: this shard's rows or columns.
        first_token_id: the target's id of the shard's first row, where there is no d2t.
        The others: see `exit_head`.
    """
    logits = _project(hidden_states, weight, norm_weight, eps, weight_scale)
    if logits_out is not None:
        store_logits(logits_out, logits, d2t, first_token_id)
    logits = logits.float()
    scores = _scores(logits, sampling, d2t, first_token_id)
    best = row_argmax(scores)
    top = row_top2(logits)
    shifted = logits - top[:, :1]
    exponential = shifted.exp()
    # 0 * -inf is not a number; a token without mass adds nothing.
    weighted = torch.where(exponential > 0, exponential * shifted, 0.0)
    score = scores.gather(-1, best[:, None])[:, 0]
    statistics = [score, top[:, 0], top[:, 1], exponential.sum(-1), weighted.sum(-1)]
    return Partials(_target_ids(best, d2t, first_token_id), torch.stack(statistics, dim=-1))


def merge_partials(partials: Partials, *, confidence: bool = False, entropy: bool = False) -> DraftTokens:
    """Return the result over the whole vocabulary.

    Args:
        partials: stacked, token_ids [num_shards, num_tokens] and statistics [num_shards, num_tokens, 5], shards in the
            order of their ids.
    """
    token_ids, statistics = partials
    score, maximum, second, sumexp, weighted = statistics.unbind(-1)
    best = score.argmax(dim=0, keepdim=True)
    token_ids = token_ids.gather(0, best)[0]
    if not (confidence or entropy):
        return DraftTokens(token_ids)
    top = torch.cat([maximum, second]).topk(2, dim=0).values
    # A shard without any mass (all -inf) must not turn 0 into NaN.
    shift = torch.where(maximum == -torch.inf, 0.0, maximum - top[0])
    factor = torch.where(maximum == -torch.inf, 0.0, shift.exp())
    total = (factor * sumexp).sum(0)
    mean = (factor * (weighted + shift * sumexp)).sum(0) / total
    log_total = total.log()
    return DraftTokens(
        token_ids, top[0] + log_total, total.reciprocal(), top[0] - top[1], log_total - mean if entropy else None
    )


def choose_tokens(
    logits: torch.Tensor,
    *,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    confidence: bool = False,
    entropy: bool = False,
) -> DraftTokens:
    """Return what `exit_head` makes of logits that are there already.

    Args:
        logits: [num_tokens, vocab_size], any float dtype.
        The others: see `exit_head`.
    """
    token_ids = _target_ids(_best(logits, sampling, d2t), d2t, 0)
    if not (confidence or entropy):
        return DraftTokens(token_ids)
    logits = logits.float()
    statistics = _confidences(logits)
    if entropy:
        log_probability = logits - statistics[0][:, None]
        probability = log_probability.exp()
        # 0 * -inf is not a number; a token without mass adds nothing.
        statistics.append(-torch.where(probability > 0, probability * log_probability, 0.0).sum(-1))
    return DraftTokens(token_ids, *statistics)


def _project(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    weight_scale: torch.Tensor | None,
) -> torch.Tensor:
    if norm_weight is not None:
        hidden_states = F.rms_norm(hidden_states, norm_weight.shape, norm_weight, eps)
    if weight_scale is None:
        # On CPUs with AMX torch 2.13 reads past bfloat16 rows of odd length; between strided ones may be anything.
        return F.linear(hidden_states.contiguous(), weight)
    logits = F.linear(hidden_states.float(), weight.float()) * weight_scale
    return logits.to(hidden_states.dtype)


def store_logits(
    logits_out: torch.Tensor, logits: torch.Tensor, d2t: torch.Tensor | None, first_token_id: int = 0
) -> None:
    if d2t is None:
        logits_out[:, first_token_id : first_token_id + logits.shape[1]] = logits
    else:
        logits_out[:, d2t] = logits.to(logits_out.dtype)


def _target_ids(columns: torch.Tensor, d2t: torch.Tensor | None, first_token_id: int) -> torch.Tensor:
    return columns + first_token_id if d2t is None else d2t[columns]


def _best(logits: torch.Tensor, sampling: Sampling | None, d2t: torch.Tensor | None) -> torch.Tensor:
    """Return each row's column: the largest logit, or one drawn, [num_tokens] int64."""
    if sampling is None:
        return row_argmax(logits)
    if sampling.uniforms is None:
        return row_argmax(_scores(logits.float(), sampling, d2t, 0))
    sampling = sampling.checked(logits.shape[0], inverts=True)
    row_temperature = _row_temperature(sampling)
    greedy = row_temperature == 0
    likeliest = row_argmax(logits)
    weights = (logits.float() / torch.where(greedy, 1.0, row_temperature)[:, None]).softmax(dim=-1)
    return torch.where(greedy, likeliest, row_choice(weights, sampling.uniforms, likeliest))


def _row_temperature(sampling: Sampling) -> torch.Tensor:
    """Return [num_tokens] float32; 0 for padded rows."""
    idx_mapping = sampling.idx_mapping
    return sampling.temperature[idx_mapping.clamp(min=0)].float().masked_fill(idx_mapping < 0, 0.0)


def _scores(
    logits: torch.Tensor,
    sampling: Sampling | None,
    d2t: torch.Tensor | None,
    first_token_id: int,
) -> torch.Tensor:
    """Return what is maximised, [num_tokens, vocab_size]: the logits, or logits / temperature + Gumbel noise."""
    if sampling is None:
        return logits
    sampling = sampling.checked(logits.shape[0])
    row_temperature = _row_temperature(sampling)[:, None]
    if sampling.exponentials is not None:
        noise = -sampling.exponentials.log()
    else:
        keys = torch.arange(logits.shape[1], device=logits.device)
        keys = _target_ids(keys, d2t, first_token_id)
        seeds = sampling.seeds[sampling.idx_mapping.clamp(min=0)]
        noise = gumbel(seeds[:, None], sampling.positions[:, None], keys, drafting=True)
    greedy = row_temperature == 0
    return torch.where(greedy, logits, logits / torch.where(greedy, 1.0, row_temperature) + noise)


def _confidences(logits: torch.Tensor) -> list[torch.Tensor]:
    """Return [logsumexp, top1_prob, margin] of float32 logits, [num_tokens] each."""
    top = row_top2(logits)
    # On a CPU softmax and its maximum take half of logsumexp's time; top1_prob is at least 1 / vocab_size.
    top1_prob = logits.softmax(dim=-1).amax(dim=-1)
    return [top[:, 0] - top1_prob.log(), top1_prob, top[:, 0] - top[:, 1]]
