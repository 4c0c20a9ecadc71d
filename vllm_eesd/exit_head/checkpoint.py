"""The exit-head checkpoint: a directory with `config.json` and, unless headless, `model.safetensors`.

config.json follows the conventions of the `speculators` library. Nothing here executes what it reads: weights are
safetensors, names and shapes are checked against the config before any tensor is read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_eesd.exit_head.config import (
    CONFIG_NAME,
    SPECULATORS_MODEL_TYPE,
    ExitHeadConfig,
    Prior,
    Verifier,
    flat,
    read_config_json,
)
from vllm_eesd.exit_head.draft_vocabulary import D2T_NAME, check_offsets
from vllm_eesd.exit_head.shapes import expected_shapes
from vllm_eesd.files import replacing

__all__ = ["ExitHeadConfig", "Prior", "Verifier", "read_tensors", "write_head"]

WEIGHTS_NAME = "model.safetensors"
CALIBRATION_NAME = "calibration.json"
TRAINING_NAME = "training.json"
# A head's safetensors header is about 1 KiB: anything far larger is not a head.
MAX_HEADER_BYTES = 1 << 20
# Four times a float32 layer of the widest models there are; a sparse file can claim any size.
MAX_WEIGHTS_BYTES = 1 << 35
WEIGHT_DTYPES = {"F32", "F16", "BF16"}
D2T_DTYPES = {"I64", "I32"}
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def read_tensors(directory: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Return the head's tensors, on the CPU, in the dtype they were saved in; empty if headless.

    Raises:
        ValueError: no safetensors, pickled weights, a damaged file, or tensors that are not the config's or not finite.
    """
    config = ExitHeadConfig.load(directory)
    path = Path(directory) / WEIGHTS_NAME
    if not config.kind.has_kv:
        if path.exists():
            raise ValueError(f"{path}: head_type is {config.head_type!r}, which has no weights; remove the file")
        return {}
    _check_weights_file(path)
    expected = expected_shapes(config)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _check_names_and_shapes(path, file, expected)
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: damaged or truncated safetensors ({flat(error)}); copy or distill the head again"
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
        if read_config_json(directory / CONFIG_NAME).get("speculators_model_type") != SPECULATORS_MODEL_TYPE:
            raise ValueError(f"{directory}: holds a config.json that is not an exit head's; choose another directory")
    elif (directory / WEIGHTS_NAME).exists():
        raise ValueError(
            f"{directory}: holds {WEIGHTS_NAME} without an exit head's config.json; choose another directory"
        )
    with contextlib.ExitStack() as stack:
        config.write(stack.enter_context(replacing(directory / CONFIG_NAME)))  # the last to be put in place
        if tensors:
            contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            weights = stack.enter_context(replacing(directory / WEIGHTS_NAME))
            save_file(contiguous, weights, metadata={"format": "pt"})
        # The last two say what the old confidences meant, and how the old head was trained.
        for name in (CONFIG_NAME, WEIGHTS_NAME, CALIBRATION_NAME, TRAINING_NAME):
            (directory / name).unlink(missing_ok=True)


def _check_weights_file(path: Path) -> None:
    if not path.is_file():
        pickled = sorted(p.name for p in path.parent.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickled:
            raise ValueError(
                f"{path.parent}: weights are pickled ({pickled[0]}), which is never loaded; save them as {WEIGHTS_NAME}"
            )
        raise ValueError(f"{path.parent}: no {WEIGHTS_NAME}; a transformer head needs it, distill or copy it again")
    size = path.stat().st_size
    if size > MAX_WEIGHTS_BYTES:
        raise ValueError(f"{path}: {size} bytes, an exit head has at most {MAX_WEIGHTS_BYTES}")
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
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
