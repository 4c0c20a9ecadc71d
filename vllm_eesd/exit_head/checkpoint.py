"""The exit-head checkpoint: a directory with `config.json` and, unless headless, `model.safetensors`.

config.json follows the conventions of the `speculators` library. Nothing here executes what it reads: weights are
safetensors, names and shapes are checked against the config before any tensor is read.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME, check_offsets
from vllm_eesd.exit_head.shapes import expected_shapes

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
CALIBRATION_NAME = "calibration.json"
SPECULATORS_MODEL_TYPE = "eesd"
# The release of `speculators` whose config layout this one follows.
SPECULATORS_VERSION = "0.9.0"
# A head's config is a few KiB and its safetensors header about 1 KiB: anything far larger is not a head.
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20
# Four times a float32 layer of the widest models there are; a sparse file can claim any size.
MAX_WEIGHTS_BYTES = 1 << 35
WEIGHT_DTYPES = {"F32", "F16", "BF16"}
D2T_DTYPES = {"I64", "I32"}
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
# What must agree between the head's layer and the target's, where both state it.
LAYER_FIELDS = (
    "model_type", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "residual_multiplier", "attention_multiplier",
)  # fmt: skip
# Keys other tools add to a config.json; they say nothing about the head.
IGNORED_KEYS = {"transformers_version", "dtype", "torch_dtype", "auto_map"}


class Verifier(BaseModel):
    """The target a head was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name_or_path: str = ""
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int

    @field_validator("hidden_size", "num_hidden_layers", "vocab_size")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 1:
            raise ValueError("must be 1 or more")
        return value


class Prior(BaseModel):
    """Pseudo-counts of accepted (alpha) and rejected (beta) draft tokens that a request's posterior starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    alpha: float = 1.0
    beta: float = 1.0

    @field_validator("alpha", "beta")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not (math.isfinite(value) and value > 0):
            raise ValueError("must be a finite number above 0")
        return value


class ExitHeadConfig(BaseModel):
    """What a head is and which target it fits.

    Attributes:
        exit_layer: N; the head reads the hidden state entering target layer N. 0 < N < number of layers;
            headless heads may also use N = number of layers (the whole target, for self-tests).
        head_type: `headless` (the target's final norm), `transformer` (one decoder layer and an RMSNorm),
            `deep_context` (the same, seeing verified tokens through the target's last hidden state) or `mlp` (norm, MLP
            with residual, RMSNorm; no KV).
        verifier: the target.
        transformer_layer_config: the target's text config, as its own config.json states it.
        draft_vocab_size: how many of the target's tokens the head can draft; None is all of them.
        prior: where a request's posterior starts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    exit_layer: int
    head_type: Literal["headless", "transformer", "deep_context", "mlp"]
    verifier: Verifier
    transformer_layer_config: dict[str, Any] = {}
    draft_vocab_size: int | None = None
    prior: Prior = Prior()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_exit_layer(self.exit_layer, self.head_type, self.verifier.num_hidden_layers)
        _check_draft_vocab_size(self.draft_vocab_size, self.head_type, self.verifier.vocab_size)
        if self.head_type != "headless":
            expected_shapes(self)  # refuses a layer config that lacks or contradicts a size
        return self

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
        raw = _read_config_json(path)
        if (kind := raw.get("speculators_model_type")) != SPECULATORS_MODEL_TYPE:
            hint = " (vLLM itself serves the algorithms of speculators)" if isinstance(kind, str) else ""
            raise ValueError(
                f"{path}: not an exit head: speculators_model_type is {kind!r:.80}, "
                f"must be {SPECULATORS_MODEL_TYPE!r}; give a directory written by `eesd distill`{hint}"
            )
        speculators = raw.get("speculators_config")
        if not isinstance(speculators, dict):
            raise ValueError(f"{path}: speculators_config is {speculators!r:.80}, must be an object with a verifier")
        described = {"speculators_model_type", "speculators_version", "architectures", "speculators_config"}
        fields = {key: value for key, value in raw.items() if key not in described | IGNORED_KEYS}
        if "verifier" in fields:
            raise ValueError(f"{path}: verifier belongs inside speculators_config")
        if "verifier" in speculators:
            fields["verifier"] = _verifier_fields(path, speculators["verifier"])
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"{path}: {one_line(error)}") from None
        except RecursionError:
            raise ValueError(f"{path}: nested too deeply for a config") from None

    def save(self, directory: str | os.PathLike) -> None:
        """Write config.json into `directory`, made if missing; an existing one is replaced in one step."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        os.replace(self._write_temporary(directory), directory / CONFIG_NAME)

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
        if self.head_type != "headless":
            pairs += [(field, self.transformer_layer_config.get(field)) for field in LAYER_FIELDS]
        for field, ours in pairs:
            theirs = getattr(hf_text_config, field, None)
            if None not in (ours, theirs) and ours != theirs:
                raise ValueError(f"{name}: {field}: the head has {ours!r:.80}, the target {theirs!r}; {advice}")

    def _write_temporary(self, directory: Path) -> str:
        raw = {
            "speculators_model_type": SPECULATORS_MODEL_TYPE,
            "speculators_version": SPECULATORS_VERSION,
            "architectures": ["EESDExitHead"],
            "exit_layer": self.exit_layer,
            "head_type": self.head_type,
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
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{CONFIG_NAME}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(raw, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        return temporary


def read_tensors(directory: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Return the head's tensors, on the CPU, in the dtype they were saved in; empty if headless.

    Raises:
        ValueError: no safetensors, pickled weights, a damaged file, or tensors that are not the config's or not finite.
    """
    config = ExitHeadConfig.load(directory)
    path = Path(directory) / WEIGHTS_NAME
    if config.head_type == "headless":
        if path.exists():
            raise ValueError(
                f"{path}: head_type is 'headless', which has no weights; remove the file or use 'transformer'"
            )
        return {}
    _check_weights_file(path)
    expected = expected_shapes(config)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _check_names_and_shapes(path, file, expected)
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: damaged or truncated safetensors ({_flat(error)}); copy or distill the head again"
        ) from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds infinities or NaN; copy or distill the head again")
    if D2T_NAME in tensors:
        try:
            check_offsets(tensors[D2T_NAME], config.verifier.vocab_size)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; copy or distill the head again") from None
    return tensors


