"""Distillation on a tiny random Llama: it learns, it resumes to the bit, it writes what the loader reads."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import re
import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from vllm_eesd import cli
from vllm_eesd.distill import losses, muon, precision
from vllm_eesd.distill.data import (
    TokenData,
    long_enough,
    read_sources,
    spaced_windows,
    split_held_out,
    tokens_to_split,
)
from vllm_eesd.distill.generate import OwnText, continue_windows
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.model import block_mask, head_config, load_head, new_head
from vllm_eesd.distill.muon import Muon, orthogonal
from vllm_eesd.distill.run import _config, run
from vllm_eesd.distill.target import Target, load_target
from vllm_eesd.distill.text import read_traces, text_files
from vllm_eesd.distill.train import TrainConfig, random_block_starts, train
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior, read_tensors, write_head

VOCAB, LAYERS, SEQ_LEN = 64, 4, 32
#: The token that ends a text.
END = 0
# Two float32 implementations of the same sums, over some dozens of terms each.
FLOAT32_TOLERANCE = 1e-5
# Of a KL's mean over 2 windows of SEQ_LEN tokens: some 50 roundings in series (ten in each of five layers), each of
# relative size 2 ** -9 and independent of the others, doubled because a KL is quadratic in logits; three deviations.
BFLOAT16_TOLERANCE = 3 * 2 * 2**-9 * math.sqrt(50 / (2 * SEQ_LEN))


pytestmark = pytest.mark.usefixtures("one_thread")


def make_target(model_dir, exit_layer: int = 1) -> Target:
    return load_target(str(model_dir), exit_layer, "cpu")


def make_args(model_dir, text, output, **changes) -> Namespace:
    given = {
        "model": str(model_dir),
        "exit_layer": 1,
        "data": [str(text)],
        "output": str(output),
        "steps": 12,
        "minutes": None,
    }
    given |= {"batch": 4, "seq_len": SEQ_LEN, "lr": 3e-3, "init": "last", "seed": 0, "work": None, "json": None}
    given |= {"generator": "transformers"}
    return Namespace(**(given | changes))


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_target_forward_is_transformers_own(model_dir):
    target = make_target(model_dir, exit_layer=2)
    ids = torch.randint(VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    exit_hidden, hidden, _ = target(ids)
    output = target.model(ids, output_hidden_states=True)
    torch.testing.assert_close(target.lm_head(hidden), output.logits, atol=FLOAT32_TOLERANCE, rtol=0)
    torch.testing.assert_close(exit_hidden, output.hidden_states[2], atol=FLOAT32_TOLERANCE, rtol=0)


def test_cloned_last_layer_is_the_target(model_dir):
    windows = torch.randint(VOCAB, (4, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    target = make_target(model_dir, exit_layer=LAYERS - 1)
    for init in ("last", "exit"):
        same = evaluate(target, new_head(target, init, "transformer"), windows)
        assert same["agreement"] == 1.0 and same["expected_matches"] == 8.0
        assert abs(same["kl"]) < FLOAT32_TOLERANCE and same["overlap"] == pytest.approx(1, abs=FLOAT32_TOLERANCE)
    shallow = make_target(model_dir, exit_layer=1)
    assert evaluate(shallow, new_head(shallow, "last", "transformer"), windows)["agreement"] < 0.9


@pytest.mark.parametrize(("init", "chosen"), [("last", [LAYERS - 2, LAYERS - 1]), ("exit", [1, 2])])
def test_layers_that_a_head_starts_from(model_dir, init, chosen):
    target = make_target(model_dir, exit_layer=1)
    head = new_head(target, init, "deep_context", head_layers=2)
    for layer, number in zip((head.layer, head.upper[0].layer), chosen, strict=True):
        theirs = target.model.model.layers[number].state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in layer.state_dict().items())


def random_deep_head(target: Target):
    head = new_head(target, "last", "deep_context")
    torch.manual_seed(2)
    for parameter in head.deep.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return head


def test_deep_context_without_a_context_is_the_transformer_head(model_dir):
    target = make_target(model_dir)
    ids = torch.randint(VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    exit_hidden, target_hidden, rotary = target(ids)
    one_block = torch.zeros(SEQ_LEN, dtype=torch.int64)
    plain = new_head(target, "last", "transformer")(exit_hidden, target_hidden, rotary, one_block)
    deep = random_deep_head(target)
    torch.testing.assert_close(
        deep(exit_hidden, target_hidden, rotary, one_block), plain, atol=FLOAT32_TOLERANCE, rtol=0
    )
    two_blocks = torch.arange(SEQ_LEN) // 16 * 16
    assert not torch.allclose(deep(exit_hidden, target_hidden, rotary, two_blocks)[:, 16:], plain[:, 16:], atol=1e-2)


def test_a_new_deep_context_head_drafts_as_the_transformer_head(model_dir):
    """Its first layer knows of the target's output, and makes nothing of it yet."""
    target = make_target(model_dir)
    ids = torch.randint(VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    starts = random_block_starts(SEQ_LEN, (0, 0, 1))
    plain, deep = (new_head(target, "last", kind)(*target(ids), starts) for kind in ("transformer", "deep_context"))
    torch.testing.assert_close(deep, plain, atol=FLOAT32_TOLERANCE, rtol=0)


def test_deep_context_sees_what_a_round_knows(model_dir):
    """The target's output at the bonus token's position and later is not known while drafting."""
    target = make_target(model_dir)
    head = random_deep_head(target)
    ids = torch.randint(VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    exit_hidden, target_hidden, rotary = (x.requires_grad_(True) if torch.is_tensor(x) else x for x in target(ids))
    starts = torch.from_numpy(np.repeat([0, 5, 6, 13, 20], [5, 1, 7, 7, SEQ_LEN - 20]))
    for position in (4, 5, 12, 25):
        output = head(exit_hidden, target_hidden, rotary, starts)[0, position].square().sum()
        of_exit, of_target = torch.autograd.grad(output, (exit_hidden, target_hidden), allow_unused=True)
        read = [(g[0].abs().sum(-1) > 0).nonzero().flatten().tolist() for g in (of_exit, of_target)]
        start = int(starts[position])
        assert read == [list(range(position + 1)), list(range(start))]


def test_block_mask_and_starts():
    starts = random_block_starts(100, (0, 7))
    assert starts[0] == 0 and (starts.diff() >= 0).all() and (starts <= torch.arange(100)).all()
    assert (torch.arange(100) - starts).max() == 7
    assert torch.equal(starts, random_block_starts(100, (0, 7)))
    assert not torch.equal(starts, random_block_starts(100, (0, 8)))
    deep, shallow = block_mask(torch.tensor([0, 0, 2])).int().split(3, dim=1)
    assert deep.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert shallow.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def plain_loss(name, p, q, labels):
    """Each loss as its paper writes it, for autograd; p and q are distributions."""
    kl = lambda a, b: (a * (a.log() - b.log())).sum(-1)  # noqa: E731
    m = {"jsd": 0.3 * p + 0.7 * q}.get(name, p)
    overlap = torch.minimum(p, q).sum(-1)
    weight = (-losses.LK_RATE * overlap.detach()).exp()
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: 0.3 * kl(p, m) + 0.7 * kl(q, m),
        "tv": lambda: 1 - overlap,
        "nla": lambda: -overlap.log(),
        "lk_hybrid": lambda: weight * kl(p, q) + (1 - weight) * (1 - overlap),
        "ce_target": lambda: torch.nn.functional.nll_loss(q.log(), p.argmax(-1), reduction="none"),
        "ce_text": lambda: torch.nn.functional.nll_loss(q.log(), labels, reduction="none"),
    }[name]().mean()


@pytest.mark.parametrize("name", losses.LOSS_NAMES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 7])
def test_loss_and_gradient(monkeypatch, name, num_tokens, biased):
    monkeypatch.setattr(losses, "CPU_CHUNK_LOGITS", 3 * 11)
    torch.manual_seed(0)
    draft, target, weight = (
        torch.randn(num_tokens, 8, requires_grad=True),
        torch.randn(num_tokens, 8),
        torch.randn(11, 8),
    )
    bias = torch.randn(11) if biased else None
    labels = torch.randint(11, (num_tokens,))
    loss = losses.distillation_loss(losses.build_loss(name, 0.3), draft, target, weight, bias, labels)
    (gradient,) = torch.autograd.grad(2 * loss, draft)
    p, q = (torch.nn.functional.linear(x, weight, bias).softmax(-1) for x in (target, draft))
    expected = plain_loss(name, p, q, labels)
    (expected_gradient,) = torch.autograd.grad(2 * expected, draft)
    torch.testing.assert_close(loss, expected, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)
    torch.testing.assert_close(gradient, expected_gradient, atol=FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", losses.LOSS_NAMES)
def test_certain_logits_give_finite_gradients(name):
    """Probabilities that underflow to 0 on one side or both."""
    weight = torch.eye(4)
    draft = torch.tensor([[300.0, 0, 0, 0], [0, 300.0, 0, 0], [0, 0, 0, 0]], requires_grad=True)
    target = torch.tensor([[0, 300.0, 0, 0], [0, 300.0, 0, 0], [300.0, 0, 0, 0]])
    loss = losses.distillation_loss(losses.build_loss(name), draft, target, weight, None, torch.tensor([3, 1, 0]))
    loss.backward()
    assert loss.isfinite() and draft.grad.isfinite().all()


def test_a_test_that_does_not_say_what_it_multiplies_in_fails():
    """It would hold on one CPU and not on another."""
    with pytest.raises(pytest.fail.Exception, match="use the fixture `in_bfloat16`"):
        precision.uses_bfloat16("cpu")
    assert precision.uses_bfloat16("cuda")


def test_a_test_that_says_it_is_obeyed(in_bfloat16):
    assert precision.uses_bfloat16("cpu") is in_bfloat16


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("name", losses.LOSS_NAMES)
def test_every_loss_trains(model_dir, text, name):
    target = make_target(model_dir)
    # ce_text needs text with something to learn: a cycle.
    data = TokenData([np.arange(4_000, dtype=np.uint16) % 7])
    head = new_head(target, "last")
    record = train(target, head, data, TrainConfig(steps=80, batch=4, seq_len=SEQ_LEN, lr=1e-2, loss=name))
    assert sum(record["losses"][-5:]) < 0.9 * sum(record["losses"][:5])


@pytest.mark.parametrize("head_type", ["deep_context", "transformer"])
def test_a_token_late_in_a_draft_weighs_less(model_dir, head_type, in_bfloat16):
    """In a deep-context head's loss; another head knows no drafts, so all its tokens weigh alike."""
    target = make_target(model_dir)
    data = TokenData([np.random.default_rng(0).integers(0, VOCAB, 400).astype(np.uint16)])
    ids, starts = data.batch_at(0, 2, SEQ_LEN, 0), random_block_starts(SEQ_LEN, (0, 0, 1))
    head = new_head(target, "last", head_type)
    with torch.no_grad():
        exit_hidden, target_hidden, rotary = target(ids)
        hidden = head(exit_hidden, target_hidden, rotary, starts)
        log_q, log_p = (target.lm_head(state).log_softmax(-1) for state in (hidden, target_hidden))
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    for decay in (0.0, 1.5):
        config = TrainConfig(steps=1, batch=2, seq_len=SEQ_LEN, position_decay=decay, head_type=head_type)
        (loss,) = train(target, new_head(target, "last", head_type), data, config)["losses"]
        alike = decay == 0 or head_type == "transformer"
        weights = [1.0 if alike else math.exp(-(place - start) / decay) for place, start in enumerate(starts.tolist())]
        expected = (divergence * torch.tensor(weights)).sum() / (2 * sum(weights))
        # Losses are kept with five digits.
        assert loss == pytest.approx(expected.item(), abs=2e-5, rel=BFLOAT16_TOLERANCE if in_bfloat16 else 0)


@pytest.mark.usefixtures("in_bfloat16")
def test_a_head_that_goes_on_learning_does_so_gently(model_dir, monkeypatch):
    """By default; a rate that was asked for is what both learn at."""
    target, rates = make_target(model_dir), []
    data = TokenData([np.arange(400, dtype=np.uint16) % 7])
    monkeypatch.setattr("vllm_eesd.distill.train._update", lambda optimizers, rate: rates.append(rate))
    for init, lr in [("last", None), ("a head", None), ("last", 0.5), ("a head", 0.5)]:
        config = TrainConfig(steps=2, batch=1, seq_len=SEQ_LEN, init=init, lr=lr)
        train(target, new_head(target, "last"), data, config)
    new, continued, *asked_for = rates[::2]
    assert continued == pytest.approx(new / 8) and asked_for[0] == asked_for[1] > new


def test_expected_matches_counts_leading_matches(model_dir, monkeypatch):
    target = make_target(model_dir)
    head = new_head(target, "last")
    wanted = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1]).bool()
    # Two tokens of vocabulary: the head says 0 where it should match and 1 elsewhere, the target always 0.
    one_hot = torch.stack([wanted, ~wanted], -1).float()[None] * 9
    monkeypatch.setattr(Target, "forward", lambda self, ids: (None, torch.tensor([9.0, 0]).expand(1, 12, 2), None))
    monkeypatch.setattr(type(head), "forward", lambda self, *_: one_hot)
    target.model.lm_head = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(target.model.lm_head.weight)
    with torch.no_grad():
        measured = evaluate(target, head, torch.zeros(1, 12, dtype=torch.int64))
    runs = [2, 1, 0, 7, 6]  # leading matches among the 8 positions from each start with 8 left
    assert measured["expected_matches"] == pytest.approx(sum(runs) / 5)
    assert measured["agreement"] == pytest.approx(10 / 12)
    assert measured["matches_per_position"][:2] == [0.8, 0.6]


