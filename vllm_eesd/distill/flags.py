"""The flags of `eesd probe`, `eesd distill`, `eesd calibrate` and `eesd import`."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.flags import choices, default, exit_layer, positive, positive_real, thousands


def probe(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.probe`."""
    parser.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    parser.add_argument(
        "--text", nargs="+", metavar="FILE", help="text, .jsonl or .bin to measure on; default: the target's own"
    )
    parser.add_argument("--windows", type=positive, default=16, metavar="W", help="sequences measured on (default 16)")
    parser.add_argument("--seq-len", type=positive, default=256, metavar="T", help="tokens a sequence (default 256)")
    parser.add_argument("--json", metavar="OUT", help="write all that was measured")
    parser.add_argument("--plot", metavar="PNG", help="draw it (needs matplotlib)")


def distill(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.run`; how to train is what `TrainConfig` holds."""
    parser.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    parser.add_argument(
        "--exit-layer", type=exit_layer, required=True, metavar="N", help="target layers a draft runs, or auto"
    )
    _data(parser)
    parser.add_argument("-o", "--output", required=True, metavar="HEAD", help="directory to write the head to")
    _schedule(parser)
    _head(parser)
    _execution(parser)
    parser.add_argument("--work", metavar="DIR", help="checkpoints to resume from and write to")
    parser.add_argument("--json", metavar="OUT", help="write the training record")


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text, .py, .jsonl with a `text` a line, .bin token ids; or a directory or Hub data set of text",
    )
    parser.add_argument("--held-out", nargs="+", metavar="FILE", help="to measure on; default: windows of --data")
    parser.add_argument("--self-generate", type=positive, metavar="W", help="also train on W windows the target wrote")
    parser.add_argument("--temperature", type=float, default=1.0, help="of what the target writes (default 1.0)")
    parser.add_argument(
        "--generator",
        choices=["auto", "vllm", "transformers"],
        default="auto",
        help="what runs the target while it writes (default auto: vLLM where it can)",
    )


def _trained(parser: argparse.ArgumentParser, flag: str, **settings: Any) -> None:
    """Add a flag of a `TrainConfig` field, with the field's default."""
    parser.add_argument(flag, default=default(TrainConfig, flag.removeprefix("--").replace("-", "_")), **settings)


def _schedule(parser: argparse.ArgumentParser) -> None:
    _trained(parser, "--steps", type=positive, metavar="S", help="optimizer steps (default %(default)s)")
    _trained(parser, "--minutes", type=positive_real, metavar="T", help="stop after this long, if earlier")
    _trained(parser, "--batch", type=positive, metavar="B", help="sequences a step (default %(default)s)")
    _trained(parser, "--seq-len", type=positive, metavar="T", help="tokens a sequence (default %(default)s)")
    _trained(parser, "--lr", type=positive_real, help="peak learning rate (default: by the target's width)")


def _head(parser: argparse.ArgumentParser) -> None:
    text = "start from the target's last or exit layer, or from another head (default %(default)s)"
    _trained(parser, "--init", metavar="last|exit|HEAD", help=text)
    losses, kinds = choices(TrainConfig, "loss"), choices(TrainConfig, "head_type")
    _trained(parser, "--loss", choices=losses, help="what the head minimises (default %(default)s)")
    _trained(parser, "--jsd-beta", type=float, metavar="B", help="beta of jsd (default %(default)s)")
    _trained(parser, "--head-type", choices=kinds, help="(default %(default)s)")
    text = "draft from the V (32k: 32000) most frequent tokens only"
    _trained(parser, "--draft-vocab", type=thousands, metavar="V", help=text)


def _execution(parser: argparse.ArgumentParser) -> None:
    text = "parts a step is computed in, to save memory"
    _trained(parser, "--accumulate", type=positive, metavar="A", help=text)
    _trained(parser, "--seed", type=int, help="of the data order (default %(default)s)")
    _trained(parser, "--compile", action="store_true", help="compile the training step")
    parser.add_argument(
        "--shard-target", action="store_true", help="launched processes share one copy of the target (FSDP)"
    )
    parser.add_argument(
        "--measure-every", type=positive, default=100, metavar="S", help="measure on held-out text (default 100 steps)"
    )
    parser.add_argument(
        "--measure-greedy", action="store_true", help="measure on the target's greedy text, as --self-generate does"
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="write the losses there (needs tensorboard)")


def calibrate(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.calibrate`."""
    parser.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    parser.add_argument("head", metavar="HEAD", help="exit head of that target; gets calibration.json and a prior")
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help="held-out text, .jsonl or .bin: not what it trained on"
    )
    parser.add_argument("--windows", type=positive, default=64, metavar="W", help="sequences (default 64)")
    parser.add_argument(
        "--seq-len", type=positive, default=256, metavar="T", help="tokens a sequence, a quarter read (default 256)"
    )
    parser.add_argument("--json", metavar="OUT", help="write what was measured")


def import_head(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.distill.import_head`."""
    parser.add_argument("model", metavar="MODEL", help="target it was trained for: a directory or a Hub id")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory with config.json and .safetensors")
    parser.add_argument("-o", "--output", required=True, metavar="HEAD", help="directory to write the head to")
    parser.add_argument("--exit-layer", type=positive, metavar="N", help="where the checkpoint does not say")
    parser.add_argument("--format", choices=["auto", "balcony", "kangaroo"], default="auto", help="(default auto)")
    parser.add_argument("--json", metavar="OUT", help="write what was done")
