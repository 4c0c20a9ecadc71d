"""Pairs of options, drawn from what vLLM has: answered as by plain vLLM, refused as by it, or refused in one line.

    make fuzz FUZZ_MINUTES=60 SEED=5      # what is printed of a run, its seed and the numbers of its draws, repeats it
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter

import numpy as np
import pytest
from pair_engines import Asked, Engines, Outcome
from pair_options import (
    ENGINE_ELSEWHERE,
    ENGINE_VALUES,
    ONLY_WITH_DRAFTS,
    REQUEST_ELSEWHERE,
    REQUEST_VALUES,
    ROUNDING,
    TELLING,
    VOCAB_SIZE,
    draw,
    engine_options,
    names_in,
    request_options,
)
from request_cases import assert_same

#: Pairs that the suite tries; with a seed whose first draws start engines of telling options.
NUM_PAIRS, SEED = 200, 0
SAME, REFUSED, AT_START = "same answer", "same refusal", "refused at the start"
#: Where identity says nothing: sampled without a seed, rounded, aborted, or plain vLLM's engine ends too.
ANSWERED, ENDS_TOO = "answered by both, not comparable", "ends plain vLLM's engine"
#: Asked again, it answers a request otherwise that has one answer: vLLM 0.32's ExampleConnector does so in places.
UNSURE = "plain vLLM's own answers differ"


@pytest.fixture(scope="module")
def target(tmp_path_factory, embedded_model):
    """Directory of a random Llama of four layers with the embedded model's words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("targets") / "random4"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(embedded_model / name, directory)
    return str(directory)


@pytest.fixture(scope="module")
def small_adapter(tmp_path_factory):
    """Directory of a LoRA adapter of that target, which changes its text."""
    import json

    import torch
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("lora")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 64, generator=generator) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(64, 8, generator=generator) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def is_refusal_of_eesd(error):
    """Whether this is one line of EESD's."""
    name, message = error
    return name in ("ValueError", "ValidationError") and "\n" not in message and message.startswith("eesd: ")


def same_error(error, other, numbers):
    """Whether two errors are of one class and message; where the KV of a layer more counts, but for the numbers."""
    if numbers:
        return error == other
    return [re.sub(r"[0-9.]+", "0", part) for part in error] == [re.sub(r"[0-9.]+", "0", part) for part in other]


def is_comparable(engine, request):
    """Whether plain vLLM's own answer is always the same."""
    if any(name in engine for name in ROUNDING) or engine.get("logits_processors") and request.get("n", 1) > 1:
        return False
    greedy = request["temperature"] == 0 or request.get("top_k") == 1 or request.get("top_p") == 1e-6
    return greedy or request.get("min_p") == 1.0 or request.get("seed") not in (None, -1)


def without_likeliest(answers):
    """Return answers without the log-probabilities of the likeliest tokens.

    Beside a request that names tokens, plain vLLM gives theirs to none of the others: it hangs on who shares a step.
    """
    return [answer | {"logprobs": None} for answer in answers]


def verdict(engine, request, plain: Outcome, ours: Outcome, beside_named=False):
    """Return what became of a pair, or None where EESD is at fault.

    Args:
        beside_named: whether a request of the same engine names the tokens whose log-probabilities it wants.
    """
    if ours.kind == "not started":
        if plain.kind == "not started" and same_error(plain.error, ours.error, numbers=False):
            return REFUSED
        return AT_START if is_refusal_of_eesd(ours.error) else None
    if plain.kind in ("died", "hung"):
        return ENDS_TOO
    if {plain.kind, ours.kind} == {"aborted", "answered"}:
        return ANSWERED  # drafts may have brought the answer to its end before the step in which it is aborted
    if plain.kind != ours.kind:
        return None
    if plain.kind == "refused":
        return REFUSED if same_error(plain.error, ours.error, numbers=True) else None
    if plain.kind == "aborted" or not is_comparable(engine, request):
        return ANSWERED
    shown = without_likeliest if beside_named and "logprobs" in request else list
    try:
        assert_same(shown(ours.answers), shown(plain.answers))
    except AssertionError:
        return None
    return SAME


def is_unsure(engines, options, drawn, plain, beside_named):
    """Whether plain vLLM, asked the same again, answers a request otherwise that has one answer."""
    pairs = zip(drawn.requests, plain.outcomes, engines.ask(options, drawn.requests).outcomes, strict=True)
    comparable = [pair for pair in pairs if pair[1].kind == "answered" and is_comparable(drawn.engine, pair[0])]
    return any(verdict(drawn.engine, *pair, beside_named) != SAME for pair in comparable)


