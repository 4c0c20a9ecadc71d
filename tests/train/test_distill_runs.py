"""Whole `eesd distill` runs: killed ones, ones that share the work, and ones that could not end well."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_eesd.distill import generate, report
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.model import new_head
from vllm_eesd.distill.run import check_batch, run
from vllm_eesd.distill.target import load_target
from vllm_eesd.distill.train import TrainConfig, train
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig

VOCAB, LAYERS, SEQ_LEN = 64, 4, 32
# The same sums in another order; Muon's iterations enlarge what AdamW would leave alone.
SUM_TOLERANCE = 1e-3
# The command itself, saving its state after every step so that a kill finds something to resume from, and interrupted
# after the step that the environment names.
COMMAND = """
import os, sys, torch
from vllm_eesd import cli
from vllm_eesd.distill import train
torch.set_num_threads(1)
train.SAVE_EVERY_S = 0
last, show = int(os.environ.get("LAST_STEP", 0)), train._show
def interrupted(progress, losses):
    show(progress, losses)
    if len(losses) == last:
        raise KeyboardInterrupt
train._show = interrupted
sys.exit(cli.main(sys.argv[1:]))
"""
# Two processes on a CPU: with --cpu accelerate starts one, whatever --num_processes says.
LAUNCH_TWO = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH_TWO += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


pytestmark = pytest.mark.usefixtures("one_thread")


def make_args(model_dir, text, output, **changes) -> Namespace:
    given = {"model": str(model_dir), "exit_layer": 1, "data": [str(text)], "output": str(output), "steps": 6}
    given |= {"minutes": None, "batch": 4, "seq_len": SEQ_LEN, "lr": 3e-3, "work": None, "json": None}
    return Namespace(**(given | changes))


def command_line(model_dir, text, output, work, *more) -> list[str]:
    words = ["distill", model_dir, "--exit-layer", 1, "--data", text, "-o", output, "--work", work, "--steps", 60]
    words += ["--batch", 4, "--seq-len", SEQ_LEN, "--lr", 0.003, "--self-generate", 4, "--generator", "transformers"]
    words += more
    return [str(word) for word in words]


def start(arguments, program=("-c", COMMAND), **environment) -> subprocess.Popen:
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} | environment
    return subprocess.Popen(
        [sys.executable, *program, *arguments], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process, interrupted=False) -> str:
    output = process.communicate(timeout=300)[0].decode()
    assert (process.returncode != 0) is interrupted, output
    return output


def kill_at_a_random_moment(process, checkpoint) -> None:
    """SIGKILL between the first checkpoint and about the run's end."""
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(os.getpid()).uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_sigkill_and_resume_give_the_same_bytes(model_dir, text, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(command_line(model_dir, text, whole, tmp_path / "work_whole")))
    work = tmp_path / "work_killed"
    process = start(command_line(model_dir, text, killed, work))
    kill_at_a_random_moment(process, work / "checkpoint.pt")
    assert process.returncode == -signal.SIGKILL and not killed.exists()
    step = torch.load(work / "checkpoint.pt", weights_only=True)["run"]["step"]
    assert 1 <= step < 60
    finish(start(command_line(model_dir, text, killed, work)))
    for name in ("model.safetensors", "config.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), f"{name}, killed after step {step}"


@pytest.mark.usefixtures("in_bfloat16")
def test_parts_of_a_step_change_nothing_but_memory(model_dir, text):
    target, data = load_target(str(model_dir), 1, "cpu"), TokenData([np.fromfile(text, dtype=np.uint16)])
    heads, sizes = [], []
    forward = type(target).forward
    for accumulate in (1, 4):
        sizes.append(set())
        type(target).forward = lambda self, ids: sizes[-1].add(len(ids)) or forward(self, ids)
        heads.append(new_head(target, "last"))
        try:
            train(target, heads[-1], data, TrainConfig(steps=4, batch=8, seq_len=SEQ_LEN, accumulate=accumulate))
        finally:
            type(target).forward = forward
    assert sizes == [{8}, {2}]
    for name, tensor in heads[0].state_dict().items():
        torch.testing.assert_close(heads[1].state_dict()[name], tensor, atol=SUM_TOLERANCE, rtol=SUM_TOLERANCE)


@pytest.fixture(scope="module")
def one_process(model_dir, tmp_path_factory):
    """Directory of a text, and of the head that one process made of it."""
    directory = tmp_path_factory.mktemp("one_process")
    np.random.default_rng(0).integers(0, VOCAB, 4_000).astype(np.uint16).tofile(directory / "text.bin")
    finish(start(command_line(model_dir, directory / "text.bin", directory / "head", directory / "work")))
    return directory


def assert_same_head(model_dir, one, two) -> None:
    """Nearly: the same sums in another order."""
    one, two, config = *(load_file(head / "model.safetensors") for head in (one, two)), ExitHeadConfig.load(one)
    moved, tolerance = 0.0, 10 * SUM_TOLERANCE
    target = load_target(str(model_dir), 1, "cpu", config.aux_layers)
    initial = new_head(target, "last", config.head_type, config.head_layers).state_dict()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=tolerance, rtol=tolerance)
        moved = max(moved, (tensor - initial[name]).abs().max().item())
    assert moved > 2 * tolerance  # the heads agree because both trained, not because neither did


