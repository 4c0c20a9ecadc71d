"""What `eesd distill` does: data, the target's own text, training, measuring, writing the head."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from tqdm import tqdm

from vllm_eesd.distill.data import TokenData, long_enough, spaced_windows, split_held_out, tokens_to_split
from vllm_eesd.distill.generate import (
    OwnText,
    continue_windows,
    greedy_held_out,
    own_text_in,
    sampled_through_vllm,
)
from vllm_eesd.distill.loading import saved_dtype
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.model import Target, head_config, load_target, new_head
from vllm_eesd.distill.probe import best_exit_layer, probe
from vllm_eesd.distill.processes import ALONE, Processes, launched_processes
from vllm_eesd.distill.report import check_writable, command, serve_command, write_json
from vllm_eesd.distill.sharding import shard_layers
from vllm_eesd.distill.tensorboard import open_tensorboard
from vllm_eesd.distill.text import check_seq_len, measuring_windows, read_text
from vllm_eesd.distill.train import TrainConfig, train
from vllm_eesd.distill.vocabulary import check_size, draft_token_ids, end_tokens, most_frequent, restrict, token_shares
from vllm_eesd.exit_head.checkpoint import Prior, write_head
from vllm_eesd.exit_head.config import one_line

# Windows measured on; 64 x 512 tokens give the agreement to about 0.3 percentage points.
HELD_OUT_WINDOWS = 64
# Of those, what is measured again and again during training.
WATCHED_WINDOWS = 4
# What `--exit-layer auto` looks at: `eesd probe`'s own defaults.
PROBE_WINDOWS, PROBE_SEQ_LEN = 16, 256
# Ten observations: a sensible first draft length, soon outweighed by what a request itself shows.
PRIOR_OBSERVATIONS = 10


def run(args: argparse.Namespace) -> int:
    """Distill a head; print how well it predicts and the command that serves it.

    Raises:
        ValueError: a wrong argument or unusable data, before anything is trained or written.
    """
    config = _train_config(args)
    device, sharded = "cuda" if torch.cuda.is_available() else "cpu", getattr(args, "shard_target", False)
    if sharded and config.compile:
        raise ValueError("shard_target is set, must not be with compile: a compiled step cannot gather layers")
    with launched_processes(device, sharded) as processes:
        processes.check_batch(config.batch, config.accumulate)
        if processes.is_first:
            _check_output(Path(args.output), args.model)
            check_writable(args.output, 0, "output")
            open_tensorboard(getattr(args, "tensorboard", None)).close()
        exit_layer = processes.agree(_exit_layer(args) if processes.is_first else 0)
        target = load_target(args.model, exit_layer, "cpu")
        if config.draft_vocab is not None:
            check_size(config.draft_vocab, target.config.vocab_size)
        head = new_head(target, config.init, config.head_type)
        if processes.is_first:
            _check_room(args, head, config.seq_len)
        with tempfile.TemporaryDirectory(prefix="eesd-distill-") as temporary:
            work = Path(processes.agree(args.work or temporary))
            work.mkdir(parents=True, exist_ok=True)
            _distill(args, target, head, config, work, device, processes)
    return 0


def _distill(
    args: argparse.Namespace,
    target: Target,
    head: nn.Module,
    config: TrainConfig,
    work: Path,
    device: str,
    processes: Processes,
) -> None:
    text, held_out_text = _read_text(args, target, config.seq_len)
    if processes.is_first:
        print(f"text: {_num_tokens(text)} tokens to train on, {_num_tokens(held_out_text)} held out", flush=True)
    own = _own_text(args, target, work, config)
    # Before the target takes its place: two of them would have to fit there.
    through_vllm = own is not None and processes.agree(processes.is_first and _through_vllm(args, text, own))
    _place(target, head, device, processes)
    if own is not None and processes.runs_target and not through_vllm:
        together = processes if processes.sharded else ALONE
        own.make(text, "transformers", partial(continue_windows, target), together)
    processes.wait()
    data = TokenData(text, None if own is None else own.windows())
    if config.draft_vocab is not None:
        _restrict(target, head, data, config.draft_vocab, processes)
    held_out = _held_out(args, target, held_out_text, config.seq_len) if processes.runs_target else {}
    before = _measure(target, head, held_out)
    if processes.is_first:
        print(_describe("before", before), flush=True)
    with _watch(args, target, head, held_out, processes) as on_step:
        record = train(target, head, data, config, work / "checkpoint.pt" if args.work else None, on_step, processes)
    _round(head, saved_dtype(args.model))
    after = _measure(target, head, held_out)
    if processes.is_first:
        _write(args, target, head, {"before": before, "after": after}, record)
    processes.wait()


def _place(target: Target, head: nn.Module, device: str, processes: Processes) -> None:
    """Move the target, or this process's share of it, and the head to where they are run."""
    if processes.sharded:
        held, whole = shard_layers(target, device)
        if processes.is_first:
            print(f"{processes.count} processes share the target: {held} of {whole} parameters each", flush=True)
    target.to(device)
    head.to(device)


