"""What EESD must leave alone or account for: memory, LoRA, and requests that end."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

SPEC = {"method": "eesd", "num_speculative_tokens": 4, "policy": "fixed"}


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(5)
    return [generator.integers(0, 512, n).tolist() for n in (12, 30, 7, 19)]


def kv_layers(llm):
    """Return layer name -> bytes of one KV-cache page, from vLLM's own KV-cache config."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    assert len(groups) == 1  # one group, so one block table
    return {name: groups[0].kv_cache_spec.page_size_bytes for name in groups[0].layer_names}


def test_the_extra_memory_is_one_layers_kv_and_the_head(engine, random_target, cloned_head, drafter_of):
    from vllm_eesd.exit_head.checkpoint import read_tensors

    with engine(random_target) as llm:
        plain = kv_layers(llm)
    head = cloned_head(random_target, 2, 7)
    with engine(random_target, SPEC | {"model": head}) as llm:
        eesd = kv_layers(llm)
        extra = set(eesd) - set(plain)
        assert extra == {"eesd_exit.layers.8.self_attn.attn"}
        assert set(plain) < set(eesd) and {eesd[name] for name in extra} == set(plain.values())
        # The draft step borrows the target's modules: it owns no parameter of its own.
        assert sum(p.numel() for p in drafter_of(llm)._step.parameters()) == 0
    # The head is one layer and one norm: what vLLM packs on the CPU has the size of what was read.
    hidden, inner, kv = 128, 256, 2 * 32
    one_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert sum(tensor.numel() for tensor in read_tensors(head).values()) == one_layer + hidden
    with engine(random_target, SPEC | {"exit_layer": 4}) as llm:
        assert kv_layers(llm) == plain  # headless needs nothing


def test_a_head_of_several_layers_has_the_kv_of_each(engine, random_target, tmp_path):
    from test_training_parity import write_new_head

    directory, *_ = write_new_head(random_target, tmp_path / "head", "deep_context", exit_layer=0, head_layers=3)
    with engine(random_target, SPEC | {"model": directory}) as llm:
        pages = kv_layers(llm)
    own = {f"eesd_exit.layers.{layer}.self_attn.attn" for layer in (8, 9, 10)}
    assert {name for name in pages if name.startswith("eesd_exit")} == own
    assert len(pages) == 8 + 3 and len(set(pages.values())) == 1


@pytest.mark.feature("LoRA on the target", "the same answers; no exit head drafts for such requests")
def test_lora_requests_are_served_right_and_draft_nothing(
    engine, random_target, cloned_head, adapter, prompts, drafter_of
):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": p} for p in prompts]
    spec = SPEC | {"model": cloned_head(random_target, 7, 7)}
    answers = []
    for options in ({}, {"spec": spec}):
        # What EESD times at start-up has more tokens than so many requests.
        with engine(random_target, enable_lora=True, max_lora_rank=8, max_num_seqs=4, **options) as llm:

            def generate(lora_request):
                outputs = llm.generate(inputs, params, lora_request=lora_request, use_tqdm=False)
                return [list(o.outputs[0].token_ids) for o in outputs]

            answers.append([generate([lora] * 4)])
            if options:
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["rounds"] > 0 and stats["drafted"] == 0
            # vLLM 0.32 on a CPU runs rows without an adapter through one if another row of the batch has one: such rows
            # draft with the target's own weights and are mostly rejected. What is served is plain vLLM's all the same.
            answers[-1].append(generate([None, lora, None, lora]))
            if options:
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["drafted"] > 0
                llm.collective_rpc("eesd_reset_stats")
            answers[-1].append(generate(None))
            if options:  # without adapters in the batch, drafts are right
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["accepted"] == stats["drafted"] > 0
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][2]  # the adapter does something


