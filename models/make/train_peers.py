"""Train what EESD is compared with, a small draft model and an EAGLE head, on the exit head's data and budget.

    python models/make/pack_text.py --work build/target --tokenizer models/eesd-code-10m
    python models/make/train_peers.py train  --work build/peers                  # resumes; --minutes cuts it short
    python models/make/train_peers.py export --work build/peers -o models/eesd-code-10m/peers

Both learn from the same batches as each other, mixed as `eesd distill` mixes them (half text, half the target's own),
with its loss (forward KL), optimizer and learning rates; one forward pass of the target serves both, so a step trains
two. `TOKENS` is what the exit head saw. Both keep the target's embedding and LM head, frozen, as the exit head does.

- draft_model: a Llama of as many layers as an EESD draft step runs (the first N of the target and one more), started
  from the target's first N and its last.
- eagle: one layer as vLLM's EagleLlamaForCausalLM has it, started from the target's last. A position's input is the
  target's normed output there beside the next token's embedding. EAGLE's loss on features (arXiv 2401.15077) is added,
  and the head is unrolled `UNROLLED` times on its own features, as HASS does (arXiv 2408.15766).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.generate import OwnText, continue_windows, sampled_through_vllm
from vllm_eesd.distill.losses import distillation_loss, forward_kl
from vllm_eesd.distill.muon import uses_bfloat16
from vllm_eesd.distill.target import Target, load_target
from vllm_eesd.distill.train import DEFAULT_LR, TrainConfig, _make_optimizers, learning_rate_scale

MODEL = "models/eesd-code-10m"
EXIT_LAYER = 2
#: What the embedded head saw (its card).
TOKENS = 30_300_000
BATCH, SEQ_LEN = 16, 512
UNROLLED = 3
FEATURE_WEIGHT = 0.1
SAVE_EVERY_S = 60


class DraftModel(nn.Module):
    """Some of the target's layers, and its norm, as a model of their own."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        layers = target.model.model.layers
        chosen = [*range(EXIT_LAYER), len(layers) - 1]
        self.layers = nn.ModuleList(copy.deepcopy(layers[index]) for index in chosen).requires_grad_(True)
        self.norm = copy.deepcopy(target.model.model.norm).requires_grad_(True)

    def loss(self, target: Target, ids: Tensor, target_hidden: Tensor) -> Tensor:
        """Return forward KL from the target, mean over all positions of ids, [num_windows, seq_len]."""
        hidden, arguments = target.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, **arguments)
        return _kl(target, self.norm(hidden), target_hidden)

    def export(self, target: Target, directory: Path) -> None:
        config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": len(self.layers)})
        model = LlamaForCausalLM(config)
        tensors = {f"model.{name}": tensor for name, tensor in self.state_dict().items()}
        tensors["model.embed_tokens.weight"] = target.model.model.embed_tokens.weight
        model.load_state_dict(tensors, strict=False)  # lm_head is tied
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

    def loss(self, target: Target, ids: Tensor, target_hidden: Tensor) -> Tensor:
        """Return the mean over unrollings of forward KL and, weighted, the smooth L1 distance of features."""
        wanted = target_hidden[:, 1:]
        losses = [
            _kl(target, predicted, wanted) + FEATURE_WEIGHT * F.smooth_l1_loss(predicted.float(), wanted.float())
            for predicted in self(target, ids, target_hidden)
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


def unrolled_mask(count: int, ids: Tensor) -> Tensor:
    """Return which keys a query may see, [seq_len - 1, count * (seq_len - 1)] bool.

    The keys of unrolling n (of `count`, from 0) stand `count - 1 - n` positions before the query; those of the first,
    which were made of the target's features, also further back.
    """
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)
    back = positions[:, None] - positions
    masks = [back >= count - 1] + [back == count - 1 - n for n in range(1, count)]
    return torch.cat(masks, dim=1)


def _kl(target: Target, draft: Tensor, wanted: Tensor) -> Tensor:
    return distillation_loss(forward_kl, draft.flatten(0, 1), wanted.flatten(0, 1), target.lm_head.weight)


