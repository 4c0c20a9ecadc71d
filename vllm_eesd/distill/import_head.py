"""What `eesd import` does: exit heads that other projects trained become heads of ours, without any training.

The formats are described in docs/checkpoints.md. Only safetensors are read; nothing in a checkpoint is executed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_eesd.distill.loading import layer_config, read_config, target_verifier
from vllm_eesd.distill.report import check_writable, serve_command, write_json
from vllm_eesd.exit_head.checkpoint import PICKLE_SUFFIXES, ExitHeadConfig, write_head
from vllm_eesd.exit_head.config import one_line
from vllm_eesd.exit_head.shapes import expected_shapes

MAX_CONFIG_BYTES = 1 << 20
HEAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where Kangaroo's own inference exits unless told otherwise.
KANGAROO_EXIT_LAYER = 2


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint and print the command that serves it.

    Raises:
        ValueError: the checkpoint is of no known format, damaged, pickled, or made for another target.
    """
    source, target = Path(args.checkpoint), read_config(args.model)
    if args.json:
        check_writable(Path(args.json).parent, 0, "json")
    raw = _read_json(source)
    tensors = WeightFiles(source)
    if args.format == "auto":
        kind = _recognise(source, raw, tensors.names)
    else:
        kind = args.format
    exit_layer, renamed = FORMATS[kind](source, raw, tensors, args.exit_layer)
    try:
        config = ExitHeadConfig(
            exit_layer=exit_layer,
            head_type="transformer",
            verifier=target_verifier(target, args.model),
            transformer_layer_config=layer_config(target),
        )
    except ValidationError as error:
        raise ValueError(one_line(error)) from None
    check_writable(args.output, tensors.num_bytes(renamed.values()), "output")
    head = {name: tensors.read(original) for name, original in renamed.items()}
    if kind == "kangaroo":
        head = _with_idle_mlp(head, expected_shapes(config))
    write_head(args.output, config, head)
    outcome = {
        "head": str(args.output),
        "format": kind,
        "exit_layer": exit_layer,
        "next": serve_command(args.model, args.output),
    }
    if args.json:
        write_json(args.json, outcome)
    print(f"wrote {args.output}: {kind} head at exit layer {exit_layer}")
    print(f"next: {outcome['next']}")
    return 0


class WeightFiles:
    """The tensors of a directory's safetensors files, read one at a time.

    Args:
        directory: with *.safetensors.
    Raises:
        ValueError: there are none, they are pickled, or one is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, Path] = {}
        paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())  # a pipe would never end
        if not paths:
            pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
            advice = (
                f"{pickled[0]} is pickled, which is never loaded; convert it to safetensors first" if pickled else ""
            )
            raise ValueError(f"checkpoint: {directory}: no .safetensors file; {advice or 'name its directory'}")
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    self._file_of |= dict.fromkeys(file.keys(), path)
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"checkpoint: {path}: damaged or truncated safetensors ({reason})") from None

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            ValueError: it is quantised, or not finite: no head could be served with it.
        """
        with safe_open(self._file_of[name], framework="pt", device="cpu") as file:
            tensor = file.get_tensor(name)
        if tensor.dtype not in HEAD_DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in HEAD_DTYPES)
            raise ValueError(f"checkpoint: {name} is {str(tensor.dtype).removeprefix('torch.')}, must be {known}")
        if not tensor.isfinite().all():
            raise ValueError(f"checkpoint: {name} holds infinities or NaN")
        return tensor

    def num_bytes(self, names: Any) -> int:
        """Return an upper bound of what these tensors take, without reading them."""
        files = {self._file_of[name] for name in names}
        return sum(path.stat().st_size for path in files)


def _read_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"checkpoint: {directory}: no config.json there; name the checkpoint's directory")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(
            f"checkpoint: {path}: {path.stat().st_size} bytes, a model's config has at most {MAX_CONFIG_BYTES}"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint: {path}: not JSON ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"checkpoint: {path}: holds a JSON {type(raw).__name__}, must be an object")
    return raw