@pytest.mark.feature("LoRA on the target, n-gram drafts", "the same answers")
def test_lora_requests_copy_what_their_text_suggests(engine, random_target, cloned_head, adapter, every_ngram_taken):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    # The second prompt holds what follows the first one: what is copied of it comes true.
    first = np.random.default_rng(5).integers(0, 512, 12).tolist()
    spec = SPEC | {"policy": "goodput", "model": cloned_head(random_target, 7, 7)}
    answers = []
    for options in ({}, {"spec": spec}):
        with engine(random_target, enable_lora=True, max_lora_rank=8, **options) as llm:

            def generate(prompt, lora_request):
                prompts = {"prompt_token_ids": prompt}
                (output,) = llm.generate(prompts, params, lora_request=lora_request, use_tqdm=False)
                return list(output.outputs[0].token_ids)

            followed = generate(first, lora)
            answers.append([followed, generate(first + followed + first, lora), generate(first + followed[:3], None)])
            if options:
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["copied"] > 0
                llm.collective_rpc("eesd_reset_stats")
                generate(first + followed + first, lora)
                (stats,) = llm.collective_rpc("eesd_stats")
                assert stats["drafted"] == stats["copied"] > 0
    assert answers[0] == answers[1]


@pytest.mark.feature("fp8 KV cache", "the same answers")
def test_an_fp8_kv_cache(engine, greedy, random_target, cloned_head, prompts):
    """The clone of the last layer stays right in every token: the exit layer's own cache is written in fp8, too."""
    try:
        with engine(random_target, kv_cache_dtype="fp8") as llm:
            expected = greedy(llm, prompts)
    except (NotImplementedError, ValueError) as error:  # of plain vLLM: which processors can is its business
        if "fp8" not in str(error).lower() or "CPU" not in str(error):
            raise
        pytest.skip(f"vLLM: {error}")
    with engine(random_target, SPEC | {"model": cloned_head(random_target, 7, 7)}, kv_cache_dtype="fp8") as llm:
        assert greedy(llm, prompts) == expected
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["accepted"] == stats["drafted"] > 100


@pytest.fixture(scope="module")
def other_weights(random_target, tmp_path_factory):
    """Directory of a target of the same shape with somewhat different weights."""
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(random_target, tmp_path_factory.mktemp("targets") / "other")
    generator = torch.Generator().manual_seed(3)
    weights = load_file(directory / "model.safetensors")
    for tensor in weights.values():
        if tensor.dim() == 2:
            tensor += torch.randn(tensor.shape, generator=generator) * 0.02
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@pytest.mark.feature("prompt embeds", "the same answers")
@pytest.mark.feature("weights reloaded while it runs", "the same answers")
def test_prompt_embeds_and_reloaded_weights(engine, greedy, random_target, other_weights, cloned_head, prompts):
    """Prompts without token ids draft as well; a head of the old weights drafts worse for the new, and no more."""
    from safetensors.torch import load_file
    from vllm import SamplingParams

    rows = load_file(f"{random_target}/model.safetensors")["model.embed_tokens.weight"]
    no_tokens = torch.randn(9, rows.shape[1], generator=torch.Generator().manual_seed(1)) * 0.12
    inputs = [{"prompt_embeds": rows[prompts[1]]}, {"prompt_token_ids": prompts[0]}, {"prompt_embeds": no_tokens}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    answers, reloaded, stats = [], [], []
    for spec in (None, SPEC | {"model": cloned_head(random_target, 7, 7)}):
        with engine(random_target, spec, enable_prompt_embeds=True) as llm:
            outputs = llm.generate(inputs, params, use_tqdm=False)
            answers.append([tuple(output.outputs[0].token_ids) for output in outputs])
            if spec:
                stats += llm.collective_rpc("eesd_stats")
                llm.collective_rpc("eesd_reset_stats")
            llm.collective_rpc("reload_weights", kwargs={"weights_path": other_weights})
            llm.reset_prefix_cache()
            reloaded.append(greedy(llm, prompts))
            if spec:
                stats += llm.collective_rpc("eesd_stats")
    assert answers[0] == answers[1] and reloaded[0] == reloaded[1]
    assert stats[0]["accepted"] == stats[0]["drafted"] > 60
    assert 0 < stats[1]["accepted"] < stats[1]["drafted"] and stats[1]["drafter_faults"] == 0


def test_finished_requests_leave_no_state_behind(engine, greedy, random_target, prompts, drafter_of):
    with engine(random_target, SPEC | {"exit_layer": 8}, max_num_seqs=4) as llm:
        for _ in range(3):
            greedy(llm, prompts * 3, max_tokens=6)
        drafter = drafter_of(llm)
        assert len(drafter._slots) <= 4
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert scheduler.kv_cache_manager.usage == 0


def test_nothing_is_drafted_past_a_requests_budget(engine, greedy, random_target, prompts):
    """max_tokens 3: after the prompt's token at most two may follow, so no draft is longer than one."""
    with engine(random_target, SPEC | {"exit_layer": 8}) as llm:
        greedy(llm, prompts, max_tokens=3)
        (stats,) = llm.collective_rpc("eesd_stats")
    assert stats["draft_length_histogram"][2:] == [0, 0, 0]
    assert stats["accepted"] == stats["drafted"] == 4


def test_statistics_are_plain_numbers(engine, greedy, random_target, prompts):
    """They cross a process boundary as msgpack: one NumPy scalar among them, and whoever asked waits for ever."""
    import msgspec

    with engine(random_target, SPEC | {"exit_layer": 4, "policy": "goodput"}) as llm:
        greedy(llm, prompts)
        for method in ("eesd_stats", "eesd_costs", "eesd_take_rounds", "eesd_take_dense"):
            (answer,) = llm.collective_rpc(method)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), strict=False) == answer


