"""What `eesd distill` takes: its flags show these fields with their defaults and descriptions."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_eesd.config import MAX_HEAD_LAYERS
from vllm_eesd.exit_head.types import DEEP_CONTEXT, HEAD_TYPES, TRAINED, HeadType

#: Of a deep-context head. At the same draft cost, N = 1 with two beats N = 2 with one (KL 0.220 and 0.295 after 33
#: million tokens, embedded model).
DEFAULT_HEAD_LAYERS = 2
DEFAULT_STEPS = 1000


class TrainConfig(BaseModel):
    """How to train. The learning rate goes up over `train.WARMUP_STEPS`, then down along a cosine.

    Two runs that differ in `steps`, `minutes`, `accumulate`, `compile` or `keep_states` only may be parts of one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(
        None,
        ge=1,
        description=f"optimizer steps of the whole run, resumed parts included (default: {DEFAULT_STEPS}; with minutes "
        "as many as they have time for)",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="stop after this long, resumed parts included, if steps are not done before",
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
    loss: Literal["forward_kl", "reverse_kl", "tv", "nla", "lk_hybrid", "ce_target", "ce_text", "jsd"] = Field(
        "forward_kl", description="what the head minimises"
    )
    jsd_beta: float = Field(0.5, gt=0, lt=1, description="beta of jsd")
    position_decay: float = Field(
        4.0,
        ge=0,
        allow_inf_nan=False,
        description="in a deep_context head's loss the token at place k of a draft weighs exp(-k / D); 0: all alike",
    )
    head_type: Literal[tuple(TRAINED)] = Field(DEEP_CONTEXT.name, description="what the head is")
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
        "at a quarter, half and three quarters of its depth, if after the exit layer; or those of the head in init)",
    )
    draft_vocab: int | Literal["auto", "all"] = Field(
        "auto",
        description="draft from the V (32k: 32000) most frequent tokens of the data only, or from all; auto: from as "
        "many as pay best, where the LM head has more parameters than the layers of a draft step",
    )
    train_on: Literal["all", "answers"] = Field(
        "answers", description="tokens of conversations that are trained on; of other text all"
    )
    keep_states: int = Field(
        32,
        ge=0,
        description="GiB of `work` that the target's states of conversations may take: the target is then run once a "
        "conversation; 0 runs it in every step",
    )
    seed: int = Field(0, ge=0, description="of the order of the data and of generated text")
    compile: bool = Field(
        False, description="compile the head for rows of seq_len: half a minute to start, then a third less time in it"
    )

    @property
    def kind(self) -> HeadType:
        """The type of the head."""
        return HEAD_TYPES[self.head_type]

    @property
    def last_step(self) -> float:
        """After how many steps a run ends, infinity where only its minutes end it."""
        return self.steps or (DEFAULT_STEPS if self.minutes is None else math.inf)

    @property
    def init_head(self) -> str | None:
        """The directory of the head that training goes on with, None where it starts from the target's layers."""
        return None if self.init in (None, "last", "exit") else self.init

    @field_validator("draft_vocab")
    @classmethod
    def _some_tokens(cls, size: int | str) -> int | str:
        if isinstance(size, int) and size < 1:
            raise ValueError("must be at least 1 token, auto or all")
        return size

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens that the head drafts from; None: all of the target's, or not chosen yet."""
        return self.draft_vocab if isinstance(self.draft_vocab, int) else None

    @model_validator(mode="after")
    def _text_is_in_the_vocabulary(self) -> Self:
        if self.draft_vocab_size is not None and self.loss == "ce_text":
            raise ValueError("loss is 'ce_text', must be another one with draft_vocab: text has tokens outside it")
        return self


class DistillConfig(TrainConfig):
    """A whole run: which target, on which text, and what to write."""

    model: str = Field(description="target: a directory or a Hub id")
    exit_layer: int | Literal["auto"] = Field(description="target layers a draft runs, or auto: as eesd probe chooses")
    data: list[str] = Field(
        [],
        description="text, .py, .jsonl with `text`, `messages` (OpenAI) or `conversations` (ShareGPT) a line, .bin "
        "token ids; or a directory or Hub data set of text; default: a chat model asks itself",
    )
    from_trace: list[str] = Field(
        [], description="traces of what was served, whose texts are trained on, with --data or without"
    )
    held_out: list[str] = Field([], description="to measure on; default: windows of --data")
    output: str = Field(description="directory to write the head to")
    self_generate: int = Field(0, ge=0, description="also train on W windows the target wrote")
    regenerate: bool = Field(
        False, description="the target answers the users of --data itself, half greedily; without --data it always does"
    )
    answer_tokens: int = Field(512, ge=1, description="the longest answer of --regenerate")
    turns: int = Field(2000, ge=2, description="user turns that a chat model asks itself, without --data")
    chat_template: str | None = Field(
        None, description="file of the template of conversations; default: the tokenizer's own"
    )
    temperature: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        None,
        min_length=1,
        description="of what the target writes, half of which is greedy; several take turns (default: 1; of answers "
        "that of its generation_config)",
    )
    generator: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="what runs the target while it writes; auto is vLLM where it can"
    )
    measure_every: int = Field(100, ge=1, description="measure on held-out text after every S steps")
    measure_greedy: bool = Field(False, description="measure on the target's greedy text, as with --self-generate")
    tensorboard: str | None = Field(None, description="write the losses there (needs tensorboard)")
    work: str | None = Field(None, description="checkpoints to resume from and write to")
    json_: str | None = Field(None, alias="json", description="write the training record")

    @model_validator(mode="after")
    def _there_is_text(self) -> Self:
        if self.asks_itself and self.self_generate:
            raise ValueError(
                "data is empty, must name files, directories or data sets for self_generate to continue, or from_trace"
            )
        return self

    @property
    def asks_itself(self) -> bool:
        """Whether there is nothing to train on but what the target asks itself."""
        return not self.data and not self.from_trace
