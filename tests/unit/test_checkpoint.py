"""The exit-head checkpoint: what is written is read back, and every bad directory is one line of ValueError."""

from __future__ import annotations

import json
import pickle
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_eesd.exit_head.checkpoint import ExitHeadConfig, Prior, Verifier, read_tensors, write_head
from vllm_eesd.exit_head.draft_vocabulary import offsets_of, token_ids_of
from vllm_eesd.exit_head.shapes import expected_shapes

HIDDEN, LAYERS, VOCAB = 32, 6, 64
LAYER_CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def make_config(**changes) -> ExitHeadConfig:
    verifier = Verifier(
        name_or_path="tiny",
        architecture="LlamaForCausalLM",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
    )
    fields = {
        "exit_layer": 2,
        "head_type": "transformer",
        "verifier": verifier,
        "transformer_layer_config": LAYER_CONFIG,
    }
    return ExitHeadConfig(**(fields | changes))


MOE_CONFIG = LAYER_CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24}


def make_target(**changes) -> SimpleNamespace:
    fields = LAYER_CONFIG | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    return SimpleNamespace(**(fields | changes))


def make_tensors(config: ExitHeadConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}


@pytest.fixture
def head(tmp_path):
    config = make_config(prior=Prior(alpha=6.5, beta=3.5))
    write_head(tmp_path / "head", config, make_tensors(config))
    return tmp_path / "head"


def edit(head, **changes) -> None:
    raw = json.loads((head / "config.json").read_text())
    for key, value in changes.items():
        where = raw["speculators_config"]["verifier"] if key in raw["speculators_config"]["verifier"] else raw
        where[key] = value
    (head / "config.json").write_text(json.dumps(raw))


