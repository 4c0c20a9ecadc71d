"""Engines that start as on a GPU, and serve from CUDA graphs that `recorded_graphs` stands in for.

vLLM's own wrappers are entered: `profile_cudagraph_memory`, `warmup_kernels` and both graph managers, the target's
and the draft steps'. Without CUDA run only what `gpu_start` names. The exit layer is a clone of the target's last: a
draft step's graph that does anything wrong has drafts rejected, and a target's graph says something else than plain
vLLM.
"""

import numpy as np
import pytest
import torch
from gpu_start import as_on_a_gpu

K = 3
#: Of graphs in tokens: the draft steps' are as long as batches, the target's K + 1 times that.
SIZES, DRAFT_SIZES = [1, 2, 4, 8, 32], [1, 2, 4, 8]
OPTIONS = {"max_model_len": 96, "block_size": 32, "max_num_batched_tokens": 48}
IN_GRAPHS = {
    "enforce_eager": False,
    "async_scheduling": True,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
#: Draft sampling, whether the kernels are forced, and whether the metadata's update is in the graph.
ENGINES = {
    "greedy drafts, kernels": ("greedy", True, False),
    "drawn drafts, metadata updated in the graph": ("auto", False, True),
    "drawn drafts, kernels": ("auto", True, False),
    "greedy drafts, metadata updated in the graph": ("greedy", False, True),
}
#: Drafts are drawn, and say what greedy ones do.
NEARLY_GREEDY, SEED = 0.01, 3
#: One request after the other ends: batches of 8, 7, ... 1.
NUM_TOKENS = tuple(range(4, 12))


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(2)
    return [generator.integers(0, 512, n).tolist() for n in (33, 7, 48, 1, 3, 13, 5, 20)]


@pytest.fixture(scope="module")
def generate(prompts):
    """Return generate(llm, temperature, seed): token ids of every prompt."""

    def run(llm, temperature=0.0, seed=None):
        from vllm import SamplingParams

        common = {"temperature": temperature, "seed": seed, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(max_tokens=n, **common) for n in NUM_TOKENS]
        np.random.seed(7)  # vLLM draws the seeds of requests without one from numpy's generator
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    return run


@pytest.fixture(scope="module")
def plain(engine, random_target, generate):
    """What plain vLLM says, greedily and nearly so with a seed: its noise may decide between tokens that are near."""
    with engine(random_target, **OPTIONS) as llm:
        return generate(llm), generate(llm, NEARLY_GREEDY, SEED)


@pytest.fixture(scope="module")
def expected(plain):
    return plain[0]


@pytest.fixture(scope="module")
def spec(random_target, cloned_head):
    return {"method": "eesd", "num_speculative_tokens": K, "policy": "fixed", "model": cloned_head(random_target, 7, 7)}


def outcome(llm, generate, policy="fixed", temperature=0.0, **sampling):
    """(answers, tokens drafted, tokens accepted)."""
    llm.collective_rpc("eesd_use_policy", args=(policy,))
    llm.collective_rpc("eesd_reset_stats")
    answers = generate(llm, temperature, **sampling)
    (stats,) = llm.collective_rpc("eesd_stats")
    assert not stats["drafter_faults"]
    return answers, stats["drafted"], stats["accepted"]


def corrupt(patch):
    """Make every fourth draft token wrong, behind the graph that made it: drafts are rejected everywhere."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    generator, right = np.random.default_rng(3), EarlyExitSpeculator._run_step

    def run_step(self, step, num_reqs, *args, **kwargs):
        right(self, step, num_reqs, *args, **kwargs)
        wrong = torch.from_numpy(generator.random(num_reqs) < 0.25)
        tokens = self.draft_tokens[:num_reqs, step - 1]
        tokens.copy_(torch.where(wrong, (tokens + 1) % 512, tokens))
        self.input_buffers.input_ids[:num_reqs] = tokens.int()

    patch.setattr(EarlyExitSpeculator, "_run_step", run_step)


@torch.inference_mode()
def recapture(speculator):
    """Capture the draft steps' graphs anew, as they are now."""
    speculator.init_cudagraph_manager(speculator._graphs[0].cudagraph_mode)
    speculator.capture()


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_identity_from_graphs(
    engine, random_target, spec, generate, plain, runner_of, kind, force_kernels, monkeypatch
):
    expected, seeded = plain
    sampling, kernels, in_graphs = ENGINES[kind]
    calls = force_kernels(monkeypatch) if kernels else None
    spec = spec | {"draft_sample_method": sampling}
    with (
        as_on_a_gpu("FULL_DECODE_ONLY", SIZES, in_graphs) as seen,
        engine(random_target, spec, **OPTIONS, **IN_GRAPHS) as llm,
    ):
        runner = runner_of(llm)
        targets, drafts = runner.cudagraph_manager.graphs, runner.speculator._graphs
        assert sorted(graph.num_tokens for graph in targets) == SIZES
        assert list(drafts) == ([0] if sampling == "greedy" else [0, 1, 2])
        for manager in drafts.values():
            assert sorted(graph.num_tokens for graph in manager.graphs) == DRAFT_SIZES
        check_start(seen, runner)
        num_calls = dict(calls or {})
        for policy in ("fixed", "goodput"):
            answers, drafted, accepted = outcome(llm, generate, policy)
            assert answers == expected, policy
            assert accepted == drafted and (drafted or policy == "goodput"), policy
        with pytest.MonkeyPatch.context() as patch:
            corrupt(patch)
            answers, drafted, accepted = outcome(llm, generate)
        assert answers == expected
        assert 0 < accepted < drafted
        assert all(graph.num_replays for graph in drafts[0].graphs.values())
        if sampling == "auto":
            from vllm_eesd.policy import DRAWN, SHARED_NOISE

            assert not any(graph.num_replays for graph in drafts[DRAWN].graphs.values())
            answers, drafted, accepted = outcome(llm, generate, temperature=NEARLY_GREEDY)
            assert answers == expected
            assert accepted
            assert sum(graph.num_replays > 0 for graph in drafts[DRAWN].graphs.values()) > 1
            assert not any(graph.num_replays for graph in drafts[SHARED_NOISE].graphs.values())
            answers, drafted, accepted = outcome(llm, generate, temperature=NEARLY_GREEDY, seed=SEED)
            assert answers == seeded
            assert accepted
            assert sum(graph.num_replays > 0 for graph in drafts[SHARED_NOISE].graphs.values()) > 1
        assert sum(graph.num_replays > 0 for graph in targets.values()) > 2
        if calls is not None:
            assert num_calls["exit_head"] and num_calls["kv_fill"] and calls["exit_head"] == num_calls["exit_head"]
        if kind == "greedy drafts, kernels":
            check_plants(llm, runner.speculator, generate, expected)


def check_start(seen, runner):
    """The memory profile measured its own graphs and left nothing; the policy learned nothing of the warm-up."""
    assert seen.graph_memory is not None and seen.graph_memory >= 0
    num_draft_graphs = len(DRAFT_SIZES) * len(runner.speculator._graphs)
    assert seen.num_profiled == 2 + num_draft_graphs  # the target's two largest, and the draft steps'
    assert len(seen.graphs) == seen.num_profiled + len(SIZES) + num_draft_graphs
    assert not any(graph.num_replays for graph in seen.graphs[: seen.num_profiled])
    assert seen.warm_up_rounds > 3  # vLLM's made-up requests were decoded, with drafts,
    rounds = runner.speculator.rounds
    assert rounds.stats.rounds == rounds.stats.emitted == runner.speculator.breaker.num_faults == 0  # and not counted
    policy = rounds.policy
    assert not policy.costs.state()["verify_ms"]
    fresh = fresh_policy(runner)
    every = np.arange(runner.max_num_reqs)
    assert policy.metrics(every[:0]) == fresh.metrics(every[:0]) | {"costs": policy.metrics(every[:0])["costs"]}
    for name, value in vars(fresh.posterior).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(policy.posterior, name), value, err_msg=name)


