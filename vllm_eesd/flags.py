"""What the flags of several commands share: groups of them, and the types of their values.

Each command's own flags stand in `flags.py` beside the module that runs it, which may import nothing heavy: `eesd
COMMAND --help` reads it.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

from pydantic import BaseModel

from vllm_eesd.config import EESDConfig


def drafting(parser: argparse.ArgumentParser) -> None:
    """How EESD drafts: fields of `EESDConfig`."""
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=default(EESDConfig, "num_speculative_tokens"),
        metavar="K",
        help="the longest draft (default 8; 16 where n-gram drafts are found on the host)",
    )
    policy(parser)


def chat_template(parser: argparse.ArgumentParser) -> None:
    """What conversations are rendered by."""
    text = "file of the template of conversations; default: the tokenizer's own"
    parser.add_argument("--chat-template", metavar="FILE", help=text)


def policy(parser: argparse.ArgumentParser) -> None:
    """Which policy: a field of `EESDConfig`."""
    names, text = ", ".join(choices(EESDConfig, "policy")), "how the draft length is chosen"
    parser.add_argument("--policy", default=default(EESDConfig, "policy"), help=f"{text}: {names}")


def doctor(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.doctor`."""
    parser.add_argument("--model", metavar="M", help="also look at this target's directory and its exit head")
    parser.add_argument("--json", metavar="OUT", help="write what was found")


def model(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm_eesd.public_model`."""
    text = "smollm2: SmolLM2-135M-Instruct, converted on first use; embedded: the code model that tests use"
    parser.add_argument("name", metavar="NAME", help=text)


def embedded(parser: argparse.ArgumentParser) -> None:
    """`vllm_eesd.embedded` has no flags."""


def default(config: type[BaseModel], field: str) -> Any:
    """Return a config field's default."""
    return config.model_fields[field].default


def choices(config: type[BaseModel], field: str) -> list[str]:
    """Return what a config field of a literal type allows."""
    return list(get_args(config.model_fields[field].annotation))


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    number = int(text) if text.strip().isascii() and text.strip().isdigit() else least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be a whole number of at least {least}")
    return number


def thousands(text: str) -> int:
    """Return a whole number of at least 1, of which the last three zeros may be a k."""
    return 1000 * positive(text[:-1]) if text.endswith(("k", "K")) else positive(text)


def layer(text: str) -> int:
    """Return a layer's number, whose input is meant: of 0 the embedding."""
    return _whole(text, 0)


def exit_layer(text: str) -> int | str:
    """Return a layer's number or auto."""
    return text if text == "auto" else layer(text)


def positive_real(text: str) -> float:
    """Return a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be above 0 and finite")
    return number


def words(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be a comma-separated list")
    return words


def positive_list(text: str) -> list[int]:
    """Return the whole numbers from 1 of a comma-separated list."""
    return [positive(word) for word in words(text)]


def draft_vocab(text: str) -> int | str:
    """Return a number of tokens, see `thousands`, or auto or all."""
    return text if text in ("auto", "all") else thousands(text)
