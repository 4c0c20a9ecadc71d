"""What `eesd distill` takes: its flags show these fields with their defaults and descriptions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_eesd.config import MAX_HEAD_LAYERS

#: Of a deep-context head. At the same draft cost, N = 1 with two beats N = 2 with one (KL 0.220 and 0.295 after 33
#: million tokens, embedded model).
DEFAULT_HEAD_LAYERS = 2


class TrainConfig(BaseModel):
    """How to train. The learning rate goes up over `train.WARMUP_STEPS`, then down along a cosine.

    Two runs that differ in `steps`, `minutes`, `accumulate` or `compile` only may be parts of one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(1000, ge=1, description="optimizer steps of the whole run, resumed parts included")
    minutes: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="stop after this long, resumed parts included, if earlier"
    )
    batch: int = Field(8, ge=1, description="sequences a step")
    seq_len: int = Field(512, ge=2, description="tokens a sequence")
    accumulate: int = Field(1, ge=1, description="parts a step is computed in, to save memory")
    lr: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="peak learning rate (default: by the target's width; an eighth of that if init is a head)",
    )
    init: str | None = Field(
        None,
        description="start from the target's last or exit layers, or from another head (default: last; exit if "
        "exit_layer is 0)",
    )
    loss: Literal["forward_kl", "reverse_kl", "tv", "ce_target", "ce_text", "jsd"] = Field(
        "forward_kl", description="what the head minimises"
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="beta of jsd")
    position_decay: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="in a deep_context head's loss the token at place k of a draft weighs exp(-k / D); 0: all alike",
    )
    head_type: Literal["transformer", "deep_context", "mlp"] = Field("deep_context", description="what the head is")
    head_layers: int | None = Field(
        None,
        ge=1,
        le=MAX_HEAD_LAYERS,
        description=f"decoder layers of the head; more than one with deep_context only (default: {DEFAULT_HEAD_LAYERS} "
        "there, else 1; or those of the head in init)",
    )
    aux_layers: list[int] | None = Field(
        None,
        description="layers of the target whose inputs a deep_context head sees verified tokens through too (default: "
        "at a quarter, half and three quarters of its depth, if behind the exit layer; or those of the head in init)",
    )
    draft_vocab: int | None = Field(
        None, ge=1, description="draft from the V (32k: 32000) most frequent tokens of the data only"
    )
    seed: int = Field(0, ge=0, description="of the order of the data and of generated text")
    compile: bool = Field(False, description="compile the training step: slow to start, about a fifth faster on a CPU")

    @property
    def init_head(self) -> str | None:
        """The directory of the head that training goes on with, None where it starts from the target's layers."""
        return None if self.init in (None, "last", "exit") else self.init

    @model_validator(mode="after")
    def _text_is_in_the_vocabulary(self) -> Self:
        if self.draft_vocab is not None and self.loss == "ce_text":
            raise ValueError("loss is 'ce_text', must be another one with draft_vocab: text has tokens outside it")
        return self


class DistillConfig(TrainConfig):
    """A whole run: which target, on which text, and what to write."""

    model: str = Field(description="target: a directory or a Hub id")
    exit_layer: int | Literal["auto"] = Field(description="target layers a draft runs, or auto: as eesd probe chooses")
    data: list[str] = Field(
        [],
        description="text, .py, .jsonl with a `text` a line, .bin token ids; or a directory or Hub data set of text",
    )
    from_trace: list[str] = Field(
        [], description="traces of what was served, whose texts are trained on, with --data or without"
    )
    held_out: list[str] = Field([], description="to measure on; default: windows of --data")
    output: str = Field(description="directory to write the head to")
    self_generate: int = Field(0, ge=0, description="also train on W windows the target wrote")
    temperature: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        [1.0], min_length=1, description="of what the target writes, half of which is greedy; several take turns"
    )
    generator: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="what runs the target while it writes; auto is vLLM where it can"
    )
    shard_target: bool = Field(False, description="launched processes share one copy of the target (FSDP)")
    measure_every: int = Field(100, ge=1, description="measure on held-out text after every S steps")
    measure_greedy: bool = Field(False, description="measure on the target's greedy text, as with --self-generate")
    tensorboard: str | None = Field(None, description="write the losses there (needs tensorboard)")
    work: str | None = Field(None, description="checkpoints to resume from and write to")
    json_: str | None = Field(None, alias="json", description="write the training record")

    @model_validator(mode="after")
    def _there_is_text(self) -> Self:
        if not self.data and not self.from_trace:
            raise ValueError("data is empty, must name files, directories or data sets unless from_trace does")
        return self

    @model_validator(mode="after")
    def _layers_can_be_gathered(self) -> Self:
        if self.shard_target and self.compile:
            raise ValueError("shard_target is set, must not be with compile: a compiled step cannot gather layers")
        return self