def fresh_policy(runner):
    from vllm_eesd.host.round_setup import build_policy_of

    return build_policy_of(runner.vllm_config.speculative_config, runner.max_num_reqs)


def check_plants(llm, speculator, generate, expected):
    """Whatever a graph must not hold has drafts rejected; verification makes up for it."""
    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    right, steps = EarlyExitSpeculator._draft, [0]

    def counting_in_python(self, *args, **kwargs):
        right(self, *args, **kwargs)
        steps[0] = (steps[0] + 1) % K
        self._inputs.columns.fill_(steps[0])  # a Python number, which a graph keeps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyExitSpeculator, "_draft", counting_in_python)
        recapture(speculator)
        answers, drafted, accepted = outcome(llm, generate)
        assert answers == expected and accepted < drafted
    recapture(speculator)
    answers, drafted, accepted = outcome(llm, generate)
    assert answers == expected and 0 < accepted == drafted
    buffers, inputs = speculator.input_buffers, speculator._inputs
    for name in ("input_ids", "positions"):
        here = getattr(buffers, name)
        setattr(buffers, name, here.clone())  # a buffer that moves: the graph's stays behind
        speculator._inputs = inputs._replace(**{name: getattr(buffers, name)})
        answers, drafted, accepted = outcome(llm, generate)
        assert answers == expected and accepted < drafted, name
        setattr(buffers, name, here)
        speculator._inputs = inputs

    def reading(self, *args, **kwargs):
        return int(self._inputs.columns[0])

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="reads the device's values"):
        patch.setattr(EarlyExitSpeculator, "_draft", reading)
        recapture(speculator)
    recapture(speculator)
