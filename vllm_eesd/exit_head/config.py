"""The exit head's config.json, which follows the conventions of the `speculators` library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_eesd.config import MAX_HEAD_LAYERS
from vllm_eesd.exit_head.shapes import expected_shapes
from vllm_eesd.exit_head.types import HEAD_TYPES, HeadType
from vllm_eesd.files import replacing

CONFIG_NAME = "config.json"
SPECULATORS_MODEL_TYPE = "eesd"
#: EAGLE-3 reads three hidden states in all; every one is kept for all tokens of a step.
MAX_AUX_LAYERS = 8
# The release of `speculators` whose config layout this one follows.
SPECULATORS_VERSION = "0.9.0"
# A model's config is a few KiB: anything far larger is none.
MAX_CONFIG_BYTES = 1 << 20
# What must agree between the head's layer and the target's, where both state it.
LAYER_FIELDS = (
    "model_type", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "residual_multiplier", "attention_multiplier",
)  # fmt: skip
# Keys of a config.json that are no fields of `ExitHeadConfig`: read apart, or added by other tools.
OTHER_KEYS = {
    "speculators_model_type", "speculators_version", "speculators_config", "architectures",
    "transformers_version", "dtype", "torch_dtype", "auto_map",
}  # fmt: skip


class Verifier(BaseModel):
    """The target a head was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name_or_path: str = ""
    architecture: str
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    vocab_size: int = Field(ge=1)

    @model_validator(mode="before")
    @classmethod
    def _as_speculators_writes_it(cls, raw: Any) -> Any:
        """Speculators writes the architecture as a list of one, and a name that is not known as null."""
        if not isinstance(raw, dict):
            return raw
        raw = {key: value for key, value in raw.items() if (key, value) != ("name_or_path", None)}
        if "architectures" not in raw:
            return raw  # written before the list was
        architectures = raw.pop("architectures")
        if not isinstance(architectures, list) or len(architectures) != 1 or "architecture" in raw:
            raise ValueError(f"verifier.architectures is {architectures!r:.80}, must be a list of one name")
        return raw | {"architecture": architectures[0]}


