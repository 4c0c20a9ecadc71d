"""A head that drafts from the most frequent tokens only: which they are, what it learns, what is measured."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch

from vllm_eesd.distill import losses, vocabulary
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.model import load_head, new_head
from vllm_eesd.distill.run import run
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.train import TrainConfig, train
from vllm_eesd.distill.vocabulary import end_tokens, most_frequent, restrict, token_shares
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, read_tensors
from vllm_eesd.exit_head.draft_vocabulary import token_ids_of

VOCAB, LAYERS, SEQ_LEN, SIZE = 64, 4, 32, 24
FLOAT32_TOLERANCE = 1e-5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def eos_token_id():
    return 61


@pytest.fixture
def text(tmp_path):
    """Low ids are frequent; the end of a text, 61, never occurs."""
    ids = np.random.default_rng(0).geometric(0.1, 4_000).clip(max=50).astype(np.uint16)
    ids.tofile(tmp_path / "text.bin")
    return tmp_path / "text.bin"


def make_args(model_dir, text, output, **changes) -> Namespace:
    given = {"model": str(model_dir), "exit_layer": 1, "data": [str(text)], "output": str(output), "steps": 8}
    given |= {"minutes": None, "batch": 4, "seq_len": SEQ_LEN, "lr": 3e-3, "work": None, "json": None}
    return Namespace(**(given | {"draft_vocab": SIZE} | changes))


def test_tokens_count_as_often_as_they_are_trained_on(monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK_TOKENS", 3)
    text = [np.array([0, 0, 0, 1, 2], dtype=np.uint16), np.array([0, 1, 1], dtype=np.uint16)]
    assert token_shares(TokenData(text), 5).tolist() == [4 / 8, 3 / 8, 1 / 8, 0, 0]
    own = np.array([[4, 4, 4, 1], [4, 4, 4, 1]], dtype=np.uint16)  # half of every batch, however few
    assert token_shares(TokenData(text, own), 5).tolist() == [4 / 16, 5 / 16, 1 / 16, 0, 6 / 16]


def test_the_most_frequent_tokens_and_the_end_of_a_text():
    shares = np.array([0.1, 0.4, 0.1, 0.1, 0.3, 0.0])
    assert most_frequent(shares, 3, []).tolist() == [0, 1, 4]  # of equally frequent ones the lower id
    assert most_frequent(shares, 3, [5]).tolist() == [1, 4, 5]
    for size in (6, 7, 0):
        with pytest.raises(ValueError, match=f"draft_vocab is {size}, must be 1 to 5: the target has 6 tokens"):
            most_frequent(shares, size, [5])
    assert end_tokens(Namespace(eos_token_id=3, vocab_size=4)) == [3]
    assert end_tokens(Namespace(eos_token_id=[1, 4], vocab_size=4)) == [1]
    assert end_tokens(Namespace(eos_token_id=None, vocab_size=4)) == []


def test_a_cloned_last_layer_is_the_target_within_its_vocabulary(model_dir):
    target = load_target(str(model_dir), LAYERS - 1, "cpu")
    head = new_head(target, "last", "transformer")
    token_ids = torch.arange(0, VOCAB, 3)
    restrict(head, token_ids)
    windows = torch.randint(VOCAB, (4, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        p = target.model(windows).logits.softmax(-1)
    measured = evaluate(target, head, windows)
    assert measured["agreement"] == pytest.approx(torch.isin(p.argmax(-1), token_ids).double().mean().item())
    assert 0.1 < measured["agreement"] < 0.9
    # q is p within the draft vocabulary, larger everywhere there: min(p, q) is p.
    assert measured["overlap"] == pytest.approx(p[..., token_ids].sum(-1).mean().item(), abs=FLOAT32_TOLERANCE)
    assert abs(measured["kl"]) < FLOAT32_TOLERANCE


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("loss", [name for name in losses.LOSS_NAMES if name != "ce_text"])
def test_every_loss_trains_within_the_vocabulary(model_dir, text, loss):
    target = load_target(str(model_dir), 1, "cpu")
    data, head = TokenData([np.fromfile(text, dtype=np.uint16)]), new_head(target, "last")
    restrict(head, torch.arange(0, VOCAB, 2))
    record = train(target, head, data, TrainConfig(steps=60, batch=4, seq_len=SEQ_LEN, lr=1e-2, loss=loss))
    assert sum(record["losses"][-5:]) < 0.9 * sum(record["losses"][:5])


@pytest.mark.usefixtures("in_bfloat16")
def test_run_writes_the_vocabulary(model_dir, text, tmp_path, capsys):
    head, again = tmp_path / "head", tmp_path / "again"
    assert run(make_args(model_dir, text, head, work=str(tmp_path / "work"))) == 0
    assert ExitHeadConfig.load(head).draft_vocab_size == SIZE
    token_ids = token_ids_of(read_tensors(head)["d2t"])
    shares = token_shares(TokenData([np.fromfile(text, dtype=np.uint16)[:-200]]), VOCAB)
    assert torch.equal(token_ids, most_frequent(shares, SIZE, [61])) and 61 in token_ids
    assert f"drafts from {SIZE} of {VOCAB} tokens, " in capsys.readouterr().out
    target = load_target(str(model_dir), 1, "cpu", ExitHeadConfig.load(head).aux_layers)
    assert torch.equal(load_head(target, head).d2t, read_tensors(head)["d2t"])
    # The finished run resumes at its end; a head to start from leaves its vocabulary behind.
    assert run(make_args(model_dir, text, again, work=str(tmp_path / "work"))) == 0
    assert (again / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert run(make_args(model_dir, text, again, init=str(head), draft_vocab="all")) == 0
    assert ExitHeadConfig.load(again).draft_vocab_size is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab": VOCAB}, "draft_vocab is 64, must be 1 to 63"),
        ({"draft_vocab": 0}, "draft_vocab: .* 1 .*got 0"),
        ({"loss": "ce_text"}, "loss is 'ce_text', must be another one with draft_vocab"),
    ],
)
def test_what_cannot_be_is_refused(model_dir, text, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        run(make_args(model_dir, text, tmp_path / "head", **changes))
    assert "\n" not in str(caught.value) and not (tmp_path / "head").exists()