def train(args: argparse.Namespace) -> None:
    """Train both; written every SAVE_EVERY_S, so that a stopped run goes on where it was."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(MODEL, EXIT_LAYER, "cpu")
    args.work.mkdir(parents=True, exist_ok=True)
    text = [np.memmap(args.data, dtype=np.uint16, mode="r")]
    own = OwnText(args.work, target, args.self_generate, SEQ_LEN, [1.0, 0.7], args.seed)
    through_vllm = sampled_through_vllm(args.generator, MODEL, text, own)
    target.to(device)
    if not through_vllm:
        own.make(text, "transformers", partial(continue_windows, target))
    data = TokenData(text, own.windows())
    config = TrainConfig(steps=args.tokens // (BATCH * SEQ_LEN), minutes=args.minutes, batch=BATCH, seq_len=SEQ_LEN)
    peers = {name: peer(target).to(device) for name, peer in PEERS.items()}
    lr = args.lr_factor * DEFAULT_LR / target.config.hidden_size**0.5
    optimizers = {name: _make_optimizers(peer, lr) for name, peer in peers.items()}
    step_losses = _step_losses(target, peers, device)
    step_losses = torch.compile(step_losses) if args.compile else step_losses
    run = _resume(args.work, peers, optimizers)
    began, saved = time.monotonic() - run["seconds"], time.monotonic()
    while run["step"] < config.steps and (args.minutes is None or run["seconds"] < 60 * args.minutes):
        scale = learning_rate_scale(run["step"], run["seconds"], config)
        ids = data.batch_at(run["step"], BATCH, SEQ_LEN, args.seed).to(device)
        losses = step_losses(ids)
        sum(losses.values()).backward()  # they share no parameter; what was compiled together runs back together
        for name, peer in peers.items():
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            for optimizer in optimizers[name]:
                optimizer.param_groups[0]["lr"] = lr * scale
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        run |= {"step": run["step"] + 1, "seconds": time.monotonic() - began}
        run["tokens"] = run["step"] * BATCH * SEQ_LEN
        run["losses"].append({name: round(loss.item(), 4) for name, loss in losses.items()})
        if run["step"] % 10 == 0:
            print(f"step {run['step']} of {config.steps}, {run['seconds']:.0f} s: {run['losses'][-1]}", flush=True)
        if time.monotonic() - saved > SAVE_EVERY_S:
            _save(args.work, peers, optimizers, run)
            saved = time.monotonic()
    _save(args.work, peers, optimizers, run)


def _step_losses(target: Target, peers: dict[str, nn.Module], device: str) -> Callable[[Tensor], dict[str, Tensor]]:
    def step_losses(ids: Tensor) -> dict[str, Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=uses_bfloat16(device)):
            with torch.no_grad():
                _, target_hidden, _ = target(ids)
            return {name: peer.loss(target, ids, target_hidden) for name, peer in peers.items()}

    return step_losses


def export(args: argparse.Namespace) -> None:
    """Write what vLLM loads, in bfloat16, and `training.json`: how long each was trained."""
    target = load_target(MODEL, EXIT_LAYER, "cpu")
    peers = {name: peer(target) for name, peer in PEERS.items()}
    run = _resume(args.work, peers, None)
    for name, peer in peers.items():
        peer.export(target, args.output / name)
        kept = {"tokens": run["tokens"], "minutes": round(run["seconds"] / 60, 1), "budget_tokens": TOKENS}
        _write_json(args.output / name / "training.json", kept | {"last_loss": run["losses"][-1][name]})
        print(f"wrote {args.output / name}: {kept}")


def _save(work: Path, peers: dict[str, nn.Module], optimizers: dict[str, list], run: dict) -> None:
    state = {"run": run, "peers": {name: peer.state_dict() for name, peer in peers.items()}}
    state["optimizers"] = {name: [o.state_dict() for o in own] for name, own in optimizers.items()}
    torch.save(state, work / "peers.tmp")
    os.replace(work / "peers.tmp", work / "peers.pt")


def _resume(work: Path, peers: dict[str, nn.Module], optimizers: dict[str, list] | None) -> dict:
    if not (work / "peers.pt").exists():
        if optimizers is None:
            raise SystemExit(f"{work / 'peers.pt'}: nothing has been trained there")
        return {"step": 0, "seconds": 0.0, "tokens": 0, "losses": []}
    state = torch.load(work / "peers.pt", map_location="cpu", weights_only=True)
    for name, peer in peers.items():
        peer.load_state_dict(state["peers"][name])
        for optimizer, saved in zip((optimizers or {}).get(name, []), state["optimizers"][name], strict=False):
            optimizer.load_state_dict(saved)
    return state["run"]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("train", train), ("export", export)):
        sub = commands.add_parser(name)
        sub.set_defaults(function=function)
        sub.add_argument("--work", type=Path, default=Path("build/peers"))
        if name == "export":
            sub.add_argument("-o", "--output", type=Path, default=Path(MODEL) / "peers")
            continue
        sub.add_argument("--data", type=Path, default=Path("build/target/train.bin"), help="made by pack_text.py")
        sub.add_argument("--tokens", type=int, default=TOKENS, help="of the whole run, resumed parts included")
        sub.add_argument("--minutes", type=float, help="stop after this long, resumed parts included, if earlier")
        sub.add_argument("--self-generate", type=int, default=768, help="windows the target writes")
        sub.add_argument("--lr-factor", type=float, default=1.0, help="times the exit head's peak learning rate")
        sub.add_argument("--compile", action="store_true", help="torch.compile the step: slow to start")
        sub.add_argument("--generator", default="auto", choices=("auto", "vllm", "transformers"), help="writes them")
        sub.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
