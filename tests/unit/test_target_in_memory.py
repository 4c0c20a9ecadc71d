"""The target's weights: in its own dtype, and in host memory where they do not fit on the device."""

import json
import math
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from vllm_eesd.distill import calibrate, probe, run
from vllm_eesd.distill.generate import continue_windows
from vllm_eesd.distill.loading import computing_dtype
from vllm_eesd.distill.model import new_head
from vllm_eesd.distill.target import load_target, place

SEQ_LEN = 32
GREEDY_AND_SAMPLED = torch.tensor([0.0, 0.7, 1.0])

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def halves(model_dir, tmp_path_factory):
    """Directories of the tiny Llama in bfloat16 and float16, by dtype."""
    directories = {}
    for dtype in (torch.bfloat16, torch.float16):
        directories[dtype] = tmp_path_factory.mktemp("half")
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).save_pretrained(directories[dtype])
    return directories


def test_a_target_is_held_in_its_own_dtype(in_bfloat16, model_dir, halves):
    held = {dtype: computing_dtype(str(path), "cpu") for dtype, path in halves.items()}
    # Where a CPU does not multiply it in hardware, float32 is faster.
    assert held == {torch.bfloat16: torch.bfloat16 if in_bfloat16 else torch.float32, torch.float16: torch.float32}
    assert all(computing_dtype(str(path), "cuda") == dtype for dtype, path in halves.items())
    assert computing_dtype(str(model_dir), "cuda") == torch.float32


def test_half_a_target_is_half_the_memory_and_positions_stay_exact(halves, model_dir):
    whole = load_target(str(model_dir), 1, "cpu")
    for dtype, path in halves.items():
        target = load_target(str(path), 1, "cuda", [2])  # not on it before it is placed
        assert {weight.dtype for weight in target.parameters()} == {dtype}
        assert {weight.device.type for weight in target.parameters()} == {"cpu"}
        # Cast with the weights, a position of some hundred would be turned by another angle.
        assert torch.equal(target.model.model.rotary_emb.inv_freq, whole.model.model.rotary_emb.inv_freq)
        assert {weight.dtype for weight in new_head(target, "last", head_layers=2).parameters()} == {torch.float32}


@pytest.mark.usefixtures("in_bfloat16")
def test_a_bfloat16_target_from_probe_to_calibration(halves, text, tmp_path, capsys):
    model, head = str(halves[torch.bfloat16]), tmp_path / "head"
    shared = {"model": model, "seq_len": SEQ_LEN, "chat_template": None, "json": str(tmp_path / "out.json")}
    assert probe.run(Namespace(**shared, text=[str(text)], windows=4, head_layers=1, plot=None)) == 0
    trained = {"exit_layer": 1, "data": [str(text)], "output": str(head), "steps": 8, "batch": 4, "lr": 3e-3}
    assert run.run(Namespace(**shared, **trained, self_generate=4, generator="transformers")) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["after"]["text"]["kl"] < told["before"]["text"]["kl"]
    assert {tensor.dtype for tensor in load_file(head / "model.safetensors").values()} == {torch.bfloat16}
    assert calibrate.run(Namespace(**shared, head=str(head), data=[str(text)], windows=4)) == 0


def room_for(target, num_layers) -> int:
    layer = sum(weight.nbytes for weight in target.model.model.layers[0].parameters())
    whole = sum(weight.nbytes for weight in target.parameters())
    return whole - (len(target.model.model.layers) - num_layers) * layer


@pytest.mark.parametrize(("num_layers", "stay"), [(0, 4), (1, 4), (2, 3), (3, 2), (4, 0), (math.inf, 0)])
def test_layers_without_room_stay_in_host_memory(model_dir, num_layers, stay):
    """Room for one of them is left: where it is when it runs."""
    whole, target = (load_target(str(model_dir), 1, "cpu", [2, 3]) for _ in range(2))
    room = math.inf if num_layers == math.inf else room_for(target, num_layers)
    assert place(target, torch.device("cpu"), room) == stay
    away = [layer.mlp.down_proj.weight.is_meta for layer in target.model.model.layers]
    assert away == [False] * (4 - stay) + [True] * stay
    assert not target.lm_head.weight.is_meta
    assert target.fingerprint == whole.fingerprint
    ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (*states, _), (*expected, _) = target(ids), whole(ids)
        states, expected = states + target.layer_inputs(ids), expected + whole.layer_inputs(ids)
    assert all(map(torch.equal, states, expected))
    said, wanted = (continue_windows(of, ids, SEQ_LEN, GREEDY_AND_SAMPLED, seed=1) for of in (target, whole))
    assert torch.equal(said, wanted)
    assert [layer.mlp.down_proj.weight.is_meta for layer in target.model.model.layers] == away
