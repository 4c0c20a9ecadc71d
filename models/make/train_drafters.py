"""Train drafters side by side, on the same batches: exit heads of several shapes, a draft model, an EAGLE head.

    python models/make/pack_text.py --work build/target --tokenizer models/eesd-code-10m
    python models/make/train_drafters.py train  n1m2 draft_model eagle@2 --work build/drafters     # resumes
    python models/make/train_drafters.py export n1m2 draft_model eagle@2 --work build/drafters -o build/drafters/models

Any target of the Llama architecture, on conversations whose answers are its own (a line `{"ids": [...]}` each, with
whatever else), for so many minutes:

    python models/make/train_drafters.py train draft_model eagle@2 --target MODEL --data conversations.jsonl \
        --minutes 240 --work build/drafters
    python models/make/train_drafters.py export draft_model eagle@2 --target MODEL --work build/drafters -o PEERS

One forward pass of the target serves all of them, so each costs its own step only and all have seen the same tokens.
Batches (half text, half the target's own; of conversations these alone), optimizer and schedule are those of `eesd
distill`, whose learning rate is that of NAME@2: F times `LR` over the square root of the hidden size. All keep the
target's embedding and LM head, frozen. Where bfloat16 is multiplied in hardware the target is held in it.

- nXmY: an exit head of M = Y layers after the target's first N = X, forward KL; nXmYaA-B reads the auxiliary layers A
  and B too; see `RECIPES` for nXmY:RECIPES.
- draft_model: a Llama of `DRAFT_LAYERS` layers, started from the target's first ones and its last; forward KL.
- eagle: one layer as vLLM's EagleLlamaForCausalLM has it, started from the target's last. A position's input is the
  target's normed output there beside the next token's embedding. EAGLE's loss on features (arXiv 2401.15077) is added
  to forward KL, and the head is unrolled `UNROLLED` times on its own features, as HASS does (arXiv 2408.15766).
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.data import TokenData, spaced_windows, token_dtype
from vllm_eesd.distill.generate import OwnText, continue_windows, own_held_out, sampled_through_vllm
from vllm_eesd.distill.loading import read_config
from vllm_eesd.distill.losses import Loss, distillation_loss, forward_kl, total_variation
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.model import head_config, new_head
from vllm_eesd.distill.precision import uses_bfloat16
from vllm_eesd.distill.target import Rotary, Target, default_init, load_target
from vllm_eesd.distill.train import (
    TrainConfig,
    _make_optimizers,
    _update,
    learning_rate_scale,
    place_weights,
    random_block_starts,
)
from vllm_eesd.exit_head.checkpoint import Prior, write_head
from vllm_eesd.files import replacing
from vllm_eesd.provenance import hardware

MODEL = "models/eesd-code-10m"
#: What the embedded head saw (its card).
TOKENS = 30_300_000
BATCH, SEQ_LEN = 16, 512
#: As many as a draft step of the embedded head runs.
DRAFT_LAYERS = 3
UNROLLED = 3
FEATURE_WEIGHT = 0.1
SAVE_EVERY_S = 120
#: What every drafter learns at that names no factor, as it was when the first ones were compared.
LR = 0.14
#: A drafter's name: nXmY:RECIPES@FACTOR, draft_model@FACTOR or eagle@FACTOR; recipes and factor may be left out.
NAME = re.compile(
    r"(?:n(?P<n>\d+)m(?P<m>\d+)(?:a(?P<aux>\d+(?:-\d+)*))?(?::(?P<recipes>[\w+]+))?|(?P<peer>draft_model|eagle))"
    r"(?:@(?P<factor>\d+(?:\.\d+)?))?"
)
#: What may be changed in an exit head's training; several are joined by "+".
RECIPES = {
    "tv": "total variation in the last `LATE` of the steps, forward KL before",
    "early": "a token weighs the less the later in a draft it stands",
    "rounds": "in the last `LATE` of the steps a draft begins where the head's last one went wrong",
    "on": "goes on with the embedded head",
}
LATE = 0.3
#: That of the recipe `early`.
POSITION_DECAY = TrainConfig.model_fields["position_decay"].default


@dataclass(frozen=True)
class Pass:
    """One forward pass of the target over windows of token ids, and where drafts begin in them.

    Attributes:
        ids: [num_windows, seq_len] int64.
        states: what enters each layer of the target, L tensors [num_windows, seq_len, hidden_size].
        target_hidden: [num_windows, seq_len, hidden_size], its normed output.
        arguments: what every layer takes beside its input, as `Target.embed` has it.
        block_starts: [seq_len] or [num_windows, seq_len] int64; see `ExitHead.forward`.
        late: whether the last `LATE` of the steps are under way.
    """

    ids: Tensor
    states: list[Tensor]
    target_hidden: Tensor
    arguments: dict[str, Any]
    block_starts: Tensor
    late: bool

    @property
    def rotary(self) -> Rotary:
        return self.arguments["position_embeddings"]


class Head(nn.Module):
    """An exit head, and the loss it is trained with."""

    def __init__(self, target: Target, head_layers: int, recipes: set[str], name: str = MODEL) -> None:
        """Take what `target`, a model of that name, says of the exit layer and the auxiliary ones."""
        super().__init__()
        self.head_layers, self.recipes, self.target_name = head_layers, recipes, name
        start = f"{name}/eesd" if "on" in recipes else default_init(target)
        self.head = new_head(target, start, "deep_context", head_layers)
        self._own_target = (target,)  # a tuple hides the target's weights from this module's

    @property
    def target(self) -> Target:
        """The target as this head reads it."""
        return self._own_target[0]

    def loss(self, target: Target, step: Pass) -> Tensor:
        """Return the divergence from the target, mean over all positions."""
        hidden, weights = self._drafted(step), None
        if "early" in self.recipes:
            weights = place_weights(step.block_starts, POSITION_DECAY).expand(step.ids.shape).flatten()
        loss = total_variation if step.late and "tv" in self.recipes else forward_kl
        return _divergence(target, hidden, step.target_hidden, loss, weights)

    @torch.no_grad()
    def own_rounds(self, step: Pass) -> Pass:
        """Return the pass with drafts that begin where this head's last ones, at the pass's places, went wrong."""
        logits = (self.target.lm_head(hidden).argmax(-1) for hidden in (self._drafted(step), step.target_hidden))
        return replace(step, block_starts=round_starts(torch.eq(*logits)))

    def _drafted(self, step: Pass) -> Tensor:
        exit_hidden = self.target.exit_states(step.states)
        return self.head(exit_hidden, step.target_hidden, step.rotary, step.block_starts)

    def export(self, target: Target, directory: Path) -> None:
        prior = Prior(alpha=6.0, beta=4.0)  # `eesd calibrate` counts a better one
        config = head_config(self.target, self.target_name, "deep_context", prior, None, self.head_layers)
        write_head(directory, config, {name: t.to(torch.bfloat16) for name, t in self.head.state_dict().items()})


class DraftModel(nn.Module):
    """Some of the target's layers, and its norm, as a model of their own."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        layers = target.model.model.layers
        chosen = [*range(DRAFT_LAYERS - 1), len(layers) - 1]
        self.layers = nn.ModuleList(copy.deepcopy(layers[index]) for index in chosen).requires_grad_(True)
        self.norm = copy.deepcopy(target.model.model.norm).requires_grad_(True)

    def loss(self, target: Target, step: Pass) -> Tensor:
        """Return forward KL from the target, mean over all positions."""
        hidden = step.states[0]
        for layer in self.layers:
            hidden = layer(hidden, **step.arguments)
        return _divergence(target, self.norm(hidden), step.target_hidden)

    def export(self, target: Target, directory: Path) -> None:
        config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": len(self.layers)})
        model = LlamaForCausalLM(config)
        tensors = {f"model.{name}": tensor for name, tensor in self.state_dict().items()}
        tensors["model.embed_tokens.weight"] = target.model.model.embed_tokens.weight
        tensors["lm_head.weight"] = target.lm_head.weight  # where it is tied, the same
        model.load_state_dict(tensors)
        model.to(torch.bfloat16).save_pretrained(directory)


