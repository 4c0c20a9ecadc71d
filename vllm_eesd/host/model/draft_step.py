"""The draft step: target layers [0, N), the exit head, the LM head and a token, one compiled graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from vllm_eesd.host.compat import (
    VllmConfig,
    create_forward_context,
    override_forward_context,
    support_torch_compile,
)
from vllm_eesd.host.model.draft_vocabulary import DraftVocabulary
from vllm_eesd.host.model.layers import carries_residual, normed, run_layer, summed

#: What every compiled draft step's batch is.
DYNAMIC = {"input_ids": 0, "positions": 0, "context": 0}


class DraftLayers(nn.Module):
    """Target layers [0, N) and the exit head's: all of a draft step up to the last norm.

    The target's modules are used in place, on the target's own KV slots; this module owns no parameter.

    Args:
        vllm_config: of the engine.
        prefix: vLLM's, unused.
        target: loaded.
        exit_layer: N.
        head: an `exit_head.ExitHead`; None drafts with the target's own norm.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        target: nn.Module,
        exit_layer: int,
        head: nn.Module | None,
    ) -> None:
        super().__init__()
        # Tuples hide the target's modules from this one's parameter list.
        self._target = (target,)
        self._layers = tuple(target.model.layers[:exit_layer])
        self._with_residual = carries_residual(target.model.layers[0])
        # Granite's model scales what it embeds; the other targets' configs have no such field.
        self._embedding_scale = getattr(vllm_config.model_config.hf_text_config, "embedding_multiplier", 1.0)
        self._head = (head,)

    def modules(self) -> Iterator[nn.Module]:
        """Yield the head's modules as well: vLLM looks here for the layers whose KV cache it takes away in the end."""
        yield from super().modules()
        if self._head[0] is not None:
            yield from self._head[0].modules()

    @property
    def reads_target_output(self) -> bool:
        """Whether `round_context` needs the target's output at all."""
        return self._head[0] is not None and self._head[0].kind.reads_target_output

    def round_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the `context` of a round's steps, see `ExitHead.round_context`."""
        return None if self._head[0] is None else self._head[0].round_context(target_hidden_states)

    @property
    def target(self) -> nn.Module:
        """The loaded target."""
        return self._target[0]

    @property
    def last_norm(self) -> nn.Module:
        """The norm before the LM head."""
        return self.target.model.norm if self._head[0] is None else self._head[0].norm

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """What of the target's vocabulary is drafted from; None is all of it."""
        return None if self._head[0] is None else self._head[0].vocabulary

    def whole(self, values: torch.Tensor, elsewhere: float = -torch.inf) -> torch.Tensor:
        """Return what a step's logits say over the target's vocabulary, [num_rows, vocab_size].

        Only drafts that are drawn need that, so a step does not make it itself.

        Args:
            values: the step's logits, or its probabilities.
            elsewhere: what stands where nothing is drafted.
        """
        return values if self.vocabulary is None else self.vocabulary.whole(values, elsewhere)

    def before_norm(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return two tensors whose sum goes through `last_norm`, [num_rows, hidden_size]; None is 0.

        Args:
            input_ids: [num_rows] int64.
            positions: [num_rows] int64.
            context: [num_rows, hidden_size] or None.
        """
        target, head = self.target, self._head[0]
        hidden_states, residual = target.model.embed_input_ids(input_ids), None
        if self._embedding_scale != 1.0:
            hidden_states = hidden_states * self._embedding_scale
        for layer in self._layers:
            hidden_states, residual = run_layer(layer, self._with_residual, positions, hidden_states, residual)
        if head is None:
            return hidden_states, residual
        hidden_states = summed(hidden_states, residual)
        return head(positions, hidden_states if context is None else hidden_states + context)

    def logits(self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Return the logits, [num_rows, vocabulary drafted from]; see `before_norm`."""
        hidden_states = normed(self.last_norm, *self.before_norm(input_ids, positions, context))
        return (self.target if self.vocabulary is None else self.vocabulary).compute_logits(hidden_states)


@support_torch_compile(dynamic_arg_dims=DYNAMIC)
class DraftStep(DraftLayers):
    """One token per row: the draft layers, LM head and argmax, compiled as vLLM compiles the target."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the most probable tokens, [num_rows] int64, their probabilities, [num_rows] float32, and the logits.

        With a draft vocabulary, probabilities are shares within it, and the logits are its own: see `whole`.

        Args:
            input_ids, positions, context: see `before_norm`.
        """
        logits, vocabulary = self.logits(input_ids, positions, context), self.vocabulary
        best = logits.float().max(dim=-1)
        token_ids = best.indices if vocabulary is None else vocabulary.token_ids_of(best.indices)
        return token_ids, (best.values - logits.float().logsumexp(dim=-1)).exp(), logits


@torch.inference_mode()
def compile_draft_step(
    step: DraftLayers, vllm_config: VllmConfig, device: torch.device, token_dtype: torch.dtype = torch.int64
) -> None:
    """Run the step once, which compiles it; two rows, because a batch of one would be compiled for one only.

    Args:
        token_dtype: of the token ids that drafting will pass. vLLM drops a compiled graph's guards: ids of another
            width would be read as if they had this one.
    """
    if step.do_not_compile:
        return
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    model_config = vllm_config.model_config
    hidden_states = torch.zeros(2, model_config.get_hidden_size(), dtype=model_config.dtype, device=device)
    with override_forward_context(create_forward_context(None, vllm_config)):
        step(rows.to(token_dtype), rows.clone(), step.round_context(hidden_states))
