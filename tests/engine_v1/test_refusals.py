"""Wrong input is one line that says what to do, given before any engine starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest


def refusal(target, spec, **options):
    """Return the message with which this speculative config is refused."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_eesd.host import plugin

    plugin.register()
    with pytest.raises(ValueError) as error:
        EngineArgs(model=target, speculative_config=spec, skip_tokenizer_init=True, **options).create_engine_config()
    message = str(error.value)
    assert "\n" not in message, message
    return message


@pytest.fixture
def head(random_target, cloned_head, tmp_path):
    """A good head to break: a private copy."""
    return Path(shutil.copytree(cloned_head(random_target, 2, 2), tmp_path / "head"))


def edit(head, **changes):
    config = json.loads((head / "config.json").read_text())
    for key, value in changes.items():
        place = config["speculators_config"]["verifier"] if key in config["speculators_config"]["verifier"] else config
        place[key] = value
    (head / "config.json").write_text(json.dumps(config))


def test_no_head_names_both_ways_out(random_target):
    message = refusal(random_target, "eesd")
    assert "no exit head" in message and "'model'" in message and "'exit_layer'" in message


def test_head_directory_missing(random_target):
    assert "no such directory" in refusal(random_target, {"method": "eesd", "model": "/nowhere/head"})


def test_a_target_is_not_a_head(random_target):
    assert "not an exit head" in refusal(random_target, {"method": "eesd", "model": random_target})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 12}, ["num_hidden_layers", "12", "8"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["Qwen3ForCausalLM", "LlamaForCausalLM"]),
        ({"vocab_size": 99}, ["vocab_size", "99", "512"]),
        ({"exit_layer": 40}, ["exit_layer", "40"]),
    ],
)
def test_a_head_for_another_target(random_target, head, changes, named):
    edit(head, **changes)
    message = refusal(random_target, {"method": "eesd", "model": str(head)})
    assert all(part in message for part in named), message


def test_wrong_hidden_size(random_target, head):
    layer = json.loads((head / "config.json").read_text())["transformer_layer_config"]
    edit(head, hidden_size=64, transformer_layer_config=layer | {"hidden_size": 64})
    assert "hidden_size" in refusal(random_target, {"method": "eesd", "model": str(head)})


def test_truncated_weights(random_target, head):
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "truncated" in refusal(random_target, {"method": "eesd", "model": str(head)})


def test_pickled_weights(random_target, head):
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    assert "pickled" in refusal(random_target, {"method": "eesd", "model": str(head)})


@pytest.mark.parametrize("exit_layer", [9, 1000])
def test_exit_layer_out_of_range(random_target, exit_layer):
    message = refusal(random_target, {"method": "eesd", "exit_layer": exit_layer})
    assert f"exit_layer={exit_layer} is out of range" in message and "8 layers" in message


def test_exit_layer_that_is_not_the_heads(random_target, head):
    message = refusal(random_target, {"method": "eesd", "model": str(head), "exit_layer": 5})
    assert "exit_layer=5" in message and "2" in message


@pytest.mark.parametrize("value", [0, -1, 1000, "x"])
def test_num_speculative_tokens(random_target, value):
    message = refusal(random_target, {"method": "eesd", "exit_layer": 2, "num_speculative_tokens": value})
    assert "num_speculative_tokens" in message and repr(value) in message


def test_unknown_field_and_policy(random_target):
    assert "unknown field 'depth'" in refusal(random_target, {"method": "eesd", "exit_layer": 2, "depth": 1})
    assert "policy='best'" in refusal(random_target, {"method": "eesd", "exit_layer": 2, "policy": "best"})
    spec = {"method": "eesd", "exit_layer": 2, "policy_args": {"k": 1}}
    assert "unknown key 'k'" in refusal(random_target, spec)