@pytest.mark.usefixtures("in_bfloat16")
def test_training_lowers_the_loss(model_dir, text):
    target = make_target(model_dir)
    data = TokenData(read_sources([text], None, VOCAB))
    head = new_head(target, "last")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    windows = spaced_windows(data.text, 8, SEQ_LEN)
    untrained = evaluate(target, head, windows)
    record = train(target, head, data, TrainConfig(steps=80, batch=8, seq_len=SEQ_LEN, lr=5e-3))
    trained = evaluate(target, head, windows)
    assert trained["kl"] < 0.7 * untrained["kl"] and trained["overlap"] > untrained["overlap"]
    assert record["steps"] == len(record["losses"]) == 80
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("stopped_at", [1, 7])
def test_killed_and_resumed_is_uninterrupted(model_dir, text, tmp_path, stopped_at):
    target = make_target(model_dir)
    config = TrainConfig(steps=12, batch=4, seq_len=SEQ_LEN)
    data = TokenData(read_sources([text], None, VOCAB))
    whole = new_head(target, "last")
    train(target, whole, data, config)

    def interrupt(step, loss):
        if step == stopped_at:
            raise KeyboardInterrupt

    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.raises(KeyboardInterrupt):
        train(target, new_head(target, "last"), data, config, checkpoint, interrupt)
    resumed = new_head(target, "last")
    record = train(target, resumed, data, config, checkpoint)
    assert record["steps"] == len(record["losses"]) == 12
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    refused(lambda: train(target, resumed, data, config.model_copy(update={"lr": 2e-3}), checkpoint), "lr", "0.002")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    refused(lambda: train(target, resumed, data, config, checkpoint), "damaged")


