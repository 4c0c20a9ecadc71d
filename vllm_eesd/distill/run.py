"""What `eesd distill` does: data, the target's own text, training, measuring, writing the head."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from pydantic import ValidationError
from torch import nn
from tqdm import tqdm

from vllm_eesd.distill.answers import answer
from vllm_eesd.distill.config import DEFAULT_HEAD_LAYERS, DistillConfig
from vllm_eesd.distill.data import TokenData, as_source, long_enough, spaced_windows
from vllm_eesd.distill.generate import OwnText, continue_windows, sampled_through_vllm, through_vllm
from vllm_eesd.distill.held_out import HeldOut, few, held_out_of, measure, preferred
from vllm_eesd.distill.loading import saved_dtype
from vllm_eesd.distill.material import Material, OwnTalks, check_answers, read_material
from vllm_eesd.distill.measuring import WATCHED_WINDOWS, num_windows, seconds_a_window
from vllm_eesd.distill.model import head_config, new_head
from vllm_eesd.distill.probe import best_exit_layer, probe
from vllm_eesd.distill.report import as_typed, check_writable, command, serve_command, write_json
from vllm_eesd.distill.target import Target, default_aux_layers, default_init, load_target, place, room_for_weights
from vllm_eesd.distill.text import measuring_windows
from vllm_eesd.distill.train import train
from vllm_eesd.distill.training_record import record_of
from vllm_eesd.distill.vocabulary import check_size, end_tokens, most_frequent, restrict, token_shares
from vllm_eesd.distill.vocabulary_choice import chosen_vocabulary
from vllm_eesd.exit_head.checkpoint import TRAINING_NAME, ExitHeadConfig, Prior, write_head
from vllm_eesd.exit_head.config import one_line
from vllm_eesd.progress import progress

# What `--exit-layer auto` looks at: `eesd probe`'s own defaults.
PROBE_WINDOWS, PROBE_SEQ_LEN = 16, 256
# Ten observations: a sensible first draft length, soon outweighed by what a request itself shows.
PRIOR_OBSERVATIONS = 10
# Processes wait while the first one writes the target's own text, for hours if need be.
LONGEST_WAIT = timedelta(days=7)


def run(args: argparse.Namespace) -> int:
    """Distill a head; print how well it predicts and the command that serves it.

    Of several processes, started by `accelerate launch`, the first writes files and prints.

    Raises:
        ValueError: a wrong argument or unusable data, before anything is trained or written.
    """
    config = _config(args)
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    try:
        check_batch(config.batch, config.accumulate, state.num_processes)
        if state.is_main_process:
            _check_output(Path(config.output), config.model)
            check_writable(config.output, 0, "output")
            if config.tensorboard:
                _open_tensorboard(config.tensorboard).close()
        exit_layer = _from_first(partial(_exit_layer, config))
        with _progress(f"loading {config.model}"):
            target = load_target(config.model, exit_layer, state.device.type)
        target.aux_layers = _aux_layers(config, target)
        decided = {"head_layers": _head_layers(config, target), "init": config.init or default_init(target)}
        config = config.model_copy(update=decided)
        if config.draft_vocab_size is not None:
            check_size(config.draft_vocab_size, target.config.vocab_size)
        _head_config(config, target, Prior())  # refuses what could not be written in the end
        head = new_head(target, config.init, config.head_type, config.head_layers)
        if state.is_main_process:
            _check_room(config, head)
        with tempfile.TemporaryDirectory(prefix="eesd-distill-") as temporary:
            work = Path(_from_first(lambda: config.work or temporary))
            work.mkdir(parents=True, exist_ok=True)
            _distill(config, target, head, work)
    finally:
        state.destroy_process_group()
    return 0


def check_batch(batch: int, accumulate: int, num_processes: int) -> None:
    """Refuse a batch that cannot be shared out evenly.

    Raises:
        ValueError: it is no multiple of processes times parts.
    """
    if batch % (num_processes * accumulate):
        raise ValueError(
            f"batch is {batch}, must be a multiple of {num_processes * accumulate} "
            f"({num_processes} processes x accumulate {accumulate})"
        )


def _from_first(decide: Callable[[], Any]) -> Any:
    """Return what the first process decides, in all of them."""
    return broadcast_object_list([decide() if PartialState().is_main_process else None])[0]


def _distill(config: DistillConfig, target: Target, head: nn.Module, work: Path) -> None:
    with _progress("reading text"):
        material = read_material(config, target)
    own_talks = None
    if config.regenerate or config.asks_itself:
        own_talks = OwnTalks(config, target, work, material.talks)
    else:
        check_answers(config, material.talks.conversations)
    _say(material.described())
    data = _training_data(config, target, head, material, own_talks, work)
    windows = spaced_windows(data.sources, WATCHED_WINDOWS, config.seq_len)
    size, why = _from_first(partial(chosen_vocabulary, config, target, data, windows, work))
    config = config.model_copy(update={"draft_vocab": size})
    if why:
        _say(why)
    if config.draft_vocab_size is not None:
        _restrict(target, head, data, config.draft_vocab_size)
    held_out: HeldOut = {}
    if is_first := PartialState().is_main_process:
        count = num_windows(config, partial(seconds_a_window, target, head, windows))
        held_out = held_out_of(config, target, material, own_talks, count)
    before = _measure(target, head, held_out)
    _say(_describe("before", before))
    with _watch(config, target, head, held_out) as on_step:
        record = train(target, head, data, config, work / "checkpoint.pt" if config.work else None, on_step)
    dtype = saved_dtype(config.model)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype).float()  # as it will be served
    after = _measure(target, head, held_out)
    if is_first:
        record |= {"before": before, "after": after}
        own = list(data.generated) if data.generated is not None else []
        kinds = {"text": data.text, "held_out": material.held_out, "own": own}
        kinds |= {"conversations": [said.ids for said in data.conversations]} if data.conversations else {}
        _write(config, target, head, record, record_of(config, kinds, record))
    PartialState().wait_for_everyone()


def _training_data(
    config: DistillConfig,
    target: Target,
    head: nn.Module,
    material: Material,
    own_talks: OwnTalks | None,
    work: Path,
) -> TokenData:
    """Return what is trained on, what the target writes of it included; from then on the target is in its place."""
    sources = material.text + as_source(material.talks.conversations)
    own = OwnText(work, target, config.self_generate, config.seq_len, config.temperature or [1.0], config.seed)
    missing, is_first = [], PartialState().is_main_process
    # Through vLLM before the target takes its place: two of them would have to fit there.
    if is_first and own_talks is not None and not _talked_through_vllm(config, own_talks):
        missing.append(partial(own_talks.make, "transformers", partial(answer, target)))
    if is_first and own.count and not sampled_through_vllm(config.generator, config.model, sources, own):
        missing.append(partial(own.make, sources, "transformers", partial(continue_windows, target)))
    _place(target, head)
    for make in missing:
        make()
    PartialState().wait_for_everyone()
    conversations = own_talks.conversations() if own_talks else material.talks.conversations
    long_enough(as_source(conversations), config.seq_len, "data")
    return TokenData(material.text, own.windows() if own.count else None, conversations or None)


def _talked_through_vllm(config: DistillConfig, own_talks: OwnTalks) -> bool:
    return through_vllm(
        config.generator, config.model, own_talks.made, lambda sampler: own_talks.make("vllm", sampler.answer)
    )


def _say(line: str) -> None:
    if PartialState().is_main_process:
        print(line, flush=True)


def _progress(doing: str) -> contextlib.AbstractContextManager:
    """Return `progress` of the first process, which alone says how far it is."""
    return progress(doing) if PartialState().is_main_process else contextlib.nullcontext()


def _place(target: Target, head: nn.Module) -> None:
    """Move target and head to where they are run."""
    device = PartialState().device
    # Of the head: parameters, gradients and up to two moments.
    away = place(target, device, room_for_weights(device, 4 * sum(weight.nbytes for weight in head.parameters())))
    if away:
        _say(f"{away} of the target's {target.config.num_hidden_layers} layers stay in host memory until they run")
    head.to(device)


def _restrict(target: Target, head: nn.Module, data: TokenData, size: int) -> None:
    """Make the head draft from the `size` most frequent tokens of the data."""
    shares = token_shares(data, target.config.vocab_size)
    token_ids = most_frequent(shares, size, end_tokens(target.config))
    restrict(head, token_ids)
    covered = shares[token_ids.numpy()].sum()
    _say(f"drafts from {size} of {len(shares)} tokens, {covered:.2%} of the training data")


def _write(config: DistillConfig, target: Target, head: nn.Module, outcome: dict, record: dict) -> None:
    """Write the head in the target's dtype and how it came to be, and say what comes next."""
    after, dtype = outcome["after"], saved_dtype(config.model)
    print(_describe("after", after), flush=True)
    agreement = preferred(after)["agreement"]
    alpha = min(max(agreement, 0.05), 0.95) * PRIOR_OBSERVATIONS
    prior = Prior(alpha=round(alpha, 3), beta=round(PRIOR_OBSERVATIONS - alpha, 3))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in head.state_dict().items()}
    write_head(config.output, _head_config(config, target, prior), tensors)
    write_json(Path(config.output) / TRAINING_NAME, record)
    following = serve_command(config.model, config.output)
    if config.json_:
        known = {"head": config.output, "exit_layer": target.exit_layer, "next": following}
        write_json(config.json_, outcome | known)
    print(f"wrote {config.output}; {outcome['tokens']} tokens in {outcome['minutes']:.1f} minutes")
    template = ["--chat-template", config.chat_template] if config.chat_template else []
    held_out = as_typed(config.held_out or ["HELD_OUT"])
    calibrate = command("eesd", "calibrate", config.model, config.output, "--data", *held_out, *template)
    print(f"to tell the policy what its confidences mean, given text it was not trained on: {calibrate}")
    print(f"next: {following}")


