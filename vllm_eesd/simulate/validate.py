"""What `eesd plan` says beside what was measured: the same prompts, the same closed batches, on the same machine.

A closed batch is what `eesd bench latency` runs: so many requests begin together, each generates a fixed number of
tokens, and nobody takes the place of one that is done. Requests whose drafts are accepted more often end earlier, and
the rest go on in a smaller batch; a plan of a server that is always full (`eesd plan`) knows no such tail. Prompts
take their time too. And plain vLLM's step is not EESD's step without drafts: it fills no KV of an exit layer, and where
vLLM schedules ahead it waits for nobody. What is modelled, then: the recorded acceptance, the policy's decisions at
these costs, every step at its own number of requests and drafts, and plain steps and prompts by their measured ratio to
EESD's (`plan_costs.py`), all timed within minutes of the speedup they predict. Not modelled: copies, for they are
validated without (`eesd-head`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_eesd.policy import BetaPosterior, Calibration, CostModel, build_policy
from vllm_eesd.simulate.plan_costs import BatchCosts, fitted_to_others
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


def validate(setting: Setting, batches: Mapping[int, BatchCosts], measured: Mapping[int, float]) -> list[Validation]:
    """Return a row per batch size that was measured.

    Args:
        batches: batch size -> what it costs on that machine.
        measured: batch size -> speedup.
    Raises:
        ValueError: the costs are too few to fit a roofline to.
    """
    rows = []
    for batch, speedup in measured.items():
        own = batches[batch]
        machine, share = fitted_to_others(batches, batch, setting.shape, setting.draft_layers, setting.context)
        modelled = costs_of(machine, batch, setting.trace.num_speculative_tokens)
        rows.append(
            Validation(
                batch,
                speedup,
                closed_batches(setting, own, batch),
                # Prompts are in no roofline of steps: their times are this size's own.
                closed_batches(setting, replace(own, costs=modelled, plain_share=share), batch),
            )
        )
    return rows


def closed_batches(setting: Setting, batch_costs: BatchCosts, batch: int) -> float:
    """Return the speedup over plain decoding of the trace's requests, `batch` at a time.

    One policy serves all of them, as in an engine that has run a while: it knows the costs.

    Args:
        batch_costs: of steps and of prompts.
    """
    model = CostModel()
    model.restore(batch_costs.costs)
    trace, world = setting.trace, World(batch_costs.costs, seed=setting.seed)
    # The prompt gives the first token; the rest are decoded.
    requests = [request.first(setting.tokens - 1) for request in trace.requests]
    posterior = BetaPosterior(batch, *trace.prior)
    args = {"ngram": False} if setting.policy == "goodput" else {}
    policy = build_policy(setting.policy, posterior, setting.seed, args, model, setting.calibration)
    drafter = PolicyDrafter(policy)
    without_ms = with_ms = 0.0
    for group in _groups(requests, batch):
        steps = max(len(request.matches) for request in group)
        # Of requests that all generate the same number of tokens one by one, none ends before the others.
        without_ms += batch_costs.prompt_ms + steps * batch_costs.plain_share * world.plain_ms(len(group))
        replayed = replay(replace(trace, requests=list(group)), drafter, world, len(group))
        with_ms += batch_costs.prompt_ms * batch_costs.eesd_prompt_share + sum(replayed.ms)
    return without_ms / with_ms


def _groups(requests: Sequence[RequestTrace], size: int) -> list[Sequence[RequestTrace]]:
    return [requests[first : first + size] for first in range(0, len(requests), size)]
