"""The end of a draft step on Model Runner V2: LM head and `choose_tokens`, or `exit_head` where that is faster.

Of a maximum over the vocabulary and its index a compiler makes one program a row; `choose_tokens` has one a tile.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vllm_eesd.host.compat import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VllmConfig,
    direct_register_custom_op,
    get_tp_group,
    support_torch_compile,
)
from vllm_eesd.host.model.draft_step import DYNAMIC, DraftLayers
from vllm_eesd.host.model.layers import is_plain_norm, summed
from vllm_eesd.host.v2 import kernel_choice
from vllm_eesd.host.v2.kernel_choice import Timer, Timing
from vllm_eesd.kernels.gpu import choose_tokens as choose_tokens_kernel
from vllm_eesd.kernels.gpu import exit_head as exit_head_kernel


def exit_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    vocab_size: int,
    norm_weight: torch.Tensor,
    eps: float,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable tokens, [num_rows] int64, and their probabilities, [num_rows] float32.

    Args:
        hidden_states: [num_rows, hidden_size], not normed.
        weight: [at least vocab_size, hidden_size], the LM head, padded.
        norm_weight, eps: of the RMSNorm.
        token_ids: [vocab_size] int64, the target's ids of a draft vocabulary.
    """
    given = hidden_states, weight[:vocab_size]
    drafted = exit_head_kernel.exit_head(*given, norm_weight=norm_weight, eps=eps, d2t=token_ids)
    return drafted.token_ids, drafted.top1_prob


def _exit_head_fake(hidden_states, weight, vocab_size, norm_weight, eps, token_ids):
    return _choose_tokens_fake(hidden_states, token_ids)


_LIBRARY = torch.library.Library("eesd", "FRAGMENT")
direct_register_custom_op("exit_head", exit_head, [], _exit_head_fake, target_lib=_LIBRARY)


def choose_tokens(logits: torch.Tensor, token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable tokens, [num_rows] int64, and their probabilities, [num_rows] float32.

    Args:
        logits: [num_rows, vocabulary drafted from].
        token_ids: see `exit_head`.
    """
    chosen = choose_tokens_kernel.choose_tokens(logits, d2t=token_ids)
    return chosen.token_ids, chosen.top1_prob


def _choose_tokens_fake(logits, token_ids):
    num_rows = logits.shape[0]
    return logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows, dtype=torch.float32)


direct_register_custom_op("choose_tokens", choose_tokens, [], _choose_tokens_fake, target_lib=_LIBRARY)


@support_torch_compile(dynamic_arg_dims=DYNAMIC)
class TiledDraftStep(DraftLayers):
    """A `DraftStep` that ends with the `choose_tokens` kernel."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `DraftStep.forward`."""
        logits, vocabulary = self.logits(input_ids, positions, context), self.vocabulary
        return *torch.ops.eesd.choose_tokens(logits, None if vocabulary is None else vocabulary.token_ids), logits


@support_torch_compile(dynamic_arg_dims=DYNAMIC)
class KernelDraftStep(DraftLayers):
    """A `DraftStep` whose last norm, LM head, argmax and confidence are the `exit_head` kernel.

    It writes no logits: drawn drafts, which are verified against theirs, come from the other step.
    """

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DraftStep.forward`, without the logits."""
        hidden_states, residual = self.before_norm(input_ids, positions, context)
        norm = self.last_norm
        lm_head, vocab_size, token_ids = head_of(self)
        return torch.ops.eesd.exit_head(
            summed(hidden_states, residual),
            lm_head.weight,
            vocab_size,
            norm.weight,
            norm.variance_epsilon,
            token_ids,
        )


def head_of(step: DraftLayers) -> tuple[nn.Module, int, torch.Tensor | None]:
    """Return the LM head that drafts, how many of its rows are tokens, and their ids in the target's vocabulary."""
    vocabulary = step.vocabulary
    if vocabulary is None:
        return step.target.lm_head, step.target.logits_processor.org_vocab_size, None
    return vocabulary.lm_head, len(vocabulary.token_ids), vocabulary.token_ids


def exit_head_obstacle(step: DraftLayers, dtype: torch.dtype) -> str | None:
    """Return what keeps the `exit_head` kernel from ending this draft step; None if nothing does.

    Args:
        dtype: of the hidden states.
    """
    lm_head, vocab_size, _ = head_of(step)
    processor = step.target.logits_processor
    plain = isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
    if get_tp_group().world_size > 1:
        return "the LM head is spread over ranks"
    if not plain or lm_head.weight.ndim != 2 or len(lm_head.weight) < vocab_size or lm_head.weight.dtype != dtype:
        return f"the LM head is no plain {dtype} matrix"
    if lm_head.bias is not None or processor.scale != 1.0 or processor.soft_cap is not None:
        return "the logits are biased, scaled or capped"
    if processor.head_dtype not in (None, dtype):
        return f"the LM head runs in {processor.head_dtype}"
    return None if is_plain_norm(step.last_norm) else f"the last norm is a {type(step.last_norm).__name__}"


@torch.inference_mode()
def exit_head_rows(step: DraftLayers, vllm_config: VllmConfig, timer: Timer | None) -> int:
    """Return the largest batch whose draft steps the `exit_head` kernel should end; 0 for none.

    Args:
        step: any; its LM head is loaded.
        timer: `kernel_choice.timer_for`.
    """
    dtype, most = vllm_config.model_config.dtype, vllm_config.scheduler_config.max_num_seqs
    if timer is None:
        return 0
    if obstacle := exit_head_obstacle(step, dtype):
        kernel_choice.log_not_used("exit_head", obstacle)
        return 0
    lm_head, vocab_size, token_ids = head_of(step)
    norm, weight = step.last_norm, lm_head.weight

    def choose(logits: torch.Tensor) -> None:
        choose_tokens(logits[:, :vocab_size], token_ids)

    def time(num_rows: int) -> Timing:
        x = torch.ones(num_rows, weight.shape[1], dtype=dtype, device=weight.device)
        arguments = x, weight, vocab_size, norm.weight, norm.variance_epsilon, token_ids
        return Timing(num_rows, *timer(lambda: exit_head(*arguments), lambda: choose(F.linear(norm(x), weight))))

    return kernel_choice.decide("exit_head", kernel_choice.sizes_up_to(most), time)