def test_unsupported_target(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    message = refusal(str(tmp_path), {"method": "eesd", "exit_layer": 1})
    assert "GPT2LMHeadModel" in message and "SupportsEagle3" in message


def refused(feature):
    return pytest.mark.feature(feature, "refused")


def target_like(**changes):
    fields = {"architectures": ["LlamaForCausalLM"], "uses_mrope": False, "get_sliding_window": lambda: None}
    fields |= {"enable_sleep_mode": False, "runner_type": "generate", "model_impl": "auto"}
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("target", "pipeline_parallel_size", "named"),
    [
        pytest.param(target_like(), 2, "pipeline_parallel_size=2", marks=refused("pipeline parallel")),
        pytest.param(target_like(uses_mrope=True), 1, "M-RoPE", marks=refused("M-RoPE targets")),
        pytest.param(
            target_like(get_sliding_window=lambda: 128), 1, "sliding-window", marks=refused("sliding-window attention")
        ),
        pytest.param(
            target_like(enable_sleep_mode=True),
            1,
            "enable_sleep_mode",
            marks=refused("sleep mode, on platforms that have it"),
        ),
    ],
)
def test_layouts_that_would_go_wrong(target, pipeline_parallel_size, named):
    from vllm_eesd.host.speculative import check_target_model

    check_target_model(target_like(), SimpleNamespace(pipeline_parallel_size=1))
    with pytest.raises(ValueError, match=named):
        check_target_model(target, SimpleNamespace(pipeline_parallel_size=pipeline_parallel_size))


@pytest.mark.feature("`--model-impl transformers`", "refused")
def test_layers_that_are_not_vllms(random_target):
    message = refusal(random_target, {"method": "eesd", "exit_layer": 4}, model_impl="transformers")
    assert message.startswith("eesd: model_impl='transformers' is not supported")


def connector(name, **options):
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"} | options}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({"kv_offloading_size": 1.0}, "kv_offloading_size=1.0", marks=refused("KV offloading on a CPU")),
        pytest.param(
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "kv_offloading_backend='lmcache'",
            marks=refused("KV offloading by LMCache"),
        ),
        pytest.param(
            connector("ExampleConnector", kv_connector_module_path="some.module"),
            "kv_connector_module_path='some.module'",
            marks=refused("KV connectors that are not vLLM's"),
        ),
    ],
)
def test_kv_that_moves(random_target, options, named):
    message = refusal(random_target, {"method": "eesd", "exit_layer": 4}, **options)
    assert message.startswith(f"eesd: {named} is not supported")


