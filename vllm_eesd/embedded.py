"""The embedded model and its prompts: models/ of a clone, which an installed wheel holds inside the package."""

from __future__ import annotations

import argparse
from pathlib import Path

MODEL, PROMPTS = "eesd-code-10m", "prompts/held_out_code.jsonl"


def run(args: argparse.Namespace) -> int:
    """Print where the embedded model is, for `vllm serve "$(eesd embedded)"`.

    Raises:
        ValueError: it is not here.
    """
    print(embedded_model())
    return 0


def embedded_model() -> str:
    """Return the directory of the embedded target, whose exit head is in eesd/ there: a model for `vllm.LLM`.

    Raises:
        ValueError: it is not here.
    """
    return str(shipped(MODEL, "model"))


def shipped(name: str, flag: str) -> Path:
    """Return what models/ holds under a name.

    Args:
        flag: which names another one.
    Raises:
        ValueError: it is not here.
    """
    if (found := find_shipped(name)) is None:
        raise ValueError(f"{flag}: models/{name} is not here; install vllm-eesd again or name one with --{flag}")
    return found


def find_shipped(name: str) -> Path | None:
    """Return what models/ holds under a name, None if it is not here."""
    package = Path(__file__).resolve().parent
    places = (root / "models" / name for root in (package, package.parent))
    return next((place for place in places if place.exists()), None)
