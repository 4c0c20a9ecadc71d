"""Whole conversations as batches, and the target's states of them kept on disk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_target import VOCAB

from vllm_eesd.conversations import Conversation
from vllm_eesd.distill import train as train_module
from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.model import new_head
from vllm_eesd.distill.rows import LENGTH_STEP, Batches, Rows
from vllm_eesd.distill.states import KeptStates, fits
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.train import train

LENGTHS = (5, 20, 31, 40, 40, 64, 65, 90)
#: bfloat16 keeps 8 bits of a number: what is kept differs by half of the last one at most.
BFLOAT16_TOLERANCE = 2**-8

pytestmark = pytest.mark.usefixtures("one_thread")


def make_target(model_dir, exit_layer=1):
    return load_target(str(model_dir), exit_layer, "cpu")


def some(lengths=LENGTHS, seed=0):
    """Conversations whose first half a user wrote."""
    rng = np.random.default_rng(seed)
    return [Conversation(rng.integers(1, VOCAB, n), np.arange(n) >= n // 2) for n in lengths]


def test_every_epoch_has_every_conversation_once():
    rows = Rows(some(), 512, answers_only=True)
    steps = rows.steps_per_epoch(128)
    epochs = [[rows.batch_at(epoch * steps + i, 128, seed=3) for i in range(steps)] for epoch in range(2)]
    for batches in epochs:
        assert sorted(np.concatenate([batch.rows for batch in batches])) == list(range(len(LENGTHS)))
        assert all(batch.ids.numel() <= 128 and batch.ids.shape[1] % LENGTH_STEP == 0 for batch in batches)
        assert sum(batch.num_tokens for batch in batches) == sum(LENGTHS)
    orders = [[batch.rows.tolist() for batch in batches] for batches in epochs]
    assert orders[0] != orders[1]
    assert orders[0] == [rows.batch_at(i, 128, seed=3).rows.tolist() for i in range(steps)]


def test_what_counts_is_the_prediction_of_answers():
    (one,) = some([40])
    batch = Rows([one], 512, answers_only=True).batch_of(np.array([0]))
    assert batch.ids[0, :40].tolist() == one.ids.tolist() and not batch.ids[0, 40:].any()
    # Token 20 is the first of the answer: it is predicted at 19; what follows token 39 is not known.
    assert batch.weights[0].nonzero().flatten().tolist() == list(range(19, 39))
    everything = Rows([one], 512, answers_only=False).batch_of(np.array([0]))
    assert everything.weights[0].nonzero().flatten().tolist() == list(range(39))
    cut = Rows([one], 24, answers_only=True).batch_of(np.array([0]))
    assert cut.weights[0].nonzero().flatten().tolist() == list(range(19, 23))


def test_conversations_without_an_answer_are_left_out():
    silent = Conversation(np.arange(1, 30), np.zeros(29, dtype=bool))
    rows = Rows([silent, *some([10])], 512, answers_only=True)
    assert rows.batch_at(0, 512, seed=0).rows.tolist() == [1]
    with pytest.raises(ValueError, match=r"^data: no conversation has an answer within its first 8 tokens"):
        Rows([silent], 8, answers_only=True)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("num_processes", "num_parts"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 2)])
def test_a_batch_is_shared_out_whole(num_rows, num_processes, num_parts):
    """The last batch of an epoch may have fewer rows than there are processes: each still computes as many parts."""
    rows = Rows(some(LENGTHS[:num_rows]), 512, answers_only=True)
    batch = rows.batch_of(np.arange(num_rows))
    shares = [batch.shares(rank, num_processes, num_parts) for rank in range(num_processes)]
    assert len({len(own) for own in shares}) == 1 and len(shares[0]) <= num_parts
    counted = [(part, share) for own in shares for part, share in own if share]
    assert sorted(np.concatenate([part.rows for part, _ in counted])) == list(range(num_rows))
    for part, share in counted:
        assert share == pytest.approx(num_processes * float(part.weights.sum()) / float(batch.weights.sum()))
    assert all(len(part.ids) for own in shares for part, _ in own)


def test_a_process_without_a_row_has_a_gradient_of_zero(in_bfloat16, model_dir, monkeypatch):
    """All processes average gradients together."""
    target, data = make_target(model_dir), TokenData([], None, some([64, 64, 64]))
    config = TrainConfig(steps=2, batch=2, seq_len=64, seed=0, accumulate=1)
    heads, averaged = [new_head(target, "last") for _ in range(2)], []
    monkeypatch.setattr(train_module, "reduce", lambda tensor: averaged.append(tensor.abs().max().item()) or tensor)
    for rank, head in enumerate(heads):
        state = SimpleNamespace(num_processes=2, process_index=rank, is_main_process=False, wait_for_everyone=int)
        monkeypatch.setattr(train_module, "PartialState", lambda state=state: state)
        train(target, head, data, config)
    # Of each process the largest gradient, or loss, of either step.
    largest = np.array(averaged).reshape(2, 2, -1).max(-1)
    assert [largest[0].min() > 0, largest[1].min()] == [True, 0.0]


def test_text_and_conversations_take_turns_by_their_sizes():
    conversations = some([100] * 3)
    data = TokenData([np.arange(900, dtype=np.uint16) % VOCAB], None, conversations)
    batches = Batches(data, TrainConfig(steps=1, batch=2, seq_len=128))
    kinds = [batches.at(step).rows is None for step in range(100)]
    assert kinds.count(True) == 75 and kinds[:8].count(True) == 6


def states_of(target, batch):
    with torch.no_grad():
        return target(batch.ids)


def test_kept_states_are_the_targets_and_it_runs_once(model_dir, tmp_path, monkeypatch):
    target = make_target(model_dir)
    target.aux_layers = [target.exit_layer + 1]
    rows, ran = Rows(some(), 512, answers_only=True), []
    forward = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda self, ids: ran.append(len(ids)) or forward(self, ids))
    kept = KeptStates(tmp_path, target, rows)
    batches = [rows.batch_at(step, 128, seed=0) for step in range(2 * rows.steps_per_epoch(128))]
    with torch.no_grad():
        found = [kept(batch) for batch in batches]
    assert sum(ran) == len(LENGTHS)
    for batch, (exit_hidden, output, rotary) in zip(batches, found, strict=True):
        wanted = states_of(target, batch)
        for row, index in enumerate(batch.rows):
            real = slice(0, LENGTHS[index])
            for state, exact in zip((exit_hidden, output), wanted[:2], strict=True):
                torch.testing.assert_close(
                    state[row, real].float(), exact[row, real], rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE
                )
                assert not state[row, LENGTHS[index] :].any()
        torch.testing.assert_close(rotary[0].float(), wanted[2][0], rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE)
    ran.clear()
    KeptStates(tmp_path, target, rows)(batches[0])
    assert not ran, "a run that goes on finds them"
    next(tmp_path.glob("states-*.bin")).unlink()
    KeptStates(tmp_path, target, rows)(batches[0])
    assert ran, "where the file is gone nothing is known of it"
    ran.clear()
    target.exit_layer -= 1
    KeptStates(tmp_path, target, rows)(batches[0])
    assert ran and len(list(tmp_path.glob("states-*.bin"))) == 1, "those of another exit layer are others"


def test_states_are_kept_where_the_disk_has_room(in_bfloat16, model_dir, tmp_path, monkeypatch):
    target, data = make_target(model_dir), TokenData([], None, some([48] * 4))
    config = TrainConfig(steps=3, batch=2, seq_len=64)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    train(target, new_head(target, "last"), data, config, tmp_path / "c.pt")
    assert not list(tmp_path.glob("states-*"))
    (tmp_path / "states-old.bin").write_bytes(b"x" * 8192)
    assert fits(tmp_path, 8192) and not fits(tmp_path, 1 << 20)


def test_a_head_learns_answers_with_and_without_kept_states(in_bfloat16, model_dir, tmp_path):
    target, conversations = make_target(model_dir), some([48] * 8)
    losses = []
    for keep in (0, 1):
        head = new_head(target, "last")
        config = TrainConfig(steps=40, batch=4, seq_len=64, lr=1e-2, keep_states=keep)
        record = train(target, head, TokenData([], None, conversations), config, tmp_path / str(keep) / "c.pt")
        losses.append(record["losses"])
        assert record["tokens"] == 40 * 4 * 48
    assert losses[0][-1] < 0.7 * losses[0][0]
    # The same batches; kept states are rounded to bfloat16.
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.05) and losses[1][-1] < 0.7 * losses[1][0]
    assert not list((tmp_path / "0").glob("states-*")) and list((tmp_path / "1").glob("states-*.bin"))


def test_what_is_measured_of_conversations_are_answers(model_dir):
    target = make_target(model_dir)
    rows = Rows(some([40, 50]), 512, answers_only=True)
    whole = target.config.num_hidden_layers - 1
    clone = make_target(model_dir, whole)
    measured = evaluate(clone, new_head(clone, "last", "transformer"), [rows.batch_of(np.array([i])) for i in (0, 1)])
    assert measured["agreement"] == 1.0 and measured["expected_matches"] == pytest.approx(8.0)
    assert 0 < evaluate(target, new_head(target, "last", "transformer"), [rows.batch_of(np.array([0]))])["overlap"] < 1
