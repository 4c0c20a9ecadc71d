"""Muon, iterating in the precision that the device multiplies fastest."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vllm_eesd.distill.precision import uses_bfloat16

MOMENTUM = 0.95
#: Of x -> a x + b x^3 + c x^5 on the singular values; so many times brings all of them near 1.
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5
#: Makes an update as large as AdamW's, so that both take one learning rate.
RMS_OF_ADAMW = 0.2


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: every singular value of an update is about 1.

    torch's own Muon always iterates in bfloat16, which a CPU that does not multiply it emulates: 0.3 of a training step
    of the embedded model's head there.

    Args:
        params: matrices.
        lr: learning rate, on AdamW's scale.
        weight_decay: decoupled.
    Source: arXiv 2502.16982, section 2; coefficients and iterations: https://kellerjordan.github.io/posts/muon.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step; parameters without a gradient stay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
                dtype = torch.bfloat16 if uses_bfloat16(gradient.device.type) else torch.float32
                update = orthogonal(gradient.lerp(momentum, MOMENTUM), dtype)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"] * RMS_OF_ADAMW * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return U V^T of `matrix` = U S V^T, nearly: its singular values lie around 1, not at it.

    Args:
        matrix: [rows, columns].
        dtype: to iterate in; the result has the matrix's.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = wide.to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide is matrix else x.T).to(matrix.dtype)
