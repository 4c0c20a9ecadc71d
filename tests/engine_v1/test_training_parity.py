"""What the engine drafts is what distillation trained: every draft is computed again with the training modules."""

import shutil
from collections import defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_eesd.distill.metrics import float_head
from vllm_eesd.distill.vocabulary import draft_token_ids, widened

K = 4
# A draft may differ where the training module's two best logits are closer than two implementations come. Both sum
# float32 here; on a GPU Triton's attention multiplies in TF32, of 10 bits, and of 119 drafts on an H200 one differed.
# The closest two logits of those are 0.003 apart.
NEAR_TIE = 1e-2 if torch.cuda.is_available() else 1e-3


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(1)
    return [generator.integers(0, 512, n).tolist() for n in (5, 17, 33, 64, 100, 3)]


def write_with_norms_of_its_own(target_directory, directory):
    """Write the target with norms that weigh unevenly, as trained ones do; returns its directory."""
    shutil.copytree(target_directory, directory)
    generator = torch.Generator().manual_seed(4)
    tensors = load_file(directory / "model.safetensors")
    for name in sorted(name for name in tensors if "norm" in name):
        tensors[name] = 0.5 + torch.rand(tensors[name].shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def write_new_head(target_directory, directory, head_type, token_ids=None, exit_layer=6, head_layers=1, aux_layers=()):
    """Write a head with weights of its own; returns (its directory, the same target and head as training modules)."""
    from vllm_eesd.distill.model import head_config, new_head
    from vllm_eesd.distill.target import load_target
    from vllm_eesd.distill.vocabulary import restrict
    from vllm_eesd.exit_head.checkpoint import Prior, write_head

    target = load_target(target_directory, exit_layer, "cpu", aux_layers)
    head = new_head(target, "last", head_type, head_layers).eval()
    torch.manual_seed(3)
    for layer in (head, *head.upper) if head_type == "deep_context" else ():
        for parameter in layer.deep.parameters():
            torch.nn.init.normal_(parameter, std=0.12)
        torch.nn.init.uniform_(layer.layer.input_layernorm.weight, 0.5, 1.5)
    if token_ids is not None:
        restrict(head, token_ids)
    draft_vocab_size = None if token_ids is None else len(token_ids)
    config = head_config(target, target_directory, head_type, Prior(), draft_vocab_size, head_layers)
    write_head(directory, config, head.state_dict())
    return str(directory), target, head


@pytest.fixture(scope="module")
def make_head(random_target, tmp_path_factory):
    """Return make(head_type, ...): `write_new_head` for the random target."""

    def make(head_type, *args, **kwargs):
        return write_new_head(random_target, tmp_path_factory.mktemp("heads") / head_type, head_type, *args, **kwargs)

    return make


@torch.no_grad()
def drafted_logits(target, head, tokens, bonus_position, draft):
    """Return the logits of the round that drafts `draft` after tokens[: bonus_position + 1], [len(draft), vocab]."""
    ids = torch.tensor([*tokens[: bonus_position + 1], *draft[:-1]])[None]
    exit_hidden, target_hidden, rotary = target(ids)
    positions = torch.arange(ids.shape[1])
    hidden = head(exit_hidden, target_hidden, rotary, positions.clamp(max=bonus_position))
    logits = float_head(target, draft_token_ids(head))(hidden)
    return widened(logits, head, target.config.vocab_size)[0, bonus_position:]


def count_mismatches(target, head, prompts, outputs, rounds):
    """Return (drafted tokens compared, mismatches that are no near-ties)."""
    of_request = defaultdict(list)
    for round_ in rounds:
        of_request[round_["request_id"]].append(round_)
    sequences = {output[1:]: prompt + list(output) for prompt, output in zip(prompts, outputs, strict=True)}
    compared = mismatches = 0
    for request_rounds in of_request.values():
        emitted = tuple(token for round_ in request_rounds for token in round_["emitted"])
        tokens = sequences[emitted]
        position = len(tokens) - len(emitted) - 1
        for round_ in request_rounds:
            draft = round_["draft"]
            if draft:
                logits = drafted_logits(target, head, tokens, position, draft)
                best, chosen = logits.max(-1).values, logits[range(len(draft)), draft]
                compared += len(draft)
                mismatches += int((best - chosen > NEAR_TIE).sum())
            position += len(round_["emitted"])
    return compared, mismatches


def run(engine, greedy, random_target, prompts, directory, **options):
    spec = {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed", "model": directory}
    with engine(random_target, spec, **options) as llm:
        llm.collective_rpc("eesd_take_rounds")
        outputs = greedy(llm, prompts)
        (rounds,) = llm.collective_rpc("eesd_take_rounds")
    return outputs, rounds


@pytest.mark.parametrize(
    "options", [{"enforce_eager": False}, {"max_num_batched_tokens": 32}], ids=["compiled", "chunked"]
)
@pytest.mark.parametrize("head_type", ["transformer", "deep_context"])
def test_the_engine_drafts_what_training_computes(
    engine, greedy, random_target, make_head, prompts, head_type, options
):
    directory, target, head = make_head(head_type)
    outputs, rounds = run(engine, greedy, random_target, prompts, directory, **options)
    assert sum(round_["num_accepted"] for round_ in rounds) > 20  # verified drafts are in the cache, not prompts alone
    compared, mismatches = count_mismatches(target, head, prompts, outputs, rounds)
    assert compared > 500
    assert mismatches == 0


@pytest.mark.feature("a draft vocabulary", "the same answers")
def test_a_draft_vocabulary(engine, greedy, random_target, make_head, prompts):
    """Drafts are the best within it, compiled; what comes out is the target's own, also beyond it."""
    token_ids = torch.arange(512)[torch.arange(512) % 5 > 0]
    directory, target, head = make_head("deep_context", token_ids)
    outputs, rounds = run(engine, greedy, random_target, prompts, directory, enforce_eager=False)
    drafted = {token for round_ in rounds for token in round_["draft"]}
    assert drafted <= set(token_ids.tolist()) and not set(sum(outputs, ())) <= drafted
    assert sum(round_["num_accepted"] for round_ in rounds) > 20
    compared, mismatches = count_mismatches(target, head, prompts, outputs, rounds)
    assert compared > 500 and mismatches == 0
    with torch.no_grad():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = target.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            best, chosen = logits.max(-1).values, logits[range(len(output)), list(output)]
            assert (best - chosen < NEAR_TIE).all()


@pytest.mark.parametrize(("exit_layer", "head_layers", "aux_layers"), [(6, 2, [2, 7]), (0, 3, [4])])
def test_heads_of_several_layers(engine, greedy, random_target, prompts, tmp_path, exit_layer, head_layers, aux_layers):
    """Each layer's KV of verified tokens is filled; with N = 0 a draft step runs no layer of the target."""
    uneven = write_with_norms_of_its_own(random_target, tmp_path / "target")
    shape = {"exit_layer": exit_layer, "head_layers": head_layers, "aux_layers": aux_layers}
    directory, target, head = write_new_head(uneven, tmp_path / "head", "deep_context", **shape)
    outputs, rounds = run(engine, greedy, uneven, prompts, directory, enforce_eager=False)
    compared, mismatches = count_mismatches(target, head, prompts, outputs, rounds)
    assert compared > 500 and mismatches == 0


def test_parity_notices_an_upper_layer_that_is_not_filled(
    engine, greedy, random_target, make_head, prompts, monkeypatch
):
    from vllm_eesd.host.model import kv_fill

    directory, target, head = make_head("deep_context", head_layers=2)
    fill = kv_fill.write_kv

    def fill_the_first(attention, *args):
        if attention.layer_name.endswith(".8.self_attn.attn"):
            fill(attention, *args)

    monkeypatch.setattr(kv_fill, "write_kv", fill_the_first)
    compared, mismatches = count_mismatches(
        target, head, prompts, *run(engine, greedy, random_target, prompts, directory)
    )
    assert mismatches > 0.1 * compared


def test_parity_notices_a_fill_from_the_wrong_layer(engine, greedy, random_target, make_head, prompts, monkeypatch):
    """A deep-context head filled from h_N, as a transformer head is, drafts something else."""
    from vllm_eesd.host.model.exit_head import DeepContextHead, ExitHead

    directory, target, head = make_head("deep_context")
    monkeypatch.setattr(DeepContextHead, "hook_kv_fill", ExitHead.hook_kv_fill)
    compared, mismatches = count_mismatches(
        target, head, prompts, *run(engine, greedy, random_target, prompts, directory)
    )
    assert mismatches > 0.1 * compared


@pytest.mark.parametrize("part", [1, 2], ids=["h_N", "auxiliary"])
def test_parity_notices_a_context_without_a_part_of_it(
    engine, greedy, random_target, make_head, prompts, monkeypatch, part
):
    """Keys and values of verified tokens come from all states."""
    from vllm_eesd.host.model.exit_head import DeepContextHead

    directory, target, head = make_head("deep_context", aux_layers=[4])
    load = DeepContextHead.load_tensors

    def load_others(self, tensors, mapper):
        load(self, tensors, mapper)
        self.fill_proj.weight.data.chunk(3, dim=1)[part].zero_()

    monkeypatch.setattr(DeepContextHead, "load_tensors", load_others)
    compared, mismatches = count_mismatches(
        target, head, prompts, *run(engine, greedy, random_target, prompts, directory)
    )
    assert mismatches > 0.1 * compared


def test_parity_notices_norms_taken_for_others(engine, greedy, random_target, prompts, tmp_path, monkeypatch):
    """The engine reads states as the target's norms weigh them, training as the head's do or none."""
    from vllm_eesd.host.model.exit_head import DeepContextHead

    uneven = write_with_norms_of_its_own(random_target, tmp_path / "target")
    directory, target, head = write_new_head(uneven, tmp_path / "head", "deep_context", aux_layers=[4])
    monkeypatch.setattr(DeepContextHead, "_scales_of_inputs", lambda self: 1.0)
    compared, mismatches = count_mismatches(target, head, prompts, *run(engine, greedy, uneven, prompts, directory))
    assert mismatches > 0.1 * compared


def test_parity_notices_a_missing_injection(engine, greedy, random_target, make_head, prompts, monkeypatch):
    from vllm_eesd.host.model.exit_head import DeepContextHead, ExitHead

    directory, target, head = make_head("deep_context")
    monkeypatch.setattr(DeepContextHead, "round_context", ExitHead.round_context)
    compared, mismatches = count_mismatches(
        target, head, prompts, *run(engine, greedy, random_target, prompts, directory)
    )
    assert mismatches > 0.1 * compared
