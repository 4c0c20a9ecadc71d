"""Distillation losses over the vocabulary, computed some tokens at a time so that logits never exist all at once.

Each is a function of the two distributions p (target) and q = softmax(z) (draft) at one position; its gradient with
respect to the draft's logits z is written out beside it. A divergence D with dD/dq = f has dD/dz = q (f - sum q f).
Source: arXiv 2310.08461 (DistillSpec), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_eesd.distill.config import TrainConfig

# Logits that exist at one time: 32 MiB of float32, and a few arrays of that size. On a CPU 4 MiB, about what its cache
# holds: 16,000 columns then take half the time.
CHUNK_LOGITS, CPU_CHUNK_LOGITS = 1 << 23, 1 << 20

#: Keeps the logarithm of an acceptance, and what is divided by one, finite.
LEAST_ACCEPTANCE = 1e-6
#: How fast `lk_hybrid` goes over to total variation as acceptance rises.
LK_RATE = 3.0

# (log p, log q, token ids of the text or None) -> ([num_tokens] loss, [num_tokens, vocab_size] its gradient in z).
Loss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def forward_kl(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q); gradient q - p."""
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), log_q.exp() - p


def reverse_kl(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p); f = log q - log p + 1."""
    q, ratio = log_q.exp(), log_q - log_p
    loss = (q * ratio).sum(-1)
    return loss, q * (ratio - loss[:, None])


def jensen_shannon(beta: float) -> Loss:
    """Return the loss beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q; f = (1 - beta) log(q / m).

    Args:
        beta: in (0, 1); near 0 the gradient's direction is forward KL's, near 1 reverse KL's.
    Source: arXiv 2306.13649 (GKD), section 2.
    """

    def loss(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        q = log_q.exp()
        pull = (1 - beta) * (log_q - log_m)
        towards = (q * pull).sum(-1, keepdim=True)
        return beta * (log_p.exp() * (log_p - log_m)).sum(-1) + towards[:, 0], q * (pull - towards)

    return loss


def total_variation(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """sum |p - q| / 2 = 1 - sum min(p, q), what sampled drafting rejects; f = sign(q - p) / 2."""
    q = log_q.exp()
    difference = q - log_p.exp()
    pull = difference.sign() / 2
    return difference.abs().sum(-1) / 2, q * (pull - (q * pull).sum(-1, keepdim=True))


def negative_log_acceptance(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-log a, a = sum min(p, q) the chance that a drawn draft is accepted; f = -[q < p] / a.

    Source: arXiv 2602.23881 (LK losses), section 3.
    """
    q = log_q.exp()
    accepted = torch.minimum(q, log_p.exp()).sum(-1).clamp(min=LEAST_ACCEPTANCE)
    pull = (log_q < log_p).to(q.dtype) / -accepted[:, None]
    return -accepted.log(), q * (pull - (q * pull).sum(-1, keepdim=True))


def lk_hybrid(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) TV(p, q), w = exp(-3 a) at each position: the nearer the draft is, the more it is TV's.

    a = sum min(p, q), which gets no gradient through w. Source: arXiv 2602.23881 (LK losses), section 3.
    """
    divergence, towards_p = forward_kl(log_p, log_q)
    variation, towards_overlap = total_variation(log_p, log_q)
    weight = (-LK_RATE * (1 - variation)).exp()
    gradient = weight[:, None] * towards_p + (1 - weight[:, None]) * towards_overlap
    return weight * divergence + (1 - weight) * variation, gradient


def target_cross_entropy(log_p: Tensor, log_q: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """-log q at the target's own choice, argmax p, which is what greedy drafting must hit; gradient q - one-hot."""
    return text_cross_entropy(log_p, log_q, log_p.argmax(-1))


def text_cross_entropy(log_p: Tensor, log_q: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """-log q at the text's next token, as a language model is trained: the target is not asked. For comparison."""
    index = labels[:, None]
    return -log_q.gather(-1, index)[:, 0], log_q.exp().scatter_add(-1, index, -torch.ones_like(log_q[:, :1]))


LOSSES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
    "ce_target": target_cross_entropy,
    "ce_text": text_cross_entropy,
}
LOSS_NAMES: tuple[str, ...] = get_args(TrainConfig.model_fields["loss"].annotation)


def build_loss(name: str, jsd_beta: float = 0.5) -> Loss:
    """Return the loss `name`, one of LOSS_NAMES; jsd_beta is the beta of `jsd`."""
    return jensen_shannon(jsd_beta) if name == "jsd" else LOSSES[name]


class _Chunked(torch.autograd.Function):
    """Keeps the gradient, [num_tokens, hidden_size], instead of the logits it comes from.

    With z = W x, d/dx = W^T d/dz. W is frozen and gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        draft: Tensor,
        target: Tensor,
        lm_head: tuple[Tensor, Tensor | None],
        labels: Tensor | None,
        loss: Loss,
        weights: Tensor,
    ) -> Tensor:
        weight, bias = lm_head
        total = draft.new_zeros((), dtype=torch.float32)
        gradients = []
        chunk = max(1, (CPU_CHUNK_LOGITS if draft.device.type == "cpu" else CHUNK_LOGITS) // len(weight))
        for first in range(0, len(draft), chunk):
            some = slice(first, first + chunk)
            log_p = F.linear(target[some], weight, bias).float().log_softmax(-1)
            log_q = F.linear(draft[some], weight, bias).float().log_softmax(-1)
            value, gradient = loss(log_p, log_q, None if labels is None else labels[some])
            total = total + (value * weights[some]).sum()
            gradients.append((gradient * weights[some, None]).to(weight.dtype) @ weight)
        ctx.save_for_backward(torch.cat(gradients).to(draft.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad_output * gradient, *[None] * 5


def distillation_loss(
    loss: Loss,
    draft: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the mean loss per token, weighted.

    Args:
        loss: of LOSSES, or `jensen_shannon(beta)`.
        draft: [num_tokens, hidden_size] normed output of the exit head; gets the gradient.
        target: [num_tokens, hidden_size] normed output of the target.
        weight: [vocab_size, hidden_size] the LM head both share, frozen.
        bias: [vocab_size] or None.
        labels: [num_tokens] int64, the text's next tokens; only `text_cross_entropy` reads them.
        weights: [num_tokens] float32, how much each token counts; None: all alike.
    """
    weights = torch.ones(len(draft), device=draft.device) if weights is None else weights
    return _Chunked.apply(draft, target, (weight, bias), labels, loss, weights / weights.sum())
