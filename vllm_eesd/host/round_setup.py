"""What both runners build a round from: the policy, the trace of rounds, and the times that all ranks learn."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllm_eesd.host.compat import get_tp_group
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.policy import BetaPosterior, Calibration, CostModel, DraftLengthPolicy, build_policy
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.outcome import StepTimes
from vllm_eesd.traces.rounds import RoundTrace


def own_file(path: str | None, engine_index: int) -> str | None:
    """Return the file of this one of several engines: `x.json`, `x.1.json`, `x.2.json`; None for None."""
    if path is None or not engine_index:
        return path
    name, ending = os.path.splitext(path)
    return f"{name}.{engine_index}{ending}"


def open_trace(config: EESDSpeculativeConfig) -> RoundTrace | None:
    """Return the writer of `trace_file` on the rank that has it, None elsewhere and where none is named."""
    path = own_file(config.eesd.trace_file, config.engine_index)
    if path is None or get_tp_group().rank_in_group:  # every rank sees the same rounds
        return None
    settings = {"policy": config.eesd.policy, "num_speculative_tokens": config.num_speculative_tokens}
    return RoundTrace(path, settings | {"exit_layer": config.exit_head.exit_layer})


def is_watched(config: EESDSpeculativeConfig, counters: DraftStats) -> bool:
    """Return whether every round is recorded or traced, so that none may be skipped."""
    # Asked of the config: with several ranks one alone has the trace, and all must skip the same rounds.
    return config.eesd.trace_file is not None or counters.recording


def build_policy_of(
    config: EESDSpeculativeConfig,
    max_num_reqs: int,
    name: str | None = None,
    like: DraftLengthPolicy | None = None,
    costs: CostModel | None = None,
) -> DraftLengthPolicy:
    """Return the policy of an engine that runs `max_num_reqs` requests at once.

    Args:
        name: another policy than the configured one, with its default arguments.
        like: whose costs and calibration it shares; None starts from the head's.
        costs: of a policy that this one follows because the weights are others, of which nothing was learned so far;
            None starts from a guess, and from the state that was kept.
    """
    head, eesd = config.exit_head, config.eesd
    posterior = BetaPosterior(max_num_reqs, head.prior.alpha, head.prior.beta)
    name = name or eesd.policy
    args, state_file = {}, None
    if name == eesd.policy:
        args, state_file = eesd.policy_args, own_file(eesd.state_file, config.engine_index)
    if like is not None:
        return build_policy(name, posterior, eesd.seed, args, like.costs, like.calibration, state_file)
    restores = costs is None
    if costs is None:  # until measured: a draft step takes its layers' share of a plain step
        costs = CostModel((head.exit_layer + head.own_layers) / head.verifier.num_hidden_layers)
    calibration = Calibration() if config.head_directory is None else Calibration.load(config.head_directory)
    return build_policy(name, posterior, eesd.seed, args, costs, calibration, state_file, restores)


def agree_on_times(every: int) -> Callable[[StepTimes], list[StepTimes]] | None:
    """Return what makes every rank learn rank 0's times, as `round.outcome.Learner` asks for it; None with one rank.

    Args:
        every: steps whose times travel together.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return None
    waiting: list[StepTimes] = []

    def agree(times: StepTimes) -> list[StepTimes]:
        waiting.append(times)
        if len(waiting) < every:
            return []
        agreed = group.broadcast_object(list(waiting), src=0)
        waiting.clear()
        return agreed

    return agree
