"""A head of several layers drafts on Model Runner V2 what training computes; V1's tests have the other heads."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_eesd.traces.read import read as read_rounds

_path = Path(__file__).parents[1] / "engine_v1" / "test_training_parity.py"
_spec = importlib.util.spec_from_file_location("parity_on_v1", _path)
parity = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(parity)

K, MAX_TOKENS = 4, 14
#: Prompts come in chunks; blocks of 32 slots.
OPTIONS = {"max_num_batched_tokens": 48, "async_scheduling": True}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(0, 512, n).tolist() for n in (5, 33, 64, 3)]


def drafted_and_compared(engine, greedy, runner_of, target_directory, prompts, head_directory, trace, reloaded=None):
    """Return (outputs, rounds) as `count_mismatches` takes them: each output ends where its known rounds do.

    Args:
        reloaded: directory of a target whose weights are served instead, once the engine has started.
    """
    spec = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed", "model": head_directory}
    with engine(target_directory, spec | {"trace_file": str(trace)}, **OPTIONS) as llm:
        if reloaded is not None:
            policy = runner_of(llm).speculator.policy
            llm.collective_rpc("reload_weights", kwargs={"weights_path": reloaded})
            new = runner_of(llm).speculator.policy
            assert new is not policy and new.costs is policy.costs
        answers = greedy(llm, prompts, max_tokens=MAX_TOKENS)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        runner_of(llm).speculator.rounds.round_trace._flush()
    rounds, emitted = [], {}
    for record in read_rounds(trace):
        rounds.append(record | {"request_id": record["request"]})
        emitted.setdefault(record["request"], []).extend(record["emitted"])
    outputs = []
    for answer in answers:
        (known,) = [e for e in emitted.values() if all(a == b for a, b in zip(e, answer[1:], strict=False))]
        outputs.append((answer[0], *known))
    return outputs, rounds


def test_every_layer_is_filled(engine, greedy, runner_of, random_target, prompts, tmp_path, monkeypatch):
    """What is drafted with two layers is what training computes; with the upper one not filled, it is not."""
    from vllm_eesd.host.model import kv_fill

    parts = {"head_layers": 2, "aux_layers": [4]}
    uneven = parity.write_with_norms_of_its_own(random_target, tmp_path / "target")
    directory, target, head = parity.write_new_head(uneven, tmp_path / "head", "deep_context", **parts)
    given = engine, greedy, runner_of, uneven, prompts, directory
    outputs, rounds = drafted_and_compared(*given, tmp_path / "filled.jsonl")
    compared, mismatches = parity.count_mismatches(target, head, prompts, outputs, rounds)
    assert compared > 100 and mismatches == 0
    known = kv_fill.get_forward_context

    def with_slots_of_the_first():  # on a GPU a layer fills by a kernel of its own, not by `write_kv`
        slots = {name: mapping for name, mapping in known().slot_mapping.items() if ".8." in name}
        return SimpleNamespace(slot_mapping=slots, no_compile_layers=known().no_compile_layers)

    monkeypatch.setattr(kv_fill, "get_forward_context", with_slots_of_the_first)
    outputs, rounds = drafted_and_compared(*given, tmp_path / "planted.jsonl")
    compared, mismatches = parity.count_mismatches(target, head, prompts, outputs, rounds)
    assert mismatches > 0.1 * compared


@pytest.mark.feature("reload_weights with another checkpoint (Model Runner V2)", "the new answers and drafts")
def test_reloaded_weights(engine, greedy, runner_of, random_target, prompts, tmp_path, monkeypatch):
    """What is derived of norms and of the LM head's rows is that of the new weights; it is noticed where it is not."""
    from vllm_eesd.host.model.draft_vocabulary import DraftVocabulary

    new = parity.write_with_norms_of_its_own(random_target, tmp_path / "target")
    tensors = load_file(f"{new}/model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(7, 0).contiguous()
    save_file(tensors, f"{new}/model.safetensors", {"format": "pt"})
    parts = {"token_ids": torch.arange(0, 512, 2), "head_layers": 2, "aux_layers": [4]}
    directory, target, head = parity.write_new_head(new, tmp_path / "head", "deep_context", **parts)
    given = engine, greedy, runner_of, random_target, prompts, directory
    outputs, rounds = drafted_and_compared(*given, tmp_path / "new.jsonl", reloaded=new)
    compared, mismatches = parity.count_mismatches(target, head, prompts, outputs, rounds)
    assert compared > 100 and mismatches == 0
    with torch.no_grad():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = target.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            best, chosen = logits.max(-1).values, logits[range(len(output)), list(output)]
            assert (best - chosen < parity.NEAR_TIE).all()
    monkeypatch.setattr(DraftVocabulary, "target_changed", lambda self, target: None)
    outputs, rounds = drafted_and_compared(*given, tmp_path / "planted.jsonl", reloaded=new)
    compared, mismatches = parity.count_mismatches(target, head, prompts, outputs, rounds)
    assert mismatches > 0.1 * compared
