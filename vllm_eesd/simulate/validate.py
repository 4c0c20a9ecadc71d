"""What `eesd plan` says beside what was measured: the same prompts, the same closed batches, on the same machine.

A closed batch is what `eesd bench latency` runs: so many requests begin together, each generates a fixed number of
tokens, and nobody takes the place of one that is done. Requests whose drafts are accepted more often end earlier, and
the rest go on in a smaller batch; a plan of a server that is always full (`eesd plan`) knows no such tail. Prompts
take their time too, the same with drafts and without. And plain vLLM's step is not EESD's step without drafts: it
fills no KV of an exit layer, and where vLLM schedules ahead it waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from vllm_eesd.policy import BetaPosterior, Calibration, CostModel, build_policy
from vllm_eesd.simulate.fit import fit, points_of
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.roofline import Shape, costs_of
from vllm_eesd.simulate.world import World
from vllm_eesd.trace import DenseTrace, RequestTrace


@dataclass(frozen=True)
class Validation:
    """One batch size.

    Attributes:
        batch: requests that begin together.
        measured: speedup over plain decoding.
        at_measured_costs: the speedup predicted from what steps of this size cost.
        at_modelled_costs: from what a roofline says they cost that was fitted to the steps of all other sizes.
    """

    batch: int
    measured: float
    at_measured_costs: float
    at_modelled_costs: float

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted / measured - 1, at measured and at modelled costs."""
        return self.at_measured_costs / self.measured - 1, self.at_modelled_costs / self.measured - 1


@dataclass(frozen=True)
class Setting:
    """What a validation takes as given.

    Attributes:
        trace: recorded acceptance of the prompts, in their order.
        calibration: of the head that drafted.
        policy: its name.
        tokens: each request generated.
        shape: the target's.
        draft_layers: layers a draft step runs through.
        context: tokens of a request in the cache, about.
        seed: of the policy.
    """

    trace: DenseTrace
    calibration: Calibration
    policy: str
    tokens: int
    shape: Shape
    draft_layers: int
    context: int
    seed: int = 0


def validate(
    setting: Setting, costs: dict[str, Any], plain: dict[int, tuple[float, float]], measured: dict[int, float]
) -> list[Validation]:
    """Return a row per batch size that was measured.

    Args:
        costs: of `CostModel.state`, measured on that machine.
        plain: batch size -> (ms of a batch's prompts and first tokens, ms of a plain step), measured without EESD.
        measured: batch size -> speedup.
    Raises:
        ValueError: the costs are too few to fit a roofline to.
    """
    rows = []
    for batch, speedup in measured.items():
        prompt_ms, plain_ms = plain[batch]
        modelled = costs_of(_fitted_without(setting, costs, batch), batch, setting.trace.num_speculative_tokens)
        modelled_ms = World(modelled).plain_ms(batch) * _plain_share(costs, plain, batch)
        rows.append(
            Validation(
                batch,
                speedup,
                closed_batches(setting, costs, batch, prompt_ms, plain_ms),
                closed_batches(setting, modelled, batch, prompt_ms, modelled_ms),
            )
        )
    return rows


def closed_batches(setting: Setting, costs: dict[str, Any], batch: int, prompt_ms: float, plain_ms: float) -> float:
    """Return the speedup over plain decoding of the trace's requests, `batch` at a time.

    One policy serves all of them, as in an engine that has run a while: it knows the costs.

    Args:
        costs: of EESD's steps.
        prompt_ms: of a batch's prompts and first tokens, with EESD and without.
        plain_ms: of a plain step.
    """
    model = CostModel()
    model.restore(costs)
    trace, world = setting.trace, World(costs, seed=setting.seed)
    # The prompt gives the first token; the rest are decoded.
    requests = [request.first(setting.tokens - 1) for request in trace.requests]
    posterior = BetaPosterior(batch, *trace.prior)
    policy = build_policy(setting.policy, posterior, setting.seed, {}, model, setting.calibration)
    without_ms = with_ms = 0.0
    for group in _groups(requests, batch):
        steps = max(len(request.matches) for request in group)
        without_ms += prompt_ms + steps * plain_ms
        replayed = replay(replace(trace, requests=list(group)), PolicyDrafter(policy), world, len(group))
        with_ms += prompt_ms + sum(replayed.ms)
    return without_ms / with_ms


def _plain_share(costs: dict[str, Any], plain: dict[int, tuple[float, float]], batch: int) -> float:
    """Return plain vLLM's step over EESD's without drafts, the median of all sizes but this one; 1 if unknown."""
    idle = {int(size): ms for size, curve in costs["verify_ms"].items() for drafts, ms in curve if drafts == 0}
    shares = [ms / idle[size] for size, (_, ms) in plain.items() if size != batch and size in idle]
    return median(shares) if shares else 1.0


def _groups(requests: Sequence[RequestTrace], size: int) -> list[Sequence[RequestTrace]]:
    return [requests[first : first + size] for first in range(0, len(requests), size)]


def _fitted_without(setting: Setting, costs: dict[str, Any], batch: int) -> Any:
    """Return the roofline fitted to the steps of every size but this one.

    Raises:
        ValueError: the others are too few.
    """
    points = [point for point in points_of(costs) if point.num_reqs != batch]
    if not {True, False} <= {point.is_draft for point in points}:
        raise ValueError(
            f"costs hold steps of {batch} requests only; allowed: target and draft steps of other sizes too"
        )
    rounds = [ms for _, ms in costs["draft_round_ms"]]
    round_ms = median(rounds) if rounds else 0.0
    return fit(points, setting.shape, setting.draft_layers, "float32", setting.context, round_ms)