class Prior(BaseModel):
    """Pseudo-counts of accepted (alpha) and rejected (beta) draft tokens that a request's posterior starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    alpha: float = Field(1.0, gt=0, allow_inf_nan=False)
    beta: float = Field(1.0, gt=0, allow_inf_nan=False)


class ExitHeadConfig(BaseModel):
    """What a head is and which target it fits.

    Attributes:
        exit_layer: N; the head reads the hidden state entering target layer N. 0 < N < number of layers;
            headless heads may also use N = number of layers (the whole target, for self-tests), deep-context heads
            N = 0 (the embedding).
        head_type: `headless` (the target's final norm), `transformer` (one decoder layer and an RMSNorm)
            or `deep_context` (the same, seeing verified tokens through hidden states of the whole target).
        head_layers: M, its decoder layers; more than one only where all of them are filled from the target's last
            hidden state, `deep_context`.
        aux_layers: auxiliary layers of the target, in rising order: what enters them a `deep_context` head sees
            verified tokens through too, beside h_N and the last hidden state.
        verifier: the target.
        transformer_layer_config: the target's text config, as its own config.json states it.
        draft_vocab_size: how many of the target's tokens the head can draft; None is all of them.
        prior: where a request's posterior starts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    exit_layer: int
    head_type: Literal[tuple(HEAD_TYPES)]
    head_layers: int = Field(1, ge=1, le=MAX_HEAD_LAYERS)
    aux_layers: list[int] = Field([], max_length=MAX_AUX_LAYERS)
    verifier: Verifier
    transformer_layer_config: dict[str, Any] = {}
    draft_vocab_size: int | None = None
    prior: Prior = Prior()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind, num_layers = self.kind, self.verifier.num_hidden_layers
        size, vocab_size = self.draft_vocab_size, self.verifier.vocab_size
        first, last = kind.first_exit_layer, kind.last_exit_layer(num_layers)
        if not first <= self.exit_layer <= last:
            raise ValueError(f"exit_layer is {self.exit_layer}, must be {first} to {last} for a {self.head_type} head")
        most = min(kind.max_layers, num_layers)
        if self.head_layers > most:
            raise ValueError(f"head_layers is {self.head_layers}, must be 1 to {most} for a {self.head_type} head")
        if self.aux_layers and not kind.reads_target_output:
            raise ValueError(f"aux_layers is {self.aux_layers}, must be empty for a {self.head_type} head")
        others = sorted({*range(num_layers)} - {self.exit_layer})
        if self.aux_layers != [layer for layer in others if layer in self.aux_layers]:
            raise ValueError(
                f"aux_layers is {self.aux_layers}, must be layers of the target in rising order, without exit_layer"
            )
        if size is not None and not kind.has_kv:
            raise ValueError(f"draft_vocab_size is {size}, must be null for a {self.head_type} head: it has no tensors")
        if size is not None and not 1 <= size < vocab_size:
            raise ValueError(
                f"draft_vocab_size is {size}, must be 1 to {vocab_size - 1}, or null: all {vocab_size} tokens"
            )
        expected_shapes(self)  # refuses a layer config that lacks or contradicts a size
        return self

    @property
    def kind(self) -> HeadType:
        """What heads of its type have in common."""
        return HEAD_TYPES[self.head_type]

    @property
    def own_layers(self) -> int:
        """How many decoder layers a draft step runs beyond the target's first N."""
        return self.head_layers if self.kind.has_kv else 0

    @classmethod
    def load(cls, directory: str | os.PathLike) -> Self:
        """Return the config of the head in `directory`.

        Raises:
            ValueError: the directory is missing or does not hold a head this version can use.
        """
        path = Path(directory) / CONFIG_NAME
        if not os.path.isdir(directory):  # unlike Path.is_dir, also for a name no file can have
            name = f"{str(directory)!r:.200}"
            raise ValueError(f"exit head {name}: no such directory; give one written by `eesd distill`")
        raw = read_config_json(path)
        if (kind := raw.get("speculators_model_type")) != SPECULATORS_MODEL_TYPE:
            hint = " (vLLM itself serves the algorithms of speculators)" if isinstance(kind, str) else ""
            raise ValueError(
                f"{path}: not an exit head: speculators_model_type is {kind!r:.80}, "
                f"must be {SPECULATORS_MODEL_TYPE!r}; give a directory written by `eesd distill`{hint}"
            )
        speculators = raw.get("speculators_config")
        if not isinstance(speculators, dict) or "verifier" in raw:
            raise ValueError(f"{path}: speculators_config is {speculators!r:.80}, must be an object with the verifier")
        fields = {key: value for key, value in raw.items() if key not in OTHER_KEYS}
        fields |= {key: value for key, value in speculators.items() if key == "verifier"}
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"{path}: {one_line(error)}") from None
        except RecursionError:
            raise ValueError(f"{path}: nested too deeply for a config") from None

    def save(self, directory: str | os.PathLike) -> None:
        """Write config.json into `directory`, made if missing; an existing one is replaced in one step."""
        with replacing(Path(directory) / CONFIG_NAME) as file:
            self.write(file)

    def check_target(self, hf_text_config: Any) -> None:
        """Refuse a target this head was not made for.

        Args:
            hf_text_config: the target's text config; what it does not state is not compared.
        Raises:
            ValueError: one line with the field, the head's value and the target's.
        """
        name = f"exit head for {self.verifier.name_or_path!r:.200}"
        advice = "serve the target it was distilled from, or run `eesd distill` on this one"
        architectures = getattr(hf_text_config, "architectures", None)
        if architectures and self.verifier.architecture not in architectures:
            raise ValueError(
                f"{name}: architecture: the head has {self.verifier.architecture!r:.80}, "
                f"the target {architectures[0]!r}; {advice}"
            )
        pairs = [(field, getattr(self.verifier, field)) for field in ("hidden_size", "num_hidden_layers", "vocab_size")]
        if self.kind.has_kv:
            pairs += [(field, self.transformer_layer_config.get(field)) for field in LAYER_FIELDS]
        for field, ours in pairs:
            theirs = getattr(hf_text_config, field, None)
            if None not in (ours, theirs) and ours != theirs:
                raise ValueError(f"{name}: {field}: the head has {ours!r:.80}, the target {theirs!r}; {advice}")

    def write(self, file: Path) -> None:
        """Write config.json as `file`."""
        raw = {
            "speculators_model_type": SPECULATORS_MODEL_TYPE,
            "speculators_version": SPECULATORS_VERSION,
            "architectures": ["EESDExitHead"],
            "exit_layer": self.exit_layer,
            "head_type": self.head_type,
            "head_layers": self.head_layers,
            "aux_layers": self.aux_layers,
            "transformer_layer_config": self.transformer_layer_config,
            "draft_vocab_size": self.draft_vocab_size,
            "prior": self.prior.model_dump(),
            "speculators_config": {
                "algorithm": SPECULATORS_MODEL_TYPE,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
                "verifier": {
                    "name_or_path": self.verifier.name_or_path,
                    "architectures": [self.verifier.architecture],
                    **self.verifier.model_dump(exclude={"name_or_path", "architecture"}),
                },
            },
        }
        file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def read_config_json(path: Path) -> dict[str, Any]:
    """Return the object in a config.json.

    Raises:
        ValueError: there is no file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {CONFIG_NAME}; give a directory that holds one")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, a model's config has at most {MAX_CONFIG_BYTES}")
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ValueError(f"{path}: not JSON ({flat(error)})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds a JSON {type(raw).__name__}, must be an object")
    return raw


def one_line(error: ValidationError) -> str:
    """Return pydantic's first complaint as one line: field, what is allowed, value."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return flat(f"{where:.80}: {message:.400} (got {first['input']!r:.80})" if where else f"{message:.400}")


def flat(error: Any) -> str:
    """Return an error's message on one line."""
    # The library's messages repeat what they choke on, however long.
    return f"{' '.join(str(error).split()):.600}"