@pytest.mark.feature("KV connectors of vLLM: all others", "refused")
def test_connectors_that_were_not_tested(random_target):
    """By name, those that a later vLLM adds too."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_eesd.host.kv_connectors import SUPPORTED

    names = set(KVConnectorFactory._registry) - set(SUPPORTED)
    assert len(names) > 10 and set(SUPPORTED) < set(KVConnectorFactory._registry)
    for name in sorted(names):
        message = refusal(random_target, {"method": "eesd", "exit_layer": 4}, **connector(name))
        assert message.startswith(f"eesd: kv_connector={name!r} is not supported")
        assert all(supported in message for supported in SUPPORTED)


def moved(**options):
    fields = {"kv_transfer_config": None, "kv_offloading_size": None, "kv_offloading_backend": "native"}
    return SimpleNamespace(**fields | {"enforce_eager": None} | options)


def test_connectors_on_a_gpu(monkeypatch):
    from vllm_eesd.host.kv_connectors import check_kv_connector

    tiers = connector("OffloadingConnector", kv_connector_extra_config={"spec_name": "TieringOffloadingSpec"})
    check_kv_connector(moved(), ON_V2)
    check_kv_connector(moved(**connector(None)), ON_V2)  # nothing moves
    check_kv_connector(moved(kv_offloading_size=2.0), ON_V2)
    check_kv_connector(moved(**connector("OffloadingConnector")), ON_V2)
    check_kv_connector(moved(**connector("ExampleConnector"), enforce_eager=True), ON_V2)
    for args, named in [
        (moved(**connector("ExampleConnector")), "CUDA graphs .* enforce_eager=True"),
        (moved(**tiers), "spec_name='TieringOffloadingSpec'"),
        (moved(**tiers, kv_offloading_size=2.0), "spec_name='TieringOffloadingSpec'"),
    ]:
        with pytest.raises(ValueError, match=named) as error:
            check_kv_connector(args, ON_V2)
        assert str(error.value).startswith("eesd: ") and "\n" not in str(error.value)
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    with pytest.raises(ValueError, match="VLLM_USE_SIMPLE_KV_OFFLOAD=1 is not supported"):
        check_kv_connector(moved(kv_offloading_size=2.0), ON_V2)


def test_a_store_for_each_head(random_target, cloned_head, tmp_path):
    """ExampleConnector's folder is the head's own, however often the arguments are read; a head without KV has none."""
    from vllm.engine.arg_utils import EngineArgs

    def folder(spec, times=1):
        options = connector("ExampleConnector", kv_connector_extra_config={"shared_storage_path": str(tmp_path)})
        args = EngineArgs(model=random_target, speculative_config=spec, skip_tokenizer_init=True, **options)
        for _ in range(times):
            config = args.create_engine_config()
        return Path(config.kv_transfer_config.kv_connector_extra_config["shared_storage_path"])

    ours, other = ({"method": "eesd", "model": cloned_head(random_target, layer, layer)} for layer in (2, 3))
    assert folder(None) == folder({"method": "eesd", "exit_layer": 4}) == tmp_path
    assert folder(ours).parent == folder(other).parent == tmp_path
    assert folder(ours) == folder(ours, times=2) != folder(other)


ON_V2 = SimpleNamespace(runner="V2", platform="cuda", runner_reason="Triton works here")
V1_ON_A_CPU = SimpleNamespace(runner="V1", platform="cpu", runner_reason="Triton does not work here")
V1_ON_A_GPU = SimpleNamespace(runner="V1", platform="cuda", runner_reason="VLLM_USE_V2_MODEL_RUNNER=0")


def layout(**changes):
    sizes = {"data_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(**sizes | changes)


@pytest.mark.parametrize(
    ("environment", "target", "parallel", "named"),
    [
        pytest.param(
            V1_ON_A_CPU,
            {"is_moe": True},
            {"data_parallel_size": 2},
            "data_parallel_size=2",
            marks=refused("data parallel with a mixture of experts"),
        ),
        pytest.param(
            ON_V2,
            {},
            {"decode_context_parallel_size": 2},
            "context parallelism",
            marks=refused("context parallel"),
        ),
        pytest.param(V1_ON_A_GPU, {}, {}, "Runner V1", marks=refused("Model Runner V1 on a GPU")),
        pytest.param(
            ON_V2,
            {"logits_processors": ["some.module:Processor"]},
            {},
            "logits_processors=.*some.module:Processor",
            marks=refused("custom logits processors, V2"),
        ),
    ],
)
def test_what_a_model_runner_would_get_wrong(environment, target, parallel, named):
    from vllm_eesd.host.speculative import check_runner

    check_runner(ON_V2, SimpleNamespace(is_moe=False, logits_processors=None), layout())
    check_runner(V1_ON_A_CPU, SimpleNamespace(is_moe=True, logits_processors=["some.module:Processor"]), layout())
    with pytest.raises(ValueError, match=named) as error:
        fields = {"is_moe": False, "logits_processors": None} | target
        check_runner(environment, SimpleNamespace(**fields), layout(**parallel))
    assert str(error.value).startswith("eesd: ") and "\n" not in str(error.value)


def test_the_config_survives_a_process_boundary(random_target, head):
    import pickle

    from vllm.engine.arg_utils import EngineArgs

    spec = {"method": "eesd", "model": str(head), "num-speculative-tokens": 5}
    config = EngineArgs(model=random_target, speculative_config=spec, skip_tokenizer_init=True).create_engine_config()
    there = pickle.loads(pickle.dumps(config))
    assert type(there.speculative_config) is type(config.speculative_config)
    assert there.speculative_config.eesd.num_speculative_tokens == 5
    assert there.speculative_config.exit_head.exit_layer == 2
    assert there.num_lookahead_tokens == 5
    assert there.speculative_config.compute_hash() == config.speculative_config.compute_hash()
    # Compiled graphs are kept under this hash: one of a head that is built otherwise must not find this one's.
    ours = config.speculative_config.exit_head
    for change in ({"draft_vocab_size": 99}, {"aux_layers": [3]}, {"head_layers": 2}):
        there.speculative_config.exit_head = ours.model_copy(update=change)
        assert there.speculative_config.compute_hash() != config.speculative_config.compute_hash()