def _exit_layer(config: DistillConfig) -> int:
    """Return N; `auto` takes the layer that `eesd probe` expects most of."""
    if config.exit_layer != "auto":
        return config.exit_layer
    with progress(f"loading {config.model}"):
        target = load_target(config.model, 1, "cpu")
    with progress("the target writes text to choose the exit layer on"):
        windows = measuring_windows(target, config.model, None, PROBE_WINDOWS, min(PROBE_SEQ_LEN, config.seq_len))
    results, _ = probe(target, windows, _head_layers(config, target))
    exit_layer = best_exit_layer(results)
    print(f"exit layer {exit_layer} of {target.config.num_hidden_layers}, chosen as `eesd probe` does", flush=True)
    return exit_layer


def _head_layers(config: DistillConfig, target: Target) -> int:
    """Return M."""
    if config.head_layers is not None:
        return config.head_layers
    if config.init_head is not None:
        return ExitHeadConfig.load(config.init_head).head_layers
    return min(DEFAULT_HEAD_LAYERS, config.kind.max_layers, target.config.num_hidden_layers)


def _aux_layers(config: DistillConfig, target: Target) -> list[int]:
    """Return the layers that the head reads beside N."""
    if config.aux_layers is not None or not config.kind.reads_target_output:
        return config.aux_layers or []
    if config.init_head is not None:
        return ExitHeadConfig.load(config.init_head).aux_layers
    return default_aux_layers(target)