def test_two_processes_train_what_one_does(model_dir, one_process, tmp_path):
    arguments = command_line(model_dir, one_process / "text.bin", tmp_path / "two", tmp_path / "work")
    output = finish(start(arguments, [*LAUNCH_TWO, "-m", "vllm_eesd"]))
    assert output.count("next: ") == output.count("wrote ") == 1
    assert_same_head(model_dir, one_process / "head", tmp_path / "two")


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_resumed_run_may_have_another_number_of_processes(model_dir, one_process, tmp_path, before, after):
    (tmp_path / "command.py").write_text(COMMAND)
    programs = {1: [tmp_path / "command.py"], 2: [*LAUNCH_TWO, tmp_path / "command.py"]}
    arguments = command_line(model_dir, one_process / "text.bin", tmp_path / "head", tmp_path / "work")
    finish(start(arguments, programs[before], LAST_STEP="20"), interrupted=True)
    assert torch.load(tmp_path / "work" / "checkpoint.pt", weights_only=True)["run"]["step"] == 20
    finish(start(arguments, programs[after]))
    assert torch.load(tmp_path / "work" / "checkpoint.pt", weights_only=True)["run"]["step"] == 60
    assert_same_head(model_dir, one_process / "head", tmp_path / "head")


@pytest.mark.usefixtures("in_bfloat16")
def test_layers_that_stay_in_host_memory_change_nothing(model_dir, text, tmp_path, monkeypatch, capsys):
    """The target writes text, is measured on and trained with, while there is room for half of its layers."""
    sizes = {name: tensor.nbytes for name, tensor in load_file(model_dir / "model.safetensors").items()}
    one_less = sum(size for name, size in sizes.items() if ".layers.0." not in name)  # one's room is for what is copied
    for name, room in (("whole", float("inf")), ("half", one_less)):
        monkeypatch.setattr("vllm_eesd.distill.run.room_for_weights", lambda *_, room=room: room)
        run(make_args(model_dir, text, tmp_path / name, self_generate=4, generator="transformers"))
    assert capsys.readouterr().out.count("2 of the target's 4 layers stay in host memory until they run") == 1
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_batch_that_cannot_be_shared_out_evenly():
    with pytest.raises(ValueError, match=r"batch is 12, must be a multiple of 24 \(3 processes x accumulate 8\)"):
        check_batch(12, 8, 3)


@pytest.mark.usefixtures("in_bfloat16")
def test_auto_takes_the_layer_the_probe_expects_most_of(model_dir, text, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_eesd.distill.run.best_exit_layer", lambda results: results[1].exit_layer)
    assert run(make_args(model_dir, text, tmp_path / "head", exit_layer="auto", steps=1)) == 0
    assert ExitHeadConfig.load(tmp_path / "head").exit_layer == 2


def test_progress_is_measured_on_held_out_text(model_dir, text, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    assert run(make_args(model_dir, text, tmp_path / "head", measure_every=2, tensorboard=str(board))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens per round expected" in line]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4", "step 6"]
    assert any(path.name.startswith("events") for path in board.iterdir())


@pytest.mark.parametrize("field", ["output", "work", "json"])
def test_a_place_that_cannot_be_written_is_noticed_before_training(model_dir, text, tmp_path, monkeypatch, field):
    monkeypatch.setattr("vllm_eesd.distill.run.train", None)
    changes = {"output": tmp_path / "head", field: "/proc/nowhere/file"}
    with pytest.raises(ValueError, match=f"{field}: .*cannot write"):
        run(make_args(model_dir, text, **{k: str(v) for k, v in changes.items()}))


def test_a_full_disk_is_noticed_before_training(model_dir, text, tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_eesd.distill.run.train", None)
    monkeypatch.setattr(report.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"output: .* cannot write .* \(No space left on device\)"):
        run(make_args(model_dir, text, tmp_path / "head"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.bin"]


class NoVllm:
    def __init__(self, model, seq_len):
        raise ValueError("vLLM: it said no")


@pytest.mark.usefixtures("in_bfloat16")
def test_transformers_writes_where_vllm_cannot(model_dir, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "VllmSampler", NoVllm)
    wanted = {"self_generate": 4, "work": str(tmp_path / "work"), "steps": 1}
    with pytest.raises(ValueError, match=r"generator is 'vllm', which cannot sample from .*: vLLM: it said no"):
        run(make_args(model_dir, text, tmp_path / "head", generator="vllm", **wanted))
    assert run(make_args(model_dir, text, tmp_path / "head", generator="auto", **wanted)) == 0
    assert "transformers samples, because vLLM cannot: vLLM: it said no" in capsys.readouterr().out
    # What transformers began it finishes: vLLM is not asked again.
    monkeypatch.setattr(generate, "VllmSampler", None)
    assert run(make_args(model_dir, text, tmp_path / "head", generator="auto", **wanted)) == 0
    with pytest.raises(ValueError, match="generated.bin was made with another target or other settings"):
        run(make_args(model_dir, text, tmp_path / "head", generator="vllm", **wanted))