def refused(call, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_round_trip(head):
    config = ExitHeadConfig.load(head)
    assert config == make_config(prior=Prior(alpha=6.5, beta=3.5))
    tensors, expected = read_tensors(head), make_tensors(config)
    assert tensors.keys() == expected.keys() and len(tensors) == 10
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors"]
    config.check_target(make_target())
    raw = json.loads((head / "config.json").read_text())
    assert raw["speculators_model_type"] == raw["speculators_config"]["algorithm"] == "eesd"


def test_the_targets_description_is_speculators(head):
    """As `speculators` 0.9.0 has it: VerifierConfig's name_or_path, which may be null, and architectures."""
    path = head / "config.json"
    raw = json.loads(path.read_text())
    verifier = raw["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "tiny" and verifier["architectures"] == ["LlamaForCausalLM"]
    (method,) = raw["speculators_config"]["proposal_methods"]
    assert method["proposal_type"] == raw["speculators_config"]["default_proposal_method"] == "greedy"

    def read(**changes):
        described = {name: value for name, value in (verifier | changes).items() if value != "left out"}
        raw["speculators_config"]["verifier"] = described
        path.write_text(json.dumps(raw))
        return ExitHeadConfig.load(head).verifier

    assert read(name_or_path=None).name_or_path == ""
    before = read(architectures="left out", architecture="LlamaForCausalLM")  # as heads had it at first
    assert before == read() and before.architecture == "LlamaForCausalLM"
    for wrong in ([], ["A", "B"], "A", None):
        refused(lambda wrong=wrong: read(architectures=wrong), "verifier.architectures", repr(wrong), "one name")
    refused(lambda: read(architecture="B"), "verifier.architectures")
    refused(lambda: read(architectures=[1]), "architecture", "string")


def test_eagle_heads_of_speculators_are_refused_by_name(head, tmp_path):
    """The fields that `speculators` 0.9.0 writes for an EAGLE-3 model."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "eagle_aux_hidden_state_layer_ids": None,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "llama", "hidden_size": HIDDEN},
    }
    (head / "config.json").write_text(json.dumps(config))
    refused(lambda: ExitHeadConfig.load(head), "speculators_model_type is 'eagle3'", "must be 'eesd'", "vLLM itself")


def test_bfloat16_and_noncontiguous_tensors_survive(tmp_path):
    config = make_config()
    tensors = {name: t.to(torch.bfloat16) for name, t in make_tensors(config).items()}
    name = "layer.self_attn.q_proj.weight"
    tensors[name] = tensors[name].t().contiguous().t()
    write_head(tmp_path / "head", config, tensors)
    read = read_tensors(tmp_path / "head")
    assert read[name].dtype == torch.bfloat16 and torch.equal(read[name], tensors[name])


def test_headless_has_no_weights(tmp_path):
    write_head(tmp_path, make_config(head_type="headless", exit_layer=LAYERS, transformer_layer_config={}), {})
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert read_tensors(tmp_path) == {}
    save_file({"norm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    refused(lambda: read_tensors(tmp_path), "headless")


def test_save_replaces_the_config_only(head):
    make_config(exit_layer=3).save(head)
    assert ExitHeadConfig.load(head).exit_layer == 3
    assert len(read_tensors(head)) == 10


def test_write_head_replaces_a_head_and_nothing_else(head, tmp_path):
    config = make_config(exit_layer=3)
    write_head(head, config, make_tensors(config))
    assert ExitHeadConfig.load(head).exit_layer == 3
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    refused(lambda: write_head(model, config, make_tensors(config)), "not an exit head's")
    assert (model / "config.json").read_text() == '{"architectures": ["LlamaForCausalLM"]}'
    refused(lambda: write_head(tmp_path / "new", config, {}), "missing tensor")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("model_type", "flags", "extra"),
    [
        (
            "llama",
            {"attention_bias": True},
            {"layer.self_attn.o_proj.bias": (32,), "layer.self_attn.k_proj.bias": (16,)},
        ),
        ("llama", {"mlp_bias": True}, {"layer.mlp.gate_proj.bias": (48,), "layer.mlp.down_proj.bias": (32,)}),
        ("qwen2", {}, {"layer.self_attn.q_proj.bias": (32,), "layer.self_attn.v_proj.bias": (16,)}),
        ("granite", {"mlp_bias": True}, {"layer.mlp.up_proj.bias": (48,)}),
        ("qwen3", {}, {"layer.self_attn.q_norm.weight": (8,), "layer.self_attn.k_norm.weight": (8,)}),
    ],
)
def test_tensors_of_other_layers(model_type, flags, extra):
    plain = expected_shapes(make_config())
    shapes = expected_shapes(make_config(transformer_layer_config=LAYER_CONFIG | flags | {"model_type": model_type}))
    assert shapes.items() >= (plain | extra).items()


def test_a_deep_context_reads_two_hidden_states():
    plain, deep = expected_shapes(make_config()), expected_shapes(make_config(head_type="deep_context"))
    (kv_size, hidden) = plain["layer.self_attn.k_proj.weight"]
    added = {"deep.k_proj.weight": (kv_size, 2 * hidden), "deep.v_proj.weight": (kv_size, 2 * hidden)}
    assert deep == plain | added | {"deep.inject.weight": (hidden, hidden)}
    more = expected_shapes(make_config(head_type="deep_context", aux_layers=[2, 3], exit_layer=1))
    assert more == deep | {name: (kv_size, 4 * hidden) for name in added}


def test_tensors_of_several_layers():
    """Each layer above the first has what that one has, but the injection; a config without the field has 1."""
    one = expected_shapes(make_config(head_type="deep_context"))
    upper = {name: shape for name, shape in one.items() if name not in ("deep.inject.weight", "norm.weight")}
    expected = one | {f"upper.{index}.{name}": shape for index in (0, 1) for name, shape in upper.items()}
    assert expected_shapes(make_config(head_type="deep_context", head_layers=3)) == expected
    assert make_config().head_layers == 1


def test_tensors_of_a_layer_with_experts():
    shapes = expected_shapes(make_config(transformer_layer_config=MOE_CONFIG))
    mlp = {name: shape for name, shape in shapes.items() if ".mlp." in name}
    assert mlp == {
        "layer.mlp.gate.weight": (4, 32),
        "layer.mlp.experts.gate_up_proj": (4, 48, 32),
        "layer.mlp.experts.down_proj": (4, 32, 24),
    }


def test_directory_missing(tmp_path):
    refused(lambda: ExitHeadConfig.load(tmp_path / "nowhere"), "nowhere", "no such directory", "eesd distill")
    (tmp_path / "file").write_text("")
    refused(lambda: ExitHeadConfig.load(tmp_path / "file"), "no such directory")


def test_no_config_json(tmp_path):
    refused(lambda: ExitHeadConfig.load(tmp_path), "no config.json")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[]", "must be an object"),
        (b"{}", "speculators_model_type is None"),
        (b'{"speculators_model_type": "eagle3"}', "'eagle3'"),
        (b'{"speculators_model_type": "eesd"}', "speculators_config"),
        (b'{"speculators_model_type": "eesd", "speculators_config": {}}', "exit_layer"),
        (b" " * (2 << 20), "bytes"),
    ],
)
def test_config_is_no_heads(tmp_path, content, word):
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: ExitHeadConfig.load(tmp_path), word)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exit_layer": 0}, ("exit_layer", "is 0", "1 to 5")),
        ({"exit_layer": -1, "head_type": "deep_context"}, ("exit_layer", "is -1", "0 to 5")),
        ({"head_layers": 2}, ("head_layers", "is 2", "1 to 1", "transformer")),
        ({"head_layers": 0}, ("head_layers", "1")),
        ({"aux_layers": [3]}, ("aux_layers", "[3]", "empty", "transformer")),
        ({"aux_layers": [2, 3], "head_type": "deep_context"}, ("aux_layers", "[2, 3]", "without exit_layer")),
        ({"aux_layers": [4, 3], "head_type": "deep_context"}, ("aux_layers", "[4, 3]", "rising")),
        ({"aux_layers": [LAYERS], "head_type": "deep_context"}, ("aux_layers", "[6]", "layers of the target")),
        ({"head_layers": LAYERS + 1, "head_type": "deep_context"}, ("head_layers", "is 7", "1 to 6")),
        ({"exit_layer": LAYERS}, ("exit_layer", "is 6", "1 to 5")),
        ({"exit_layer": -1}, ("exit_layer",)),
        ({"exit_layer": True}, ("exit_layer",)),
        ({"exit_layer": "2"}, ("exit_layer",)),
        ({"head_type": "headless", "exit_layer": LAYERS + 1}, ("exit_layer", "1 to 6")),
        ({"transformer_layer_config": MOE_CONFIG | {"mlp_only_layers": [1]}}, ("mlp_only_layers", "[1]")),
        ({"transformer_layer_config": MOE_CONFIG | {"num_experts": None}}, ("num_experts", "None")),
        ({"head_type": "magic"}, ("head_type", "headless", "transformer")),
        ({"head_type": "mlp"}, ("head_type", "'mlp'", "'headless', 'transformer' or 'deep_context'")),
        ({"draft_vocab_size": VOCAB}, ("draft_vocab_size is 64", "1 to 63", "null")),
        ({"draft_vocab_size": 0}, ("draft_vocab_size is 0", "1 to 63")),
        ({"draft_vocab_size": "32k"}, ("draft_vocab_size", "32k")),
        ({"draft_vocab_size": 32, "head_type": "headless"}, ("draft_vocab_size is 32", "null", "headless")),
        ({"prior": {"alpha": 0, "beta": 1}}, ("prior.alpha", "greater than 0", "got 0")),
        ({"prior": {"alpha": float("nan"), "beta": 1}}, ("prior.alpha", "finite")),
        ({"exit_layers": 2}, ("exit_layers",)),
        ({"verifier": {}}, ("verifier", "speculators_config")),
        ({"vocab_size": 0}, ("vocab_size", "greater than or equal to 1", "got 0")),
        ({"transformer_layer_config": {}}, ("model_type", "llama")),
        ({"transformer_layer_config": LAYER_CONFIG | {"model_type": "mamba"}}, ("mamba", "llama")),
        ({"transformer_layer_config": LAYER_CONFIG | {"hidden_size": 16}}, ("hidden_size", "16", "32")),
        ({"transformer_layer_config": LAYER_CONFIG | {"intermediate_size": "48"}}, ("intermediate_size", "'48'")),
        ({"transformer_layer_config": LAYER_CONFIG | {"num_attention_heads": 0}}, ("num_attention_heads",)),
    ],
)
def test_bad_fields(head, changes, words):
    edit(head, **changes)
    refused(lambda: ExitHeadConfig.load(head), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, ("hidden_size", "32", "64")),
        ({"architectures": ["Qwen2ForCausalLM"]}, ("architecture", "LlamaForCausalLM", "Qwen2ForCausalLM")),
        ({"num_hidden_layers": 8}, ("num_hidden_layers", "6", "8")),
        ({"vocab_size": 65}, ("vocab_size", "64", "65")),
        ({"num_key_value_heads": 4}, ("num_key_value_heads", "2", "4")),
        ({"intermediate_size": 96}, ("intermediate_size", "48", "96")),
    ],
)
def test_another_target(head, changes, words):
    refused(lambda: ExitHeadConfig.load(head).check_target(make_target(**changes)), *words, "eesd distill")


def test_unstated_target_fields_are_not_compared():
    make_config().check_target(
        SimpleNamespace(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB, architectures=None)
    )


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 2_000])
def test_truncated_safetensors(head, kept):
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(lambda: read_tensors(head), "truncated")


def test_header_that_is_not_json(head):
    (head / "model.safetensors").write_bytes(struct.pack("<Q", 64) + b"\x80" * 200)
    refused(lambda: read_tensors(head), "damaged")


@pytest.mark.parametrize("length", [(1 << 20) + 1, 1 << 40, (1 << 64) - 1])
def test_huge_header(head, length):
    (head / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 100)
    refused(lambda: read_tensors(head), "header", str(length))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "head.pt"])
def test_pickled_weights(head, name):
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    refused(lambda: read_tensors(head), "no model.safetensors")
    (head / name).write_bytes(pickle.dumps({key: value.tolist() for key, value in tensors.items()}))
    refused(lambda: read_tensors(head), "pickle", name)


def rewrite(head, change) -> None:
    tensors = dict(load_file(head / "model.safetensors"))
    change(tensors)
    save_file(tensors, head / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.weight"), ("missing", "norm.weight")),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), ("unexpected", "lm_head.weight")),
        (lambda t: t.update({"norm.weight": torch.ones(HIDDEN + 1)}), ("norm.weight", "[33]", "[32]")),
        (lambda t: t.update({"norm.weight": torch.ones(1, HIDDEN)}), ("norm.weight", "[1, 32]")),
        (lambda t: t.update({"norm.weight": torch.ones(HIDDEN, dtype=torch.int64)}), ("norm.weight", "I64")),
    ],
)
def test_wrong_tensors(head, change, words):
    rewrite(head, change)
    refused(lambda: read_tensors(head), *words)


PRUNED = torch.tensor([0, 3, 5, 6, 40, 63])


@pytest.fixture(params=["transformer", "deep_context"])
def pruned_head(request, tmp_path):
    config = make_config(head_type=request.param, draft_vocab_size=len(PRUNED))
    write_head(tmp_path / "pruned", config, make_tensors(config) | {"d2t": offsets_of(PRUNED)})
    return tmp_path / "pruned"


def test_a_draft_vocabulary_is_kept_as_offsets(pruned_head):
    """As EAGLE-3 and `speculators` keep theirs: target id = draft id + d2t[draft id]."""
    assert ExitHeadConfig.load(pruned_head).draft_vocab_size == len(PRUNED)
    d2t = read_tensors(pruned_head)["d2t"]
    assert d2t.dtype == torch.int64 and d2t.tolist() == [0, 2, 3, 3, 36, 58]
    assert torch.equal(token_ids_of(d2t), PRUNED)
    rewrite(pruned_head, lambda t: t.update({"d2t": t["d2t"].int()}))
    assert torch.equal(token_ids_of(read_tensors(pruned_head)["d2t"]), PRUNED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), ("missing", "d2t")),
        (lambda t: t.update({"d2t": t["d2t"].float()}), ("d2t", "F32", "I64")),
        (lambda t: t.update({"d2t": torch.zeros(5, dtype=torch.int64)}), ("d2t", "[5]", "[6]")),
        (lambda t: t.update({"d2t": torch.tensor([0, 2, 1, 3, 36, 58])}), ("d2t", "ascending")),
        (lambda t: t.update({"d2t": torch.tensor([-1, 2, 3, 3, 36, 58])}), ("d2t", "-1 to 63", "0 to 63")),
        (lambda t: t.update({"d2t": torch.tensor([0, 2, 3, 3, 36, 59])}), ("d2t", "0 to 64", "0 to 63")),
    ],
)
def test_a_wrong_draft_vocabulary(pruned_head, change, words):
    rewrite(pruned_head, change)
    refused(lambda: read_tensors(pruned_head), *words)


def test_a_draft_vocabulary_that_the_config_does_not_state(head):
    rewrite(head, lambda t: t.update({"d2t": torch.zeros(5, dtype=torch.int64)}))
    refused(lambda: read_tensors(head), "unexpected", "d2t")
