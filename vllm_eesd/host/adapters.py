"""LoRA adapters, which no draft step knows: a request with one has n-gram drafts only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin


def without_adapters(runner: LoRAModelRunnerMixin, num_tokens: int) -> None:
    """Have the next forward, of so many tokens, and its logits run without adapters, where the engine has any.

    The last forward left its own mapping of tokens to adapters.
    """
    if runner.lora_config:
        runner._set_active_loras((0,) * num_tokens, (0,) * num_tokens, set())