def _recognise(source: Path, raw: dict[str, Any], names: set[str]) -> str:
    if "exit_layer_indices" in raw:
        return "balcony"
    if "layers.0.self_attn.q_proj.weight" in names and not any(".mlp." in name for name in names):
        return "kangaroo"
    found = raw.get("speculators_model_type") or raw.get("model_type")
    raise ValueError(
        f"checkpoint: {source}: {found!r} is no exit head that can be imported; "
        f"known: {', '.join(sorted(FORMATS))} (a head with speculators_model_type 'eesd' is served as it is)"
    )


def _balcony(
    source: Path, raw: dict[str, Any], tensors: WeightFiles, exit_layer: int | None
) -> tuple[int, dict[str, str]]:
    """Return (exit layer, our names -> the checkpoint's); Balcony's exit k reads what enters layer k, as ours does.

    Source: arXiv 2503.05005; github.com/benyaminjami/Balcony-LLaMA, modeling_nestedllama.py.
    """
    layers = raw.get("exit_layer_indices")
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ValueError(f"checkpoint: {source}: exit_layer_indices is {layers!r}, must be a list of layer numbers")
    if raw.get("exit_decoder_layer") is not True:
        raise ValueError(
            f"checkpoint: {source}: exit_decoder_layer is {raw.get('exit_decoder_layer')!r}, must be true: an exit "
            "without a decoder layer is not supported"
        )
    if raw.get("tie_exit_lm_head") is not True:
        raise ValueError(
            f"checkpoint: {source}: tie_exit_lm_head is {raw.get('tie_exit_lm_head')!r}, must be true: a draft uses "
            "the target's LM head"
        )
    if exit_layer is None and len(layers) > 1:
        raise ValueError(f"exit_layer: the checkpoint has exits {layers}; choose one with --exit-layer")
    exit_layer = layers[0] if exit_layer is None else exit_layer
    if exit_layer not in layers:
        raise ValueError(f"exit_layer is {exit_layer}, must be one of the checkpoint's exits {layers}")
    prefix = f"model.exit_modules.{layers.index(exit_layer)}."
    names = {"norm.weight": f"{prefix}1.weight"}
    names |= {f"layer.{n.removeprefix(prefix)[2:]}": n for n in tensors.names if n.startswith(f"{prefix}0.")}
    return exit_layer, _present(source, tensors, names)


def _kangaroo(
    source: Path, raw: dict[str, Any], tensors: WeightFiles, exit_layer: int | None
) -> tuple[int, dict[str, str]]:
    """Return (exit layer, our names -> the checkpoint's) of an adapter: input norm, attention, norm.

    Source: arXiv 2404.18911; github.com/Equationliu/Kangaroo, kangaroo/adapter.py.
    """
    if raw.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"checkpoint: {source}: the adapter has {raw['num_hidden_layers']} layers, must have 1")
    prefix = "layers.0."
    names = {"norm.weight": "norm.weight", "layer.input_layernorm.weight": f"{prefix}input_layernorm.weight"}
    # Old checkpoints also store the rotary embedding, which is the target's.
    names |= {
        f"layer.{n.removeprefix(prefix)}": n
        for n in tensors.names
        if n.startswith(f"{prefix}self_attn.") and "rotary_emb" not in n
    }
    return KANGAROO_EXIT_LAYER if exit_layer is None else exit_layer, _present(source, tensors, names)


FORMATS: dict[str, Callable[[Path, dict[str, Any], WeightFiles, int | None], tuple[int, dict[str, str]]]] = {
    "balcony": _balcony,
    "kangaroo": _kangaroo,
}


def _present(source: Path, tensors: WeightFiles, names: dict[str, str]) -> dict[str, str]:
    missing = sorted(set(names.values()) - tensors.names)
    if missing:
        raise ValueError(f"checkpoint: {source}: missing tensor {missing[0]!r}")
    return names


def _with_idle_mlp(head: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the head with an MLP that adds nothing: a decoder layer without one, exactly."""
    dtype = head["norm.weight"].dtype
    idle = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name.startswith("layer.mlp.")}
    after = "layer.post_attention_layernorm.weight"
    return head | idle | {after: torch.ones(shapes[after], dtype=dtype)}