@pytest.mark.usefixtures("in_bfloat16")
def test_interrupted_within_a_step(model_dir, text, tmp_path, monkeypatch):
    """Muon has stepped, AdamW has not: that state must not be what a resumed run starts from."""
    target = make_target(model_dir)
    config = TrainConfig(steps=6, batch=4, seq_len=SEQ_LEN)
    data = TokenData(read_sources([text], None, VOCAB))
    whole = new_head(target, "last")
    train(target, whole, data, config)

    def interrupt(*_):
        raise KeyboardInterrupt

    checkpoint = tmp_path / "checkpoint.pt"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.optim.AdamW, "step", interrupt)
        train(target, new_head(target, "last"), data, config, checkpoint)
    resumed = new_head(target, "last")
    train(target, resumed, data, config, checkpoint)
    assert all(torch.equal(resumed.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(("exit_layer", "first"), [(0, 0), (1, LAYERS - 2)])
def test_layers_that_a_run_starts_from(model_dir, text, tmp_path, exit_layer, first):
    """By default the target's last ones; on the embedding, of which those make nothing, its first ones."""
    head = tmp_path / "head"
    run(make_args(model_dir, text, head, steps=1, lr=1e-9, init=None, exit_layer=exit_layer))
    layers = make_target(model_dir).model.model.layers
    tensors = read_tensors(head)
    for name, layer in (("layer", layers[first]), ("upper.0.layer", layers[first + 1])):
        # Kept in bfloat16.
        torch.testing.assert_close(
            tensors[f"{name}.mlp.up_proj.weight"].float(), layer.mlp.up_proj.weight, rtol=2**-8, atol=1e-6
        )
    record = json.loads((head / "training.json").read_text())
    assert record["settings"]["init"] == ("last" if exit_layer else "exit")


def test_a_head_of_another_exit_layer_is_a_start_and_no_head(model_dir, tmp_path):
    deep, shallow = make_target(model_dir, exit_layer=2), make_target(model_dir, exit_layer=1)
    head = new_head(deep, "last")
    torch.nn.init.normal_(head.deep.inject.weight)
    write_head(tmp_path / "head", head_config(deep, str(model_dir), "deep_context", Prior()), head.state_dict())
    started = new_head(shallow, str(tmp_path / "head"), head_layers=2).state_dict()
    assert all(torch.equal(started[name], tensor) for name, tensor in head.state_dict().items())
    refused(lambda: load_head(shallow, tmp_path / "head"), "exit_layer 2", "loaded for 1")


def test_auxiliary_layers_are_read_and_begin_as_nothing(model_dir, tmp_path):
    """A head goes on with layers it did not read; each has columns of its own, in the order of the layers."""
    target = make_target(model_dir, exit_layer=1)
    more = Target(target.model, 1, [2, 3])
    ids = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    starts = random_block_starts(SEQ_LEN, (0, 0, 1))
    states = target.layer_inputs(ids)
    read, target_hidden, rotary = more(ids)
    assert torch.equal(read, torch.cat([states[1], states[2], states[3]], dim=-1))
    head = new_head(target, "last", head_layers=2)
    torch.nn.init.normal_(head.deep.v_proj.weight, std=0.2, generator=torch.Generator().manual_seed(2))
    write_head(
        tmp_path / "head", head_config(target, str(model_dir), "deep_context", Prior(), None, 2), head.state_dict()
    )
    wide = new_head(more, str(tmp_path / "head"), head_layers=2)
    drafted = head(*target(ids), starts)
    torch.testing.assert_close(wide(read, target_hidden, rotary, starts), drafted, atol=FLOAT32_TOLERANCE, rtol=0)
    size = target.config.hidden_size
    for columns, layer in ((slice(2 * size, 3 * size), 2), (slice(3 * size, None), 3)):
        with torch.no_grad():
            wide.deep.v_proj.weight[:, columns].normal_(generator=torch.Generator().manual_seed(3))
        seen = wide(read, target_hidden, rotary, starts)
        assert not torch.allclose(seen, drafted, atol=1e-2)
        others = torch.cat([states[1], *(states[n] * (n != layer) for n in (2, 3))], dim=-1)
        torch.testing.assert_close(wide(others, target_hidden, rotary, starts), drafted, atol=1e-4, rtol=0)
        with torch.no_grad():
            wide.deep.v_proj.weight[:, columns] = 0
    config = head_config(more, str(model_dir), "deep_context", Prior(), None, 2)
    assert config.aux_layers == [2, 3]
    write_head(tmp_path / "wide", config, wide.state_dict())
    refused(lambda: load_head(target, tmp_path / "wide"), "aux_layers [2, 3]", "loaded for []")
    refused(lambda: new_head(target, str(tmp_path / "wide")), "init", "[2, 3]", "[]")
    assert load_head(more, tmp_path / "wide").deep.v_proj.weight.shape[1] == 4 * size


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_orthogonal_is_the_nearest_orthogonal_matrix_but_for_its_size(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, vt = torch.linalg.svd(orthogonal(matrix, torch.float32), full_matrices=False)
    assert 0.6 < s.min() and s.max() < 1.3
    wanted_u, _, wanted_vt = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(u @ vt, wanted_u @ wanted_vt, atol=1e-3, rtol=0)


def test_muon_is_torchs_in_bfloat16(monkeypatch):
    """It differs from torch.optim.Muon in nothing but what it iterates in, and goes on from that one's state."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(8, 20, generator=generator), torch.randn(3, 8, 20, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.2}
    monkeypatch.setattr(muon, "uses_bfloat16", lambda device: True)
    optimizers = [
        Muon([ours], **options),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options),
    ]
    for gradient in gradients:
        optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_generation_is_the_targets_own(model_dir, text):
    target = make_target(model_dir)
    prompts = spaced_windows(read_sources([text], None, VOCAB), 3, 6)
    windows = continue_windows(target, prompts, 20, torch.tensor([0.0, 0.0, 5.0]), seed=0)
    assert windows.shape == (3, 20) and torch.equal(windows[:, :6], prompts)
    choices = target.model(windows).logits.argmax(-1)[:, 5:-1]
    assert torch.equal(choices[:2], windows[:2, 6:]) and not torch.equal(choices[2], windows[2, 6:])


def test_generated_windows_are_made_once(model_dir, text, tmp_path, monkeypatch):
    from vllm_eesd.distill import generate

    monkeypatch.setattr(generate, "BATCH", 4)
    target, sources = make_target(model_dir), read_sources([text], None, VOCAB)

    transformers = partial(continue_windows, target)

    def make(temperature=(1.0, 0.7), generator="transformers", continue_batch=transformers):
        own = OwnText(tmp_path, target, 10, SEQ_LEN, list(temperature), seed=0)
        own.make(sources, generator, continue_batch)
        return np.array(own.windows())

    whole = make()
    assert whole.shape == (10, SEQ_LEN) and whole.max() < VOCAB
    path = tmp_path / "generated.bin"
    path.write_bytes(path.read_bytes()[: 5 * SEQ_LEN * 2])  # killed within the second batch
    assert np.array_equal(make(), whole)
    assert np.array_equal(make(continue_batch=None), whole)
    refused(lambda: make(temperature=[0.5]), "generated.bin", "remove")
    refused(lambda: make(generator="vllm"), "generated.bin", "remove")
    batch = TokenData(sources, whole).batch_at(3, 8, SEQ_LEN, seed=0)
    own = {tuple(row) for row in whole.tolist()}
    assert [tuple(row) in own for row in batch.tolist()] == [False] * 4 + [True] * 4


@pytest.mark.usefixtures("in_bfloat16")
def test_run_writes_a_head_that_loads(model_dir, text, tmp_path, capsys):
    head = tmp_path / "head"
    args = make_args(
        model_dir, text, head, work=str(tmp_path / "work"), json=str(tmp_path / "out.json"), self_generate=4
    )
    assert run(args) == 0
    config, tensors = ExitHeadConfig.load(head), read_tensors(head)
    config.check_target(LlamaConfig.from_pretrained(model_dir))
    assert (config.exit_layer, config.head_type, config.head_layers, len(tensors)) == (1, "deep_context", 2, 24)
    assert config.aux_layers == [2, 3]  # half and three quarters; a quarter is the exit layer
    assert config.prior.alpha + config.prior.beta == pytest.approx(10)
    assert config.verifier.name_or_path == model_dir.name
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["steps"] == 12 and set(record["after"]) == {"text", "greedy"}
    assert record["after"]["text"]["kl"] < record["before"]["text"]["kl"]
    out = capsys.readouterr().out
    assert f'vllm serve {model_dir} --speculative-config \'{{"method": "eesd", "model": "{head}"}}\'' in out
    assert f"eesd calibrate {model_dir} {head} --data HELD_OUT" in out
    used = re.search(r"text: (\d+) tokens to train on, (\d+) held out", out).groups()
    assert sum(map(int, used)) == text.stat().st_size // 2
    told = json.loads((head / "training.json").read_text())
    assert shlex.split(told["command"])[:3] == ["eesd", "distill", str(model_dir)]
    parsed = cli.build_parser().parse_args(shlex.split(told["command"])[1:])
    assert told["settings"] == _config(parsed).model_dump(by_alias=True) | {"head_layers": 2}
    assert told["settings"]["lr"] == 3e-3 and told["settings"]["seed"] == 0
    assert (told["steps"], told["loss"][-1][0], told["after"]) == (12, 12, record["after"])
    assert [told["data"][kind]["tokens"] for kind in ("text", "held_out", "own")] == [*map(int, used), 4 * SEQ_LEN]
    ids = np.fromfile(text, dtype=np.uint16)[: int(used[0])].astype("<u4")
    assert told["data"]["text"]["sha256"] == hashlib.sha256(ids.tobytes()).hexdigest()
    # The finished run resumes at its end: the same head again.
    assert run(args) == 0
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(head).items())


@pytest.mark.usefixtures("in_bfloat16")
def test_layers_of_the_head_by_default(model_dir, text, tmp_path):
    """Two where it has deep context, one elsewhere; a head that goes on keeps its own."""
    one, plain, goes_on = tmp_path / "one", tmp_path / "plain", tmp_path / "goes_on"
    run(make_args(model_dir, text, one, steps=1, head_layers=1))
    run(make_args(model_dir, text, plain, steps=1, head_type="transformer"))
    run(make_args(model_dir, text, goes_on, steps=1, init=str(one)))
    assert [ExitHeadConfig.load(head).head_layers for head in (one, plain, goes_on)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere"}, ("model", "/nowhere")),
        ({"exit_layer": 0, "head_type": "transformer"}, ("exit_layer", "is 0", "1 to 3")),
        ({"exit_layer": -1}, ("exit_layer", "is -1", "0 to 3")),
        ({"exit_layer": LAYERS}, ("exit_layer", "is 4", "0 to 3")),
        ({"head_layers": 2, "head_type": "transformer"}, ("head_layers", "is 2", "1", "transformer")),
        ({"head_layers": LAYERS + 1}, ("head_layers", "is 5", "1 to 4")),
        ({"aux_layers": [2], "head_type": "transformer"}, ("aux_layers", "[2]", "empty", "transformer")),
        ({"aux_layers": [1]}, ("aux_layers", "[1]", "without exit_layer")),
        ({"data": ["/nowhere.bin"]}, ("data", "/nowhere.bin")),
        ({"seq_len": 3_000}, ("seq_len", "128")),
        ({"steps": 0}, ("steps", "0")),
        ({"lr": -1.0}, ("lr", "-1")),
        ({"self_generate": -1}, ("self_generate", "-1")),
        ({"self_generate": 1, "temperature": [1.0, -1.0]}, ("temperature", "-1")),
    ],
)
def test_bad_arguments(model_dir, text, tmp_path, changes, words):
    refused(lambda: run(make_args(model_dir, text, tmp_path / "head", **changes)), *words)
    assert not (tmp_path / "head").exists()


def test_pickled_weights_are_not_loaded(model_dir, text, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    refused(lambda: run(make_args(pickled, text, tmp_path / "head")), "model", "no safetensors", "never loaded")


def test_output_never_replaces_a_model(model_dir, text):
    refused(lambda: run(make_args(model_dir, text, model_dir)), "another model", "eesd")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.bin", b"", ("empty",)),
        ("a.bin", b"\x01", ("whole number",)),
        ("a.bin", b"\xff\xff" * 200, ("65535", "64")),
        ("a.bin", b"\x01\x00" * 40, ("40 tokens", "64")),
        ("a.py", b"\xff\xfe", ("not UTF-8",)),
        ("a.txt", "text".encode("utf-16-le"), ("not text", "NUL")),
        ("a.jsonl", b'{"text": "1"}\n{', ("line 2", "not JSON")),
        ("a.jsonl", b'{"words": 1}', ("line 1", "text")),
    ],
)
def test_bad_data(model_dir, tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr("vllm_eesd.distill.text.AutoTokenizer.from_pretrained", lambda _: ByteTokenizer())
    (tmp_path / name).write_bytes(content)
    refused(
        lambda: run(make_args(model_dir, tmp_path / name, tmp_path / "head")),
        name if "tokens" not in words[0] else "",
        *words,
    )


class ByteTokenizer:
    eos_token_id = 0

    def __init__(self):
        self.longest = 0

    def __call__(self, text, add_special_tokens):
        self.longest = max(self.longest, len(text))
        return {"input_ids": list(text.encode())}


def test_text_files_are_tokenised(tmp_path):
    (tmp_path / "a.py").write_text("ab")
    (tmp_path / "b.jsonl").write_text('{"text": "c"}\n\n{"prompt": "d"}\n')
    python, lines = read_sources([tmp_path / "a.py", tmp_path / "b.jsonl"], ByteTokenizer(), 256)
    assert np.asarray(python).tolist() == [97, 98, 0] and np.asarray(lines).tolist() == [99, 0, 100, 0]


def test_a_file_named_twice_counts_twice(tmp_path):
    (tmp_path / "a.py").write_text("ab")
    (twice,) = read_sources([tmp_path / "a.py"] * 2, ByteTokenizer(), 256, at_least=6)
    assert np.asarray(twice).tolist() == [97, 98, 0] * 2


def open_files():
    """(number, file) of every file this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_short_texts_are_joined_and_none_is_lost(tmp_path):
    """A folder of source files: few of them hold a window, together they hold many, in one open file."""
    names = [tmp_path / f"{number:03}.py" for number in range(500)]
    for number, name in enumerate(names):
        name.write_text("ab" if number != 100 else "c" * 700)
    before = open_files()  # others may be closed meanwhile: garbage is collected when it likes
    sources = read_sources(names, ByteTokenizer(), 256, at_least=tokens_to_split(SEQ_LEN))
    assert len(open_files() - before) == 1
    ab, c = [97, 98, 0], [*b"c" * 700, 0]
    assert [np.asarray(tokens).tolist() for tokens in sources] == [ab * 100 + c, ab * 399]
    train, held_out = split_held_out(sources, SEQ_LEN)
    assert sum(map(len, train + held_out)) == sum(map(len, sources))
    assert sum(map(len, held_out)) <= 0.06 * sum(map(len, sources))


def write_rounds(path: Path, emitted: list[tuple[str, list[int]]]) -> Path:
    """Write a server's trace of rounds without drafts but what was accepted."""
    header = {"format": "eesd-rounds", "version": 1}
    same = {"at_s": 0.0, "copied": False, "batch": 1, "draft_steps_ms": [], "draft_rest_ms": 0.0, "verify_ms": 1.0}
    same |= {"plain_ms": 1.0, "draft_step_ms": 0.1, "posterior_mean": 0.5, "posterior_interval": [0.1, 0.9]}
    rounds = [
        {"request": request, "draft": ids[:-1], "confidences": [0.5] * (len(ids) - 1), "accepted": len(ids) - 1}
        | {"emitted": ids}
        | same
        for request, ids in emitted
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *rounds]))
    return path


def test_texts_of_traces_are_put_together(tmp_path):
    """Rounds of requests that ran side by side, one of which ended its text, and a dense trace, which knows prompts."""
    rounds = [("a", [5, 6]), ("b", [9]), ("a", [7]), ("b", [8, END])]
    served = write_rounds(tmp_path / "served.jsonl", rounds)
    header = {"format": "eesd-trace", "version": 2, "model": "m", "workload": "w", "num_speculative_tokens": 1}
    header |= {"prior": [6.0, 4.0], "costs": {}}
    request = {"matches": [1], "confidences": [500], "prompt": [1, 2], "emitted": [3, 4]}
    dense = tmp_path / "dense.jsonl"
    dense.write_text(json.dumps(header) + "\n" + json.dumps(request) + "\n")
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=END)
    first, second = read_traces(config, [served, dense], at_least=1)
    assert np.asarray(first).tolist() == [5, 6, 7, END, 9, 8, END] and np.asarray(second).tolist() == [1, 2, 3, 4, END]
    (both,) = read_traces(config, [served, dense], at_least=10)
    assert len(both) == len(first) + len(second)
    refused(lambda: read_traces(config, [tmp_path / "none"], 1), "from_trace", "none", "No such file")
    write_rounds(served, [])
    refused(lambda: read_traces(config, [served], 1), "from_trace", "served.jsonl", "no request's text")
    write_rounds(served, [("a", [VOCAB])])
    refused(lambda: read_traces(config, [served], 1), "served.jsonl", str(VOCAB))