def try_draw(engines, drawn):
    """Return (verdicts, what was wrong, tokens accepted) of one draw."""
    options = {name: value for name, value in drawn.engine.items() if name not in ONLY_WITH_DRAFTS}
    plain = engines.ask(options, drawn.requests)
    if plain.outcomes[0].kind == "not started":
        drawn = drawn._replace(requests=drawn.requests[:1])  # one pair: no request is ever met
        plain = Asked(plain.outcomes[:1], plain.stats)
    spec = {"speculative_config": drawn.spec, "worker_extension_cls": "vllm_eesd.host.worker.WorkerExtension"}
    kept = [number for number, outcome in enumerate(plain.outcomes) if outcome.kind not in ("died", "hung")]
    ours = engines.ask(spec | drawn.engine, [drawn.requests[number] for number in kept])
    named = any("logprob_token_ids" in request for request in drawn.requests)
    verdicts, wrong = Counter({ENDS_TOO: len(drawn.requests) - len(kept)}), []
    if ours.outcomes and ours.outcomes[0].kind == "not started":
        kept = kept[:1]
        verdicts.clear()
    for number, outcome in zip(kept, ours.outcomes, strict=False):
        found = verdict(drawn.engine, drawn.requests[number], plain.outcomes[number], outcome, named)
        if found is None:
            wrong.append((drawn.requests[number], plain.outcomes[number], outcome))
        else:
            verdicts[found] += 1
    # An engine that died, or a request refused later, is EESD's fault whatever plain vLLM answers.
    differing = [one for one in wrong if one[1].kind == one[2].kind == "answered"]
    if differing and is_unsure(engines, options, drawn, plain, named):
        verdicts[UNSURE], wrong = len(differing), [one for one in wrong if one not in differing]
    of_engine = {"drafter_faults", "speculation_off", "died_together", "kv_cache_usage"} & ours.stats.keys()
    wrong += [(name, ours.stats[name]) for name in sorted(of_engine) if ours.stats[name]]
    return +verdicts, wrong, ours.stats.get("accepted", 0)


def test_every_option_of_vllm_is_drawn_or_named():
    """An option that is in vLLM's tables and in none of ours would be tried by nobody."""
    engine, asked = engine_options(), request_options()
    assert [name for name, values in (engine | asked).items() if not values] == []
    assert len(engine) > 100 and len(asked) > 30
    assert (names_in(ENGINE_ELSEWHERE) | names_in(REQUEST_ELSEWHERE)).isdisjoint(ENGINE_VALUES | REQUEST_VALUES)
    # What is listed here and gone from vLLM would be tried by nobody either.
    assert ENGINE_VALUES.keys() <= engine.keys() and {*ROUNDING, *ONLY_WITH_DRAFTS, *TELLING} <= engine.keys()
    beside = {"aborted", "cache_salt", "lora", "priority", "prompt"}
    assert REQUEST_VALUES.keys() - beside <= asked.keys() and "Forbids" in str(ENGINE_VALUES["logits_processors"])


def test_a_draw_is_its_seed_and_number():
    drawn = [draw(7, number) for number in range(40)]
    assert drawn == [draw(7, number) for number in range(40)] != [draw(8, number) for number in range(40)]
    assert len({str(one.engine) for one in drawn}) > 30


@pytest.fixture(scope="module")
def draws(request):
    """Draws of the suite, or of as many minutes as were asked for, from one seed."""
    minutes, seed = request.config.getoption("--fuzz-minutes"), request.config.getoption("--fuzz-seed")
    first = request.config.getoption("--fuzz-first")
    if not minutes and seed is None:
        return SEED, (draw(SEED, number, telling_only=True) for number in range(NUM_PAIRS))
    seed = int(np.random.default_rng().integers(2**31)) if seed is None else seed

    def until():
        ends, number = time.monotonic() + 60 * (minutes or 10), first
        while time.monotonic() < ends:
            yield draw(seed, number)
            number += 1

    return seed, until()


@pytest.mark.feature("pairs of an engine's and a request's options", "the same answers, or refused in one line")
def test_pairs(target, small_adapter, draws, counts, request, capsys):
    """EESD against plain vLLM: no engine ends, no request is refused later than by plain vLLM."""
    seed, drawn_ones = draws
    fuzzing = bool(request.config.getoption("--fuzz-minutes"))
    found, wrong, accepted = Counter(), [], 0
    with Engines(target, small_adapter) as engines:
        for drawn in drawn_ones:
            verdicts, faults, tokens = try_draw(engines, drawn)
            found, accepted = found + verdicts, accepted + tokens
            wrong += [(drawn.number, drawn.engine, drawn.spec, *fault) for fault in faults]
            if fuzzing or faults:
                with capsys.disabled():
                    print(f"\nseed {seed}, draw {drawn.number}: {drawn.engine} {drawn.spec} {dict(verdicts)}")
                    print(*faults, sep="\n")
            if not fuzzing and found.total() >= NUM_PAIRS:
                break
    with capsys.disabled():
        print(f"\npairs from seed {seed}: tried {found.total() + len(wrong)}, {dict(found)}, wrong {len(wrong)}")
    counts["pairs: tried"] += found.total() + len(wrong)
    counts["pairs: wrong"] += len(wrong)
    for name, number in found.items():
        counts[f"pairs: {name}"] += number
    assert not wrong, wrong
    assert accepted > found.total() / 10
