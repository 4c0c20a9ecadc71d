"""The flags of `eesd probe`, `eesd distill` and `eesd calibrate`."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_origin

from vllm_eesd.distill.config import DEFAULT_HEAD_LAYERS, DistillConfig
from vllm_eesd.flags import (
    chat_template,
    choices,
    default,
    draft_vocab,
    exit_layer,
    layer,
    natural,
    positive,
    positive_real,
)


def probe(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.probe`."""
    parser.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="text, .jsonl (text or messages) or .bin; default: the target's own",
    )
    chat_template(parser)
    parser.add_argument("--windows", type=positive, default=16, metavar="W", help="sequences measured on (default 16)")
    parser.add_argument("--seq-len", type=positive, default=256, metavar="T", help="tokens a sequence (default 256)")
    parser.add_argument(
        "--head-layers",
        type=positive,
        default=DEFAULT_HEAD_LAYERS,
        metavar="M",
        help="of the head to distil (default %(default)s)",
    )
    parser.add_argument("--json", metavar="OUT", help="write all that was measured")
    parser.add_argument("--plot", metavar="PNG", help="draw it (needs matplotlib)")


def distill(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.run`: the fields of `DistillConfig`."""
    parser.add_argument("model", metavar="MODEL", help=_described("model"))
    _setting(parser, "exit_layer", type=exit_layer, required=True, metavar="N")
    _setting(parser, "data", nargs="+", metavar="FILE")
    _setting(parser, "from_trace", nargs="+", metavar="TRACE")
    _setting(parser, "held_out", nargs="+", metavar="FILE")
    _setting(parser, "self_generate", type=positive, metavar="W")
    _setting(parser, "regenerate")
    _setting(parser, "answer_tokens", type=positive, metavar="A")
    _setting(parser, "turns", type=positive, metavar="N")
    _setting(parser, "chat_template", metavar="FILE")
    _setting(parser, "train_on")
    _setting(parser, "temperature", type=float, nargs="+", metavar="T")
    _setting(parser, "generator")
    parser.add_argument("-o", "--output", required=True, metavar="HEAD", help=_described("output"))
    _setting(parser, "steps", type=positive, metavar="S")
    _setting(parser, "minutes", type=positive_real, metavar="T")
    _setting(parser, "batch", type=positive, metavar="B")
    _setting(parser, "seq_len", type=positive, metavar="T")
    _setting(parser, "lr", type=positive_real)
    _setting(parser, "init", metavar="last|exit|HEAD")
    _setting(parser, "loss")
    _setting(parser, "jsd_beta", type=float, metavar="B")
    _setting(parser, "position_decay", type=float, metavar="D")
    _setting(parser, "head_type")
    _setting(parser, "head_layers", type=positive, metavar="M")
    _setting(parser, "aux_layers", type=layer, nargs="*", metavar="A")
    _setting(parser, "draft_vocab", type=draft_vocab, metavar="auto|all|V")
    _setting(parser, "keep_states", type=natural, metavar="G")
    _setting(parser, "accumulate", type=positive, metavar="A")
    _setting(parser, "seed", type=int)
    _setting(parser, "compile")
    _setting(parser, "measure_every", type=positive, metavar="S")
    _setting(parser, "measure_greedy")
    _setting(parser, "tensorboard", metavar="DIR")
    _setting(parser, "work", metavar="DIR")
    parser.add_argument("--json", metavar="OUT", help=_described("json_"))


def _described(field: str) -> str:
    return DistillConfig.model_fields[field].description.replace("%", "%%")


def _setting(parser: argparse.ArgumentParser, field: str, **settings: Any) -> None:
    """Add the flag of a `DistillConfig` field, with what the field says of itself."""
    annotation, text = DistillConfig.model_fields[field].annotation, _described(field)
    if not settings.get("required"):
        settings["default"] = default(DistillConfig, field)
        text += "" if settings["default"] in (None, []) or annotation is bool else " (default %(default)s)"
    if annotation is bool:
        settings["action"] = "store_true"
    if get_origin(annotation) is Literal:
        settings["choices"] = choices(DistillConfig, field)
    parser.add_argument(f"--{field.replace('_', '-')}", help=text, **settings)


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.calibrate`."""
    parser.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    parser.add_argument("head", metavar="HEAD", help="exit head of that target; gets calibration.json and a prior")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="held-out text, .jsonl (text or messages), .bin: not what it trained on",
    )
    chat_template(parser)
    parser.add_argument("--windows", type=positive, default=64, metavar="W", help="sequences (default 64)")
    parser.add_argument(
        "--seq-len", type=positive, default=256, metavar="T", help="tokens a sequence, a quarter read (default 256)"
    )
    parser.add_argument("--json", metavar="OUT", help="write what was measured")