def _check_room(config: DistillConfig, head: nn.Module) -> None:
    """Refuse, before training, an output that could not be written: the head and, in `work`, what training keeps."""
    head_bytes = sum(tensor.numel() * tensor.itemsize for tensor in head.state_dict().values())
    check_writable(config.output, head_bytes, "output")
    if config.work:
        # Parameters and up to two moments, and the old file until the new one is whole.
        check_writable(config.work, 6 * head_bytes + 4 * config.self_generate * config.seq_len, "work")
    if config.json_:
        check_writable(Path(config.json_).parent, 1 << 20, "json")


@contextlib.contextmanager
def _watch(
    config: DistillConfig, target: Target, head: nn.Module, held_out: HeldOut
) -> Iterator[Callable[[int, float], None] | None]:
    """Yield what is called after every step: TensorBoard's losses, and now and then the held-out tokens per round."""
    if not held_out:
        yield None
        return
    watched = few(preferred(held_out), WATCHED_WINDOWS)
    with _open_tensorboard(config.tensorboard) if config.tensorboard else contextlib.nullcontext() as writer:

        def on_step(step: int, loss: float) -> None:
            measured = {"loss": loss}
            if step % config.measure_every == 0:
                expected = 1 + measure(target, head, watched)["expected_matches"]
                measured["held_out_tokens_per_round"] = expected
                tqdm.write(f"step {step}: loss {loss:.4f}, {expected:.2f} tokens per round expected, held out")
            for name, value in measured.items() if writer else ():
                writer.add_scalar(name, value, step)

        yield on_step


def _open_tensorboard(directory: str) -> Any:
    """Return a SummaryWriter.

    Raises:
        ValueError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard: the package is not installed; `pip install tensorboard`") from None
    return SummaryWriter(directory)


def _config(args: argparse.Namespace) -> DistillConfig:
    """Return the fields that `args` has; the others have their defaults."""
    names = [field.alias or name for name, field in DistillConfig.model_fields.items()]
    try:
        return DistillConfig(**{name: value for name in names if (value := getattr(args, name, None)) is not None})
    except ValidationError as error:
        raise ValueError(one_line(error)) from None


def _head_config(config: DistillConfig, target: Target, prior: Prior) -> ExitHeadConfig:
    """Return what the head's config.json says.

    Raises:
        ValueError: no head can be so.
    """
    size = config.draft_vocab_size
    try:
        return head_config(target, config.model, config.head_type, prior, size, config.head_layers)
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


def _measure(target: Target, head: nn.Module, held_out: HeldOut) -> dict[str, dict[str, Any]]:
    with _progress("measuring on held-out text"):
        return {name: measure(target, head, measured_on) for name, measured_on in held_out.items()}


def _describe(when: str, measured: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name}: KL {m['kl']:.4f}, agreement {m['agreement']:.3f}, overlap {m['overlap']:.3f}, "
        f"{m['expected_matches']:.2f} of 8 drafts match"
        for name, m in measured.items()
    ]
    return f"{when}, held out; " + "; ".join(parts)
