"""What `eesd import` does: exit heads that other projects trained become heads of ours, without any training.

The formats are described in docs/checkpoints.md. Only safetensors are read; nothing in a checkpoint is executed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_eesd.distill.loading import layer_config, read_config, target_verifier
from vllm_eesd.distill.report import check_writable, serve_command, write_json
from vllm_eesd.exit_head.checkpoint import PICKLE_SUFFIXES, ExitHeadConfig, write_head
from vllm_eesd.exit_head.config import CONFIG_NAME, flat, one_line, read_config_json
from vllm_eesd.exit_head.shapes import expected_shapes

HEAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where Kangaroo's own inference exits unless told otherwise.
KANGAROO_EXIT_LAYER = 2

# Name of a tensor -> the safetensors file it is in.
Files = dict[str, Path]


def run(args: argparse.Namespace) -> int:
    """Convert a checkpoint and print the command that serves it.

    Raises:
        ValueError: the checkpoint is of no known format, damaged, pickled, or made for another target.
    """
    source, target = Path(args.checkpoint), read_config(args.model)
    if args.json:
        check_writable(Path(args.json).parent, 0, "json")
    try:
        raw = read_config_json(source / CONFIG_NAME)
    except ValueError as error:
        raise ValueError(f"checkpoint: {error}") from None
    files = _files_in(source)
    kind = _recognise(source, raw, files) if args.format == "auto" else args.format
    try:
        exit_layer, renamed = FORMATS[kind](raw, files, args.exit_layer)
        config = ExitHeadConfig(
            exit_layer=exit_layer,
            head_type="transformer",
            verifier=target_verifier(target, args.model),
            transformer_layer_config=layer_config(target),
        )
    except ValidationError as error:
        raise ValueError(f"checkpoint: {source}: {one_line(error)}") from None
    if missing := sorted(set(renamed.values()) - files.keys()):
        raise ValueError(f"checkpoint: {source}: missing tensor {missing[0]!r}")
    check_writable(args.output, sum(path.stat().st_size for path in {files[n] for n in renamed.values()}), "output")
    head = {name: _read(files, original) for name, original in renamed.items()}
    if kind == "kangaroo":
        head = _with_idle_mlp(head, expected_shapes(config))
    write_head(args.output, config, head)
    following = serve_command(args.model, args.output)
    if args.json:
        write_json(args.json, {"head": str(args.output), "format": kind, "exit_layer": exit_layer, "next": following})
    print(f"wrote {args.output}: {kind} head at exit layer {exit_layer}")
    print(f"next: {following}")
    return 0


def _files_in(directory: Path) -> Files:
    """Return where each tensor of a directory's safetensors files is.

    Raises:
        ValueError: there are no such files, they are pickled, or one is damaged.
    """
    files: Files = {}
    paths = sorted(path for path in directory.glob("*.safetensors") if path.is_file())  # a pipe would never end
    if not paths:
        pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
        advice = f"{pickled[0]} is pickled, which is never loaded; convert it to safetensors first" if pickled else ""
        raise ValueError(f"checkpoint: {directory}: no .safetensors file; {advice or 'name its directory'}")
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"checkpoint: {path}: damaged or truncated safetensors ({flat(error)})") from None
    return files


def _read(files: Files, name: str) -> Tensor:
    """Return a tensor.

    Raises:
        ValueError: it is quantised, or not finite: no head could be served with it.
    """
    with safe_open(files[name], framework="pt", device="cpu") as file:
        tensor = file.get_tensor(name)
    if tensor.dtype not in HEAD_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in HEAD_DTYPES)
        raise ValueError(f"checkpoint: {name} is {str(tensor.dtype).removeprefix('torch.')}, must be {known}")
    if not tensor.isfinite().all():
        raise ValueError(f"checkpoint: {name} holds infinities or NaN")
    return tensor


def _recognise(source: Path, raw: dict[str, Any], files: Files) -> str:
    if "exit_layer_indices" in raw:
        return "balcony"
    if "layers.0.self_attn.q_proj.weight" in files and not any(".mlp." in name for name in files):
        return "kangaroo"
    found = raw.get("speculators_model_type") or raw.get("model_type")
    raise ValueError(
        f"checkpoint: {source}: {found!r} is no exit head that can be imported; "
        f"known: {', '.join(sorted(FORMATS))} (a head with speculators_model_type 'eesd' is served as it is)"
    )


class BalconyConfig(BaseModel):
    """What a Balcony checkpoint's config must say: an exit with a decoder layer, before the target's own LM head."""

    exit_layer_indices: list[int] = Field(min_length=1, strict=True)
    exit_decoder_layer: Literal[True]
    tie_exit_lm_head: Literal[True]


def _balcony(raw: dict[str, Any], files: Files, exit_layer: int | None) -> tuple[int, dict[str, str]]:
    """Return (exit layer, our names -> the checkpoint's); Balcony's exit k reads what enters layer k, as ours does.

    Source: arXiv 2503.05005; github.com/benyaminjami/Balcony-LLaMA, modeling_nestedllama.py.
    """
    layers = BalconyConfig.model_validate(raw).exit_layer_indices
    if exit_layer is None and len(layers) > 1:
        raise ValueError(f"exit_layer: the checkpoint has exits {layers}; choose one with --exit-layer")
    exit_layer = layers[0] if exit_layer is None else exit_layer
    if exit_layer not in layers:
        raise ValueError(f"exit_layer is {exit_layer}, must be one of the checkpoint's exits {layers}")
    prefix = f"model.exit_modules.{layers.index(exit_layer)}."
    names = {f"layer.{n.removeprefix(prefix)[2:]}": n for n in files if n.startswith(f"{prefix}0.")}
    return exit_layer, names | {"norm.weight": f"{prefix}1.weight"}


class KangarooConfig(BaseModel):
    """What a Kangaroo checkpoint's config must say."""

    num_hidden_layers: Literal[1] = 1


def _kangaroo(raw: dict[str, Any], files: Files, exit_layer: int | None) -> tuple[int, dict[str, str]]:
    """Return (exit layer, our names -> the checkpoint's) of an adapter: input norm, attention, norm.

    Source: arXiv 2404.18911; github.com/Equationliu/Kangaroo, kangaroo/adapter.py.
    """
    KangarooConfig.model_validate(raw)
    prefix = "layers.0."
    # Old checkpoints also store the rotary embedding, which is the target's.
    attention = (n for n in files if n.startswith(f"{prefix}self_attn.") and "rotary_emb" not in n)
    names = {f"layer.{n.removeprefix(prefix)}": n for n in attention}
    names |= {"norm.weight": "norm.weight", "layer.input_layernorm.weight": f"{prefix}input_layernorm.weight"}
    return KANGAROO_EXIT_LAYER if exit_layer is None else exit_layer, names


FORMATS = {"balcony": _balcony, "kangaroo": _kangaroo}


def _with_idle_mlp(head: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the head with an MLP that adds nothing: a decoder layer without one, exactly."""
    dtype = head["norm.weight"].dtype
    idle = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name.startswith("layer.mlp.")}
    after = "layer.post_attention_layernorm.weight"
    return head | idle | {after: torch.ones(shapes[after], dtype=dtype)}
