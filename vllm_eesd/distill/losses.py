"""Distillation losses over the vocabulary, computed some tokens at a time so that logits never exist all at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits that exist at one time: 32 MiB of float32, and a few arrays of that size.
CHUNK_LOGITS = 1 << 23


class _ForwardKL(torch.autograd.Function):
    """Keeps the gradient, [num_tokens, hidden_size], instead of the logits it comes from.

    For logits z = W x of the head, d KL(p || softmax z) / dz = softmax z - p, so d/dx = W^T (q - p).
    W is frozen and gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = draft.new_zeros((), dtype=torch.float32)
        gradients = []
        chunk = max(1, CHUNK_LOGITS // len(weight))
        for draft_chunk, target_chunk in zip(draft.split(chunk), target.split(chunk), strict=True):
            target_logprobs = F.linear(target_chunk, weight, bias).float().log_softmax(-1)
            draft_logprobs = F.linear(draft_chunk, weight, bias).float().log_softmax(-1)
            probs = target_logprobs.exp()
            total = total + (probs * (target_logprobs - draft_logprobs)).sum()
            gradients.append((draft_logprobs.exp() - probs).to(weight.dtype) @ weight)
        ctx.save_for_backward(torch.cat(gradients).to(draft.dtype) / len(draft))
        return total / len(draft)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_output * gradient, None, None, None


def forward_kl(draft: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the mean KL(target || draft) in nats per token.

    Args:
        draft: [num_tokens, hidden_size] normed output of the exit head; gets the gradient.
        target: [num_tokens, hidden_size] normed output of the target.
        weight: [vocab_size, hidden_size] the LM head both share, frozen.
        bias: [vocab_size] or None.
    """
    return _ForwardKL.apply(draft, target, weight, bias)