def _restrict(target: Target, head: nn.Module, data: TokenData, size: int, processes: Processes) -> None:
    """Make the head draft from the `size` most frequent tokens of the data."""
    shares = token_shares(data, target.config.vocab_size)
    token_ids = most_frequent(shares, size, end_tokens(target.config))
    restrict(head, token_ids)
    if processes.is_first:
        covered = shares[token_ids.numpy()].sum()
        print(f"drafts from {size} of {len(shares)} tokens, {covered:.2%} of the training data", flush=True)


def _round(head: nn.Module, dtype: torch.dtype) -> None:
    """Round the head to what it will be served in."""
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype).float()


def _write(args: argparse.Namespace, target: Target, head: nn.Module, outcome: dict, record: dict) -> None:
    """Write the head in the target's dtype, and say what comes next."""
    after, dtype, token_ids = outcome["after"], saved_dtype(args.model), draft_token_ids(head)
    print(_describe("after", after), flush=True)
    prior = _prior(after.get("greedy", after["text"])["agreement"])
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in head.state_dict().items()}
    draft_vocab_size = None if token_ids is None else len(token_ids)
    write_head(args.output, head_config(target, args.model, head.head_type, prior, draft_vocab_size), tensors)
    following = serve_command(args.model, args.output)
    if args.json:
        outcome |= {"head": str(args.output), "exit_layer": target.exit_layer, "next": following}
        write_json(args.json, outcome | record)
    print(f"wrote {args.output}; {record['tokens']} tokens in {record['minutes']:.1f} minutes")
    held_out = getattr(args, "held_out", None) or ["HELD_OUT"]
    calibrate = command("eesd", "calibrate", args.model, args.output, "--data", *held_out)
    print(f"to tell the policy what its confidences mean, given text it was not trained on: {calibrate}")
    print(f"next: {following}")


def _exit_layer(args: argparse.Namespace) -> int:
    """Return N; `auto` takes the layer that `eesd probe` expects most of."""
    if args.exit_layer != "auto":
        return args.exit_layer
    target = load_target(args.model, 1, "cpu")
    windows = measuring_windows(target, args.model, None, PROBE_WINDOWS, min(PROBE_SEQ_LEN, args.seq_len))
    results, _ = probe(target, windows)
    exit_layer = best_exit_layer(results)
    print(f"exit layer {exit_layer} of {target.config.num_hidden_layers}, chosen as `eesd probe` does", flush=True)
    return exit_layer


def _check_room(args: argparse.Namespace, head: nn.Module, seq_len: int) -> None:
    """Refuse, before training, an output that could not be written: the head and, in `work`, what training keeps."""
    head_bytes = sum(tensor.numel() * tensor.itemsize for tensor in head.state_dict().values())
    check_writable(args.output, head_bytes, "output")
    if args.work:
        own_bytes = (getattr(args, "self_generate", None) or 0) * seq_len * 4
        # Parameters and up to two moments, and the old file until the new one is whole.
        check_writable(args.work, 6 * head_bytes + own_bytes, "work")
    if args.json:
        check_writable(Path(args.json).parent, 1 << 20, "json")