class EagleHead(nn.Module):
    """EAGLE's one layer: fc(embedding of the next token, feature of this one), attention and MLP, no norm before it."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = target.config.hidden_size
        self.layer = copy.deepcopy(target.model.model.layers[-1]).requires_grad_(True)
        self.layer.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            self.fc.weight[:, size:] = torch.eye(size)
            # It predicts normed features, whose scale is not that of the target's last residual stream: start from the
            # feature itself (KL of the target's copied outputs: hundreds of nats).
            self.layer.self_attn.o_proj.weight.zero_()
            self.layer.mlp.down_proj.weight.zero_()

    def forward(self, target: Target, ids: Tensor, target_hidden: Tensor) -> list[Tensor]:
        """Return the predicted features of every unrolling, [num_windows, seq_len - 1, hidden_size] each.

        Position i predicts the target's feature of i + 1, from that of i and token i + 1. In unrolling n the features
        of the last n positions are predicted ones.
        """
        embedded, arguments = target.embed(ids[:, 1:])
        rotary = arguments["position_embeddings"]
        features, keys, values, predictions = target_hidden[:, :-1], [], [], []
        for _ in range(UNROLLED):
            hidden = self.fc(torch.cat([embedded, features], dim=-1))
            query, key, value = self._projected(hidden, rotary)
            keys.append(key)
            values.append(value)
            attended = F.scaled_dot_product_attention(
                query, torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=unrolled_mask(len(keys), ids)
            )
            hidden = hidden + self.layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            predictions.append(hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden)))
            features = torch.cat([target_hidden[:, :1], predictions[-1][:, :-1].detach()], dim=1)
        return predictions

    def loss(self, target: Target, step: Pass) -> Tensor:
        """Return the mean over unrollings of forward KL and, weighted, the smooth L1 distance of features."""
        wanted = step.target_hidden[:, 1:]
        losses = [
            _divergence(target, predicted, wanted)
            + FEATURE_WEIGHT * F.smooth_l1_loss(predicted.float(), wanted.float())
            for predicted in self(target, step.ids, step.target_hidden)
        ]
        return torch.stack(losses).mean()

    def export(self, target: Target, directory: Path) -> None:
        layer = {name: t for name, t in self.layer.state_dict().items() if not name.startswith("input_layernorm")}
        tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()} | {"fc.weight": self.fc.weight}
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.detach().to(torch.bfloat16).contiguous() for name, t in tensors.items()},
            directory / "model.safetensors",
        )
        config = target.config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
        _write_json(directory / "config.json", config)

    def _projected(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (p(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p in projections)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        groups = attention.num_key_value_groups
        return query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


PEERS = {"draft_model": DraftModel, "eagle": EagleHead}


def new_drafter(target: Target, name: str, target_name: str = MODEL) -> nn.Module:
    """Return what `name` says, untrained, for a target of that name.

    Raises:
        ValueError: it says nothing.
    """
    match = NAME.fullmatch(name)
    recipes = set((match and match["recipes"] or "").split("+")) - {""}
    if match is None or not recipes <= RECIPES.keys():
        known = ", ".join(RECIPES)
        forms = f"nXmY, nXmYaA-B, nXmY:RECIPE+RECIPE ({known}), draft_model or eagle, or one with @F"
        raise ValueError(f"{name!r} is no drafter; {forms}")
    if match["peer"]:
        return PEERS[match["peer"]](target)
    aux_layers = [int(layer) for layer in (match["aux"] or "").split("-") if layer]
    return Head(Target(target.model, int(match["n"]), aux_layers), int(match["m"]), recipes, target_name)


def drafters_of(args: argparse.Namespace) -> tuple[Target, dict[str, nn.Module]]:
    """Return the target, in float32, and what is to be trained for it.

    Raises:
        ValueError: the target is no Llama, or something is no drafter.
    """
    if (kind := read_config(args.target).model_type) != "llama":
        raise ValueError(f"target={args.target!r} is of the kind {kind!r}; allowed: llama, as vLLM's EAGLE head is")
    target = load_target(args.target, 0, "cpu")
    return target, {name: new_drafter(target, name, args.target) for name in args.drafters}


def conversation_ids(path: Path, vocab_size: int) -> np.ndarray:
    """Return the token ids of all conversations of a file, one after the other, [num_tokens] uint16 or uint32.

    Raises:
        ValueError: a line is none, or holds ids that the target does not know; one line that names it.
    """
    parts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                ids = np.array(json.loads(line)["ids"], dtype=np.int64)
            except (ValueError, KeyError, TypeError, OverflowError):
                raise ValueError(f'{path}:{number}: not a conversation; allowed: {{"ids": [token ids], ...}}') from None
            if ids.ndim != 1 or ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"{path}:{number}: ids must be a list of whole numbers from 0 to {vocab_size - 1}")
            parts.append(ids.astype(token_dtype(vocab_size)))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)
    if len(tokens) <= SEQ_LEN:
        raise ValueError(f"{path}: {len(tokens)} tokens, more than {SEQ_LEN} are needed")
    return tokens


def lr_factor(name: str) -> float:
    return float(NAME.fullmatch(name)["factor"] or 1.0)


def round_starts(matches: Tensor) -> Tensor:
    """Return where the draft of each position begins, one after each that went wrong, [num_windows, seq_len] int64.

    Args:
        matches: [num_windows, seq_len] bool, whether the draft made at a position is what the target says there.
    """
    right = matches.cpu()
    starts = torch.zeros(right.shape, dtype=torch.int64)
    for position in range(1, right.shape[1]):
        last = starts[:, position - 1]
        goes_on = right[:, position - 1] & (position - last < LONGEST_DRAFT)
        starts[:, position] = torch.where(goes_on, last, position)
    return starts.to(matches.device)


def unrolled_mask(count: int, ids: Tensor) -> Tensor:
    """Return which keys a query may see, [seq_len - 1, count * (seq_len - 1)] bool.

    The keys of unrolling n (of `count`, from 0) stand `count - 1 - n` positions before the query; those of the first,
    which were made of the target's features, also further back.
    """
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)
    back = positions[:, None] - positions
    masks = [back >= count - 1] + [back == count - 1 - n for n in range(1, count)]
    return torch.cat(masks, dim=1)


def _divergence(
    target: Target, draft: Tensor, wanted: Tensor, loss: Loss = forward_kl, weights: Tensor | None = None
) -> Tensor:
    flat = (draft.flatten(0, 1), wanted.flatten(0, 1))
    return distillation_loss(loss, *flat, target.lm_head.weight, weights=weights)


def train(args: argparse.Namespace) -> None:
    """Train all of them; written every SAVE_EVERY_S, so that a stopped run goes on where it was."""
    device = _device()
    target, drafters = drafters_of(args)
    args.work.mkdir(parents=True, exist_ok=True)
    data = _data(args, target, device)
    target.to(device)
    if uses_bfloat16(device):
        for weight in target.parameters():  # the drafters, copied from it before, learn in float32
            weight.data = weight.data.to(torch.bfloat16)
    config = TrainConfig(steps=args.tokens // (args.batch * SEQ_LEN), batch=args.batch, seq_len=SEQ_LEN)
    rates = {name: lr_factor(name) * LR / target.config.hidden_size**0.5 for name in drafters}
    optimizers = {name: _make_optimizers(drafter.to(device), rates[name]) for name, drafter in drafters.items()}
    step_losses = _step_losses(target, drafters, device, args.compile)
    run = _resume(args.work, drafters, optimizers) | {"seed": args.seed, "batch": args.batch, "hardware": hardware()}
    began, saved = time.monotonic() - run["seconds"], time.monotonic()
    while (place := place_of(run, config.steps, args.minutes)) < config.steps:
        ids = data.batch_at(run["step"], args.batch, SEQ_LEN, args.seed).to(device)
        block_starts = random_block_starts(SEQ_LEN, (args.seed, run["step"], 1)).to(device)
        losses = step_losses(ids, block_starts, place >= (1 - LATE) * config.steps)
        for name, drafter in drafters.items():
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            _update(optimizers[name], rates[name] * learning_rate_scale(place, 0.0, config))
        run |= {"step": run["step"] + 1, "seconds": time.monotonic() - began}
        run["tokens"] = run["step"] * args.batch * SEQ_LEN
        run["losses"].append(losses)
        if run["step"] % 10 == 0:
            share = place_of(run, config.steps, args.minutes) / config.steps
            done = f"step {run['step']}, {run['tokens']} tokens, {run['seconds']:.0f} s, {min(share, 1):.0%} of the run"
            print(f"{done}: {_mean_losses(run, 10)}", flush=True)
        if time.monotonic() - saved > SAVE_EVERY_S:
            _save(args.work, drafters, optimizers, run)
            saved = time.monotonic()
    _save(args.work, drafters, optimizers, run)


def place_of(run: dict[str, Any], steps: int, minutes: float | None) -> int:
    """Return the step at which a run stands: of its tokens or of its minutes, whichever is nearer to its end."""
    return max(run["step"], 0 if minutes is None else int(steps * run["seconds"] / 60 / minutes))


def _data(args: argparse.Namespace, target: Target, device: str) -> TokenData:
    """Return what is trained on: conversations as they are, or text and as much that the target makes of it."""
    if args.data.suffix == ".jsonl":
        return TokenData([conversation_ids(args.data, target.config.vocab_size)])
    text = [np.memmap(args.data, dtype=token_dtype(target.config.vocab_size), mode="r")]
    own = OwnText(args.own or args.work, target, args.self_generate, SEQ_LEN, [1.0, 0.7], 0)
    if not sampled_through_vllm(args.generator, args.target, text, own):
        target.to(device)
        own.make(text, "transformers", partial(continue_windows, target))
    return TokenData(text, own.windows())


def _step_losses(
    target: Target, drafters: dict[str, nn.Module], device: str, compiled: bool
) -> Callable[[Tensor, Tensor, bool], dict[str, float]]:
    """Return a function that leaves each drafter's gradient in its parameters and returns the losses."""

    @torch.no_grad()
    def run_target(ids: Tensor) -> tuple[list[Tensor], Tensor]:
        *states, last = target.layer_inputs(ids)
        return states, target.model.model.norm(last)

    def loss_of(drafter: nn.Module, step: Pass) -> Tensor:
        return drafter.loss(target, step)

    if compiled:
        torch._dynamo.config.recompile_limit = 2 * len(drafters) + 1  # each before and after `late`
        run_target, loss_of = torch.compile(run_target), torch.compile(loss_of)

    def step_losses(ids: Tensor, block_starts: Tensor, late: bool) -> dict[str, float]:
        losses = {}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=uses_bfloat16(device)):
            _, arguments = target.embed(ids)
            step = Pass(ids, *run_target(ids), arguments, block_starts, late)
            for name, drafter in drafters.items():
                own_rounds = late and "rounds" in getattr(drafter, "recipes", ())
                loss = loss_of(drafter, drafter.own_rounds(step) if own_rounds else step)
                loss.backward()
                losses[name] = loss.detach()
        return {name: round(loss.item(), 4) for name, loss in losses.items()}  # a GPU is waited for once

    return step_losses


