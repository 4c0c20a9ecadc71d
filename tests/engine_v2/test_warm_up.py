"""EESD's kernels are compiled before serving for all that serving passes to them.

Triton compiles a kernel anew for another dtype, and where a number or an address becomes divisible by 16, or a number
equal to 1. The interpreter compiles nothing, so the arguments themselves are compared.
"""

import contextlib

import numpy as np
import pytest
import torch

from vllm_eesd.policy.goodput import Goodput

#: Verification's launches where drafts are greedy, and the one of vLLM's that comes before.
KERNELS, GATHER = ("statistics_kernel", "_accept_kernel", "_resample_kernel"), "_gather_draft_sampled_kernel"
#: A round's, by module, and what their `do_not_specialize` names.
OF_A_ROUND = {
    "ngram": ("_scan_kernel", "_finish_kernel", "_put_kernel"),
    "draft_inputs": ("_prepare_kernel", "_advance_kernel"),
}
NOT_SPECIALISED = {("_prepare_kernel", "num_reqs"), ("_advance_kernel", "num_rows")}
SPEC = {"method": "eesd", "num_speculative_tokens": 3, "policy": "fixed"}
#: As many requests as it takes for batches of 1, of a multiple of 16 and of neither.
OPTIONS = {"max_num_seqs": 17, "max_model_len": 64, "block_size": 32, "async_scheduling": True}


def kind_of(argument, constant):
    """What of a launch argument a compiled kernel depends on."""
    if argument is None or constant:
        return argument
    if isinstance(argument, tuple):
        return tuple(kind_of(one, False) for one in argument)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return "int64" if abs(argument) >= 2**31 else "int32", argument == 1, argument % 16 == 0


@pytest.fixture
def launches(monkeypatch):
    """{"served" or "warm-up": {(kernel, kinds of its arguments, its constants)}}."""
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401  # as the worker: before anything of V2
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm_eesd.kernels.gpu import draft_inputs, ngram, rejection

    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    seen, phases = {"served": set(), "warm-up": set()}, ["served"]

    class Recorded:
        def __init__(self, module, name):
            self.name, self.kernel = name, getattr(module, name)
            self.counted = [(name, argument) not in NOT_SPECIALISED for argument in self.kernel.arg_names]

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                kinds = tuple(kind_of(a, False) for a, counted in zip(args, self.counted, strict=False) if counted)
                constants = tuple(sorted((name, kind_of(value, True)) for name, value in kwargs.items()))
                seen[phases[-1]].add((self.name, kinds, constants))
                return self.kernel[grid](*args, **kwargs)

            return launch

    of_a_round = {ngram: OF_A_ROUND["ngram"], draft_inputs: OF_A_ROUND["draft_inputs"]}
    for module, names in ({rejection: KERNELS, rejection_sampler: (GATHER,)} | of_a_round).items():
        for name in names:
            monkeypatch.setattr(module, name, Recorded(module, name))
    warm_up, propose = EarlyExitSpeculator.warm_up, EarlyExitSpeculator.propose

    @contextlib.contextmanager
    def warming_up():
        phases.append("warm-up")
        yield
        phases.pop()

    def noted(self, runner):
        with warming_up():
            warm_up(self, runner)

    def noted_if_dummy(self, *args, dummy_run=False, **kwargs):
        with warming_up() if dummy_run else contextlib.nullcontext():
            return propose(self, *args, dummy_run=dummy_run, **kwargs)

    monkeypatch.setattr(EarlyExitSpeculator, "warm_up", noted)
    monkeypatch.setattr(EarlyExitSpeculator, "propose", noted_if_dummy)
    return seen


@pytest.mark.parametrize("draft_sample_method", ["greedy", "auto"])
def test_serving_passes_nothing_that_was_not_warmed_up(
    engine, greedy, eight_token_target, cloned_head, launches, draft_sample_method
):
    """The target's vocabulary of 8 is padded to 64: its logits' rows are further apart than they are long."""
    spec = SPEC | {"model": cloned_head(eight_token_target, 1, 1), "draft_sample_method": draft_sample_method}
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 8, 4).tolist() for _ in range(16)]
    with engine(eight_token_target, spec, **OPTIONS) as llm:
        for num_reqs in (1, 3, 16):
            greedy(llm, prompts[:num_reqs], max_tokens=6)
    served, warmed = launches["served"], launches["warm-up"]
    assert {name for name, *_ in served} == {*KERNELS, GATHER, *OF_A_ROUND["draft_inputs"]}
    assert len({kinds for name, kinds, _ in served if name == "_resample_kernel"}) == 3  # 1, 3 and 16 requests
    unknown = served - warmed
    assert not unknown, sorted(map(str, unknown))


@pytest.mark.parametrize("draft_sample_method", ["greedy", "auto"])
def test_so_are_the_kernels_of_a_round(
    engine, greedy, eight_token_target, cloned_head, launches, monkeypatch, draft_sample_method
):
    """Some requests take n-gram drafts, others draft."""
    generator = np.random.default_rng(0)
    chosen = lambda limits: np.where(generator.random(len(limits)) < 0.5, limits, 0)  # noqa: E731
    monkeypatch.setattr(Goodput, "take_ngrams", lambda self, slots, chances, limits: chosen(limits))
    monkeypatch.setattr(Goodput, "more", lambda self, slots, *told: np.ones(len(slots), dtype=bool))
    spec = SPEC | {"policy": "goodput", "draft_sample_method": draft_sample_method}
    spec |= {"model": cloned_head(eight_token_target, 1, 1)}
    with engine(eight_token_target, spec, **OPTIONS) as llm:
        for num_reqs in (1, 3, 16):
            greedy(llm, [[1, 2, 3] * 3] * num_reqs, max_tokens=6)
    served, warmed = launches["served"], launches["warm-up"]
    assert {name for name, *_ in served} >= {name for names in OF_A_ROUND.values() for name in names}
    unknown = served - warmed
    assert not unknown, sorted(map(str, unknown))


def test_kernels_are_compiled_before_the_worker_warms_up_and_costs_timed_after():
    """At the end of its warm-up vLLM's worker begins to report, or to refuse, whatever is compiled later."""
    from types import SimpleNamespace

    from vllm_eesd.host.v2.seams import compile_or_warm_up_model

    calls = []
    speculator = SimpleNamespace(
        warm_up=lambda runner: calls.append("compile"), profile_costs=lambda runner: calls.append("time")
    )
    runner = SimpleNamespace(req_states=SimpleNamespace(eesd_speculator=lambda: speculator))

    def warm_up(worker):
        return compile_or_warm_up_model(lambda worker: calls.append("vLLM's warm-up") or "times", worker)

    assert warm_up(SimpleNamespace(model_runner=runner)) == "times"
    assert calls == ["compile", "vLLM's warm-up", "time"]
    assert warm_up(SimpleNamespace(model_runner=SimpleNamespace())) == "times"  # Model Runner V1's
    assert len(calls) == 4