def write_head(directory: str | os.PathLike, config: ExitHeadConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a head; a reader sees the old head, the new one, or (for an instant) none, never a mixture.

    Args:
        directory: made if missing; a head already there is replaced, anything else is refused.
        tensors: exactly those of `expected_shapes(config)`.
    Raises:
        ValueError: the tensors do not fit the config, or `directory` holds another kind of model.
    """
    directory = Path(directory)
    expected = expected_shapes(config)
    _check_same_names(directory / WEIGHTS_NAME, set(tensors), set(expected))
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, must be {list(shape)}")
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / CONFIG_NAME).exists():
        if _read_config_json(directory / CONFIG_NAME).get("speculators_model_type") != SPECULATORS_MODEL_TYPE:
            raise ValueError(f"{directory}: holds a config.json that is not an exit head's; choose another directory")
    elif (directory / WEIGHTS_NAME).exists():
        raise ValueError(
            f"{directory}: holds {WEIGHTS_NAME} without an exit head's config.json; choose another directory"
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix=".head.") as temporary:
        if tensors:
            contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(contiguous, Path(temporary) / WEIGHTS_NAME, metadata={"format": "pt"})
        config_file = config._write_temporary(Path(temporary))
        (directory / CONFIG_NAME).unlink(missing_ok=True)
        (directory / CALIBRATION_NAME).unlink(missing_ok=True)  # it says what the old head's confidences meant
        if tensors:
            os.replace(Path(temporary) / WEIGHTS_NAME, directory / WEIGHTS_NAME)
        else:
            (directory / WEIGHTS_NAME).unlink(missing_ok=True)
        os.replace(config_file, directory / CONFIG_NAME)


def _verifier_fields(path: Path, raw: Any) -> Any:
    """Return the fields of `Verifier`, of which speculators writes one as a list and one as null."""
    if not isinstance(raw, dict):
        return raw
    raw = raw if raw.get("name_or_path", "") is not None else raw | {"name_or_path": ""}
    if "architectures" not in raw:
        return raw  # written before the list was
    architectures = raw["architectures"]
    if not isinstance(architectures, list) or len(architectures) != 1 or "architecture" in raw:
        raise ValueError(
            f"{path}: speculators_config.verifier.architectures is {architectures!r:.80}, must be a list of one name"
        )
    return {key: value for key, value in raw.items() if key != "architectures"} | {"architecture": architectures[0]}


def _check_exit_layer(exit_layer: int, head_type: str, num_hidden_layers: int) -> None:
    last = num_hidden_layers if head_type == "headless" else num_hidden_layers - 1
    if not 1 <= exit_layer <= last:
        raise ValueError(
            f"exit_layer is {exit_layer}, must be 1 to {last} for a {head_type} head on {num_hidden_layers} layers"
        )


def _check_draft_vocab_size(draft_vocab_size: int | None, head_type: str, vocab_size: int) -> None:
    if draft_vocab_size is None:
        return
    if head_type == "headless":
        raise ValueError(f"draft_vocab_size is {draft_vocab_size}, must be null for a headless head: it has no tensors")
    if not 1 <= draft_vocab_size < vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}, must be 1 to {vocab_size - 1}, or null: all {vocab_size} tokens"
        )


def _read_config_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent}: no {CONFIG_NAME}; give an exit-head directory written by `eesd distill`")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes, an exit head's config has at most {MAX_CONFIG_BYTES}")
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ValueError(f"{path}: not JSON ({_flat(error)})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds a JSON {type(raw).__name__}, must be an object")
    return raw


def _check_weights_file(path: Path) -> None:
    if not path.is_file():
        pickled = sorted(p.name for p in path.parent.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickled:
            raise ValueError(
                f"{path.parent}: weights are pickled ({pickled[0]}), which is never loaded; save them as {WEIGHTS_NAME}"
            )
        raise ValueError(f"{path.parent}: no {WEIGHTS_NAME}; a transformer head needs it, distill or copy it again")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if size < 8 or header > size - 8 and header <= MAX_HEADER_BYTES:
        raise ValueError(f"{path}: truncated safetensors ({size} bytes); copy or distill the head again")
    if size > MAX_WEIGHTS_BYTES:
        raise ValueError(f"{path}: {size} bytes, an exit head has at most {MAX_WEIGHTS_BYTES}")
    if header > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: not an exit head's safetensors: header of {header} bytes, at most {MAX_HEADER_BYTES}"
        )


def _check_names_and_shapes(path: Path, file: Any, expected: dict[str, tuple[int, ...]]) -> None:
    _check_same_names(path, set(file.keys()), set(expected))
    for name, shape in expected.items():
        tensor = file.get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(f"{path}: {name} has shape {list(tensor.get_shape())}, the config says {list(shape)}")
        allowed = D2T_DTYPES if name == D2T_NAME else WEIGHT_DTYPES
        if tensor.get_dtype() not in allowed:
            raise ValueError(f"{path}: {name} has dtype {tensor.get_dtype()}, must be one of {sorted(allowed)}")


def _check_same_names(path: Path, found: set[str], expected: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            shown = f"{min(names)!r:.80}"
            raise ValueError(f"{path}: {kind} tensor {shown} ({len(names)} {kind}, {len(expected)} expected)")


def one_line(error: ValidationError) -> str:
    """Return pydantic's first complaint as one line: field, what is allowed, value."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return _flat(f"{where:.80}: {message:.400} (got {first['input']!r:.80})" if where else f"{message:.400}")


def _flat(error: Any) -> str:
    # The library's messages repeat what they choke on, however long.
    return f"{' '.join(str(error).split()):.600}"