@pytest.mark.usefixtures("in_bfloat16")
def test_a_head_learns_from_what_was_served(model_dir, text, tmp_path, capsys):
    """From a head that text was trained on, with no other data than a trace; without text of any kind it is refused."""
    assert run(make_args(model_dir, text, tmp_path / "before")) == 0
    target = make_target(model_dir)
    prompts = torch.randint(0, VOCAB, (40, 4), generator=torch.Generator().manual_seed(1))
    texts = continue_windows(target, prompts, SEQ_LEN, torch.zeros(40), seed=0)[:, 4:].tolist()
    served = write_rounds(tmp_path / "served.jsonl", [(str(number), ids) for number, ids in enumerate(texts)])
    learning = {"data": [], "from_trace": [str(served)], "init": str(tmp_path / "before"), "seq_len": 16}
    record = str(tmp_path / "out.json")
    assert run(make_args(model_dir, text, tmp_path / "after", **learning, json=record)) == 0
    measured = json.loads(Path(record).read_text())
    assert measured["after"]["text"]["kl"] < measured["before"]["text"]["kl"]
    refused(lambda: run(make_args(model_dir, text, tmp_path / "x", **learning | {"from_trace": []})), "from_trace")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin"])
def test_a_file_that_may_not_be_read(tmp_path, monkeypatch, name):
    """Not the temporary directory's fault. Tests may run as root, who may read everything: the refusal is planted."""
    (tmp_path / name).write_text("ab")

    def refusing(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refusing)
    refused(lambda: read_sources([tmp_path / name], ByteTokenizer(), 256), name, "cannot be read (Permission denied)")