@contextlib.contextmanager
def _watch(
    args: argparse.Namespace, target: Target, head: nn.Module, held_out: dict, processes: Processes
) -> Iterator[Callable[[int, float], None] | None]:
    """Yield what is called after every step: TensorBoard's losses, and now and then the held-out tokens per round."""
    if not processes.runs_target:
        yield None
        return
    directory, every = getattr(args, "tensorboard", None), getattr(args, "measure_every", None) or 0
    writer = open_tensorboard(directory if processes.is_first else None)
    windows, first = held_out.get("greedy", held_out["text"])
    few = windows[:WATCHED_WINDOWS]

    def on_step(step: int, loss: float) -> None:
        writer.add_scalar("loss", loss, step)
        if every and step % every == 0:
            expected = 1 + evaluate(target, head, few, first)["expected_matches"]
            writer.add_scalar("held_out_tokens_per_round", expected, step)
            if processes.is_first:
                tqdm.write(f"step {step}: loss {loss:.4f}, {expected:.2f} tokens per round expected, held out")

    try:
        yield on_step
    finally:
        writer.close()


def _train_config(args: argparse.Namespace) -> TrainConfig:
    given = {field: getattr(args, field, None) for field in TrainConfig.model_fields}
    try:
        return TrainConfig(**{field: value for field, value in given.items() if value is not None})
    except ValidationError as error:
        raise ValueError(one_line(error)) from None


def _check_output(output: Path, model: str) -> None:
    config = output / "config.json"
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is not a directory; name a directory for the head")
    if config.exists() and '"eesd"' not in config.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"output: {output} holds another model; name another directory, such as {Path(model) / 'eesd'}"
        )


def _read_text(args: argparse.Namespace, target: Target, seq_len: int) -> tuple[list, list]:
    check_seq_len(target.config, seq_len)
    held_out_paths = getattr(args, "held_out", None) or []
    if not held_out_paths:
        text = read_text(args.model, target.config, args.data, tokens_to_split(seq_len))
        return split_held_out(text, seq_len)
    text, held_out = (read_text(args.model, target.config, paths, seq_len) for paths in (args.data, held_out_paths))
    return long_enough(text, seq_len, "data"), long_enough(held_out, seq_len, "held_out")


def _num_tokens(sources: list) -> int:
    return sum(map(len, sources))


def _own_text(args: argparse.Namespace, target: Target, work: Path, config: TrainConfig) -> OwnText | None:
    count, temperature = getattr(args, "self_generate", None) or 0, getattr(args, "temperature", None)
    own = own_text_in(work, target, count, config.seq_len, 1.0 if temperature is None else temperature, config.seed)
    return own if count else None


def _through_vllm(args: argparse.Namespace, text: list, own: OwnText) -> bool:
    return sampled_through_vllm(getattr(args, "generator", "transformers"), args.model, text, own)


def _held_out(
    args: argparse.Namespace, target: Target, text: list, seq_len: int
) -> dict[str, tuple[torch.Tensor, int]]:
    """Return name -> (windows, first position measured): text, and the target's greedy text if asked or trained on."""
    held_out = {"text": (spaced_windows(text, HELD_OUT_WINDOWS, seq_len), 0)}
    if getattr(args, "self_generate", None) or getattr(args, "measure_greedy", False):
        windows, first = greedy_held_out(target, text, HELD_OUT_WINDOWS, seq_len)
        # The last prompt position is the first whose next token the target chose.
        held_out["greedy"] = (windows, first - 1)
    return held_out


def _measure(
    target: Target, head: nn.Module, held_out: dict[str, tuple[torch.Tensor, int]]
) -> dict[str, dict[str, Any]]:
    return {name: evaluate(target, head, windows, first) for name, (windows, first) in held_out.items()}


def _describe(when: str, measured: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name}: KL {m['kl']:.4f}, agreement {m['agreement']:.3f}, overlap {m['overlap']:.3f}, "
        f"{m['expected_matches']:.2f} of 8 drafts match"
        for name, m in measured.items()
    ]
    return f"{when}, held out; " + "; ".join(parts)


def _prior(agreement: float) -> Prior:
    accepted = min(max(agreement, 0.05), 0.95) * PRIOR_OBSERVATIONS
    return Prior(alpha=round(accepted, 3), beta=round(PRIOR_OBSERVATIONS - accepted, 3))
