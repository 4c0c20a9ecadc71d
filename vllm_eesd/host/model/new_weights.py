"""The target gets other weights while the engine serves, as from a trainer: what was derived of them follows."""

from __future__ import annotations

from torch import nn

from vllm_eesd.host.compat import UnquantizedEmbeddingMethod, init_logger
from vllm_eesd.host.model.exit_head import ExitHead

logger = init_logger("vllm.eesd")


def follow_new_weights(target: nn.Module, head: ExitHead | None) -> None:
    """Derive again, in place, what the draft model holds of the target's weights; compiled graphs go on reading it.

    Must be called inside `set_current_vllm_config`. What cannot be derived costs drafts, never an answer, so it does
    not fail the update that has just been made.

    Args:
        head: None where the target's own norm drafts, of which nothing is derived.
    """
    _pack_tied_lm_head(target)
    if head is None:
        return
    try:
        head.target_changed(target)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logger.warning("eesd: the exit head is still that of the target's old weights, few drafts may fit: %s", reason)


def _pack_tied_lm_head(target: nn.Module) -> None:
    """Have the LM head use the new embeddings it shares; on a CPU vLLM 0.32 leaves it with a packed copy of the old."""
    lm_head, embeddings = target.lm_head, target.model.embed_tokens
    embeddings = getattr(embeddings, "base_layer", embeddings)  # beside adapters
    tied = lm_head is not embeddings and getattr(lm_head, "weight", None) is getattr(embeddings, "weight", None)
    if tied and isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod):
        lm_head.quant_method.process_weights_after_loading(lm_head)