def test_costs_are_known_before_the_first_request(engine, random_target, drafter_of, monkeypatch):
    """A forward takes 2 ms and half a one per token, a draft step a quarter, by a clock that only they move on."""
    from vllm_eesd.host import cost_profile
    from vllm_eesd.host.v1 import cost_profile as of_v1

    now = [0.0]

    def taking(make, ms):
        def made(*args):
            call = make(*args)

            def timed():
                now[0] += ms(args[-1]) / 1e3
                return call()

            return timed

        return made

    monkeypatch.setattr(cost_profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(of_v1, "forward_call", taking(of_v1.forward_call, lambda n: 2 + n / 2))
    monkeypatch.setattr(of_v1, "draft_call", taking(of_v1.draft_call, lambda n: 0.25))
    with engine(random_target, SPEC | {"exit_layer": 4}) as llm:
        costs = drafter_of(llm).policy.costs
        assert not costs.state()["verify_ms"]
        # What a drafted round takes besides counts once one was timed.
        assert costs.verify_curve(1, 8)[[0, 8]].tolist() == pytest.approx([2.5, 6.5])
        assert costs.draft_curve(1)[1] == pytest.approx(0.25)


def test_the_round_trace_holds_what_was_emitted(engine, greedy, random_target, prompts, tmp_path, drafter_of):
    from vllm_eesd.traces.read import read as read_rounds

    path = tmp_path / "rounds.jsonl"
    spec = SPEC | {"exit_layer": 4, "policy": "confidence", "trace_file": str(path)}
    with engine(random_target, spec) as llm:
        answers = greedy(llm, prompts)
        (stats,) = llm.collective_rpc("eesd_stats")
        drafter_of(llm).round_trace.close()
    rounds, written = read_rounds(path), {}
    for record in rounds:
        written.setdefault(record["request"], []).extend(record["emitted"])
        assert record["draft"][: record["accepted"]] == record["emitted"][:-1]
        assert len(record["draft_steps_ms"]) >= len(record["draft"]) == len(record["confidences"])
        assert all(0 <= confidence <= 1 for confidence in record["confidences"])
    # The first token comes from the prompt's forward pass, which is no round.
    assert sorted(written.values()) == sorted(list(answer[1:]) for answer in answers)
    assert [len(rounds), sum(len(r["draft"]) for r in rounds)] == [stats["rounds"], stats["drafted"]]
    assert [r["at_s"] for r in rounds] == sorted(r["at_s"] for r in rounds)


def test_a_round_trace_that_cannot_be_written_is_refused_at_start(random_target):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_eesd.host import plugin

    plugin.register()
    spec = SPEC | {"exit_layer": 4, "trace_file": "/nowhere/rounds.jsonl"}
    with pytest.raises(ValueError, match="trace_file=.* is not valid .No such file or directory.:"):
        EngineArgs(model=random_target, speculative_config=spec, skip_tokenizer_init=True).create_engine_config()