@torch.no_grad()
def export(args: argparse.Namespace) -> None:
    """Write what vLLM loads, in bfloat16, and `training.json`: how long each was trained, and how well it predicts."""
    target, drafters = drafters_of(args)
    run = _resume(args.work, drafters, None)
    without_rate = [name.partition("@")[0] for name in drafters]
    for name, drafter in drafters.items():
        stem = name.partition("@")[0]
        output = args.output or Path(args.target) / "peers"
        directory = output / (stem if without_rate.count(stem) == 1 else name).replace(":", "-")
        drafter.export(target, directory)
        kept = {"tokens": run["tokens"], "minutes_together": round(run["seconds"] / 60, 1)}
        kept |= {key: run[key] for key in ("seed", "batch", "hardware") if key in run}
        kept |= {"lr_factor": lr_factor(name), "last_loss": _mean_losses(run, 50)[name]}
        kept["with"] = sorted(run["losses"][-1])
        _write_json(directory / "training.json", kept)
        print(f"wrote {directory}: {kept}", flush=True)


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Print how well exit heads predict held-out text and the target's own greedy text; of peers the last loss."""
    device = _device()
    target, drafters = drafters_of(args)
    run = _resume(args.work, drafters, None)
    target.to(device)
    held_out = [np.memmap(args.held_out, dtype=token_dtype(target.config.vocab_size), mode="r")]
    text = spaced_windows(held_out, args.windows, SEQ_LEN)
    greedy, first = own_held_out(target, held_out, args.windows, SEQ_LEN)
    print(f"{run['tokens']} tokens")
    for name, drafter in drafters.items():
        if not isinstance(drafter, Head):
            print(f"{name}: loss {_mean_losses(run, 50)[name]}", flush=True)
            continue
        drafter.to(device)
        on_text = evaluate(drafter.target, drafter.head, text)
        on_greedy = evaluate(drafter.target, drafter.head, greedy, first - 1)
        print(
            f"{name}: loss {_mean_losses(run, 50)[name]}; "
            f"text: KL {on_text['kl']:.4f}, overlap {on_text['overlap']:.4f}, "
            f"{on_text['expected_matches']:.3f} of 8 match; "
            f"greedy: agreement {on_greedy['agreement']:.4f}, {on_greedy['expected_matches']:.3f} of 8 match",
            flush=True,
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _mean_losses(run: dict, count: int) -> dict[str, float]:
    last = run["losses"][-count:]
    return {name: round(statistics.fmean(losses[name] for losses in last), 4) for name in last[-1]}


def _save(work: Path, drafters: dict[str, nn.Module], optimizers: dict[str, list], run: dict) -> None:
    state = {"run": run, "drafters": {name: drafter.state_dict() for name, drafter in drafters.items()}}
    state["optimizers"] = {name: [o.state_dict() for o in own] for name, own in optimizers.items()}
    with replacing(work / "drafters.pt") as file:
        torch.save(state, file)


def _resume(work: Path, drafters: dict[str, nn.Module], optimizers: dict[str, list] | None) -> dict:
    """Load what was saved of these drafters, if anything, and return the run's counters."""
    if not (work / "drafters.pt").exists():
        if optimizers is None:
            raise SystemExit(f"{work / 'drafters.pt'}: nothing has been trained there")
        return {"step": 0, "seconds": 0.0, "tokens": 0, "losses": []}
    state = torch.load(work / "drafters.pt", map_location="cpu", weights_only=True)
    if missing := drafters.keys() - state["drafters"].keys():
        raise SystemExit(f"{work / 'drafters.pt'} holds {sorted(state['drafters'])}, not {sorted(missing)}")
    for name, drafter in drafters.items():
        drafter.load_state_dict(state["drafters"][name])
        for optimizer, saved in zip((optimizers or {}).get(name, []), state["optimizers"][name], strict=False):
            optimizer.load_state_dict(saved)
    return state["run"]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (train, export, measure):
        sub = commands.add_parser(function.__name__, help=function.__doc__)
        sub.set_defaults(function=function)
        sub.add_argument("drafters", nargs="+", metavar="DRAFTER", help="nXmY[:RECIPES], draft_model, eagle; @FACTOR")
        sub.add_argument("--work", type=Path, default=Path("build/drafters"))
        sub.add_argument("--target", default=MODEL, help="a directory or a Hub id, of the Llama architecture")
    commands.choices["export"].add_argument("-o", "--output", type=Path, help="default: peers/ in the target's")
    measuring = commands.choices["measure"]
    measuring.add_argument("--held-out", type=Path, default=Path("build/target/held_out.bin"), help="of pack_text.py")
    measuring.add_argument("--windows", type=int, default=32)
    training = commands.choices["train"]
    text = "made by pack_text.py; or JSONL, a conversation's `ids` a line"
    training.add_argument("--data", type=Path, default=Path("build/target/train.bin"), help=text)
    text = "of the whole run, resumed parts included, if they are over before its tokens"
    training.add_argument("--minutes", type=float, help=text)
    training.add_argument("--tokens", type=int, default=TOKENS, help="of the whole run, resumed parts included")
    training.add_argument("--self-generate", type=int, default=2048, help="windows the target writes")
    training.add_argument("--own", type=Path, help="where they are, or will be (default: --work)")
    training.add_argument("--generator", default="auto", choices=("auto", "vllm", "transformers"), help="writes them")
    training.add_argument("--compile", action="store_true", help="torch.compile the step: slow to start")
    training.add_argument("--batch", type=int, default=BATCH, help=f"windows of {SEQ_LEN} tokens a step")
    training.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        args.function(args)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