def test_a_source_without_a_window_is_named(tmp_path):
    np.ones(10, dtype=np.uint16).tofile(tmp_path / "short.bin")
    np.ones(100, dtype=np.uint16).tofile(tmp_path / "long.bin")
    (tmp_path / "a.txt").write_text("abc")
    short = read_sources([tmp_path / "long.bin", tmp_path / "short.bin"], None, VOCAB)
    refused(lambda: split_held_out(short, SEQ_LEN), "data", "short.bin", "10 tokens", str(2 * SEQ_LEN))
    text = read_sources([tmp_path / "long.bin", tmp_path / "a.txt"], ByteTokenizer(), 256, at_least=SEQ_LEN)
    refused(lambda: long_enough(text, SEQ_LEN, "text"), "text", "all texts together", "4 tokens", str(SEQ_LEN))


def test_directories_and_data_sets(tmp_path, monkeypatch):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".venv" / "lib").mkdir(parents=True)
    for name in ("a.txt", "b/c/d.jsonl", "empty.txt", "weights.bin", "image.png", ".venv/lib/e.py", ".f.txt"):
        (tmp_path / name).write_text("" if name == "empty.txt" else "{}")
    found = [tmp_path / "a.txt", tmp_path / "b" / "c" / "d.jsonl"]
    assert text_files(tmp_path) == found
    assert text_files(tmp_path / "weights.bin") == [tmp_path / "weights.bin"]
    asked = []

    def download(name, repo_type, allow_patterns):
        asked.append((name, repo_type))
        assert "*.jsonl" in allow_patterns and not any("bin" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("vllm_eesd.distill.text.snapshot_download", download)
    assert text_files("org/data") == found and asked == [("org/data", "dataset")]
    monkeypatch.setattr("vllm_eesd.distill.text.snapshot_download", None)
    refused(lambda: text_files("org/data"), "data: org/data", "neither a file nor an available data set")
    (tmp_path / "none").mkdir()
    refused(lambda: text_files(tmp_path / "none"), "no text", ".jsonl")


def test_a_long_text_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_eesd.distill.data.PIECE_CHARS", 100)
    content = "".join(f"line {number}\n" for number in range(200))
    (tmp_path / "a.txt").write_text(content)
    tokenizer = ByteTokenizer()
    (tokens,) = read_sources([tmp_path / "a.txt"], tokenizer, 256)
    assert np.asarray(tokens).tolist() == [*content.encode(), 0]
    assert tokenizer.longest < 120


def test_token_files_are_mapped_and_checked_in_pieces(tmp_path, monkeypatch):
    ids = np.random.default_rng(0).integers(0, VOCAB, 5_000).astype(np.uint16)
    ids.tofile(tmp_path / "a.bin")
    read, fromfile = [], np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda file, dtype, count: read.append(count) or fromfile(file, dtype, count))
    monkeypatch.setattr("vllm_eesd.distill.data.CHUNK_TOKENS", 1_000)
    (tokens,) = read_sources([tmp_path / "a.bin"], None, VOCAB)
    assert read == [1_000] * 6  # the range check; the last one finds the end
    train_part, held_out = tokens[:-500], tokens[-500:]
    assert all(isinstance(part, np.memmap) and not part.flags.owndata for part in (train_part, held_out))
    assert np.array_equal(train_part[10:20], ids[10:20]) and np.array_equal(held_out[3:9], ids[4_503:4_509])
    batches = [TokenData([source]).batch_at(3, 4, SEQ_LEN, seed=1) for source in (tokens, ids)]
    assert torch.equal(*batches)
