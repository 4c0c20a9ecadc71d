"""How to train: what `eesd distill` takes and the training loop goes by."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainConfig(BaseModel):
    """How to train. The learning rate goes up over `train.WARMUP_STEPS`, then down along a cosine.

    Attributes:
        steps: optimizer steps of the whole run, resumed parts included.
        minutes: stop after this long, resumed parts included, if earlier than steps; None is no limit.
        batch: windows a step.
        seq_len: tokens a window.
        accumulate: parts a process computes its share of a step in, one after the other, to save memory.
        lr: the highest learning rate, of Muon for matrices and AdamW for norms; None goes by the target's width.
        init: what the head starts from: the target's "last" or "exit" layer, or the directory of a head.
        loss: what the head minimises, see `vllm_eesd.distill.losses`.
        jsd_beta: of the loss `jsd`.
        head_type: of the head, see `vllm_eesd.distill.model`.
        draft_vocab: tokens the head drafts from, the most frequent ones of the data; None is the whole vocabulary.
        seed: of the order of the data and of generated text.
        compile: torch.compile the step; slow to start, about a fifth faster on a CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(1000, ge=1)
    minutes: float | None = Field(None, gt=0)
    batch: int = Field(8, ge=1)
    seq_len: int = Field(512, ge=2)
    accumulate: int = Field(1, ge=1)
    lr: float | None = Field(None, gt=0)
    init: str = "last"
    loss: Literal["forward_kl", "reverse_kl", "tv", "ce_target", "ce_text", "jsd"] = "forward_kl"
    jsd_beta: float = Field(0.5, gt=0, lt=1)
    head_type: Literal["transformer", "deep_context", "mlp"] = "deep_context"
    draft_vocab: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)
    compile: bool = False

    @model_validator(mode="after")
    def _text_is_in_the_vocabulary(self) -> Self:
        if self.draft_vocab is not None and self.loss == "ce_text":
            raise ValueError("loss is 'ce_text', must be another one with draft_vocab: text has tokens outside it")
        return self
