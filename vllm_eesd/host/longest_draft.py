"""How long a draft an engine's other options leave room for, before vLLM has put them together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm.usage.usage_lib import UsageContext

from vllm_eesd.config import EESDConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.eesd")


class Bound(NamedTuple):
    """The longest draft that an option allows, in tokens, and what the option says."""

    longest: int
    option: str


def fitting(wanted: int, eesd: EESDConfig, args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the longest draft of an engine, in tokens: what is wanted, or what fits if the user asked for no length.

    Args:
        wanted: the user's, or the default.
        args: the engine's; what the user left out is None.
    Raises:
        ValueError: the user's length does not fit, or no draft does; one line.
    """
    asked_for = eesd.num_speculative_tokens is not None
    bounds = list(_of_options(eesd, args))
    if not asked_for:  # what vLLM takes by itself it takes later, and checks the user's length against it
        bounds += _of_defaults(args, target, parallel)
    longest, option = min(bounds, default=Bound(wanted, ""))
    if longest >= wanted:
        return wanted
    if asked_for or longest < 1:
        allowed = f"at most {longest} there" if longest >= 1 else "a larger value there"
        raise ValueError(f"eesd: num_speculative_tokens={wanted} does not fit {option}; allowed: {allowed}")
    logger.warning("eesd: num_speculative_tokens is %d instead of %d, which is what fits %s", longest, wanted, option)
    return longest


def _of_options(eesd: EESDConfig, args: EngineArgs) -> Iterator[Bound]:
    """Yield the bounds of what the user has set."""
    threshold, budget = args.long_prefill_token_threshold, args.max_num_batched_tokens
    # The scheduler pads a request of one token by the longest draft, and then insists on scheduling all of it.
    # A schedule of lengths by batch size turns the padding off.
    if eesd.num_speculative_tokens_per_batch_size is None:
        if threshold > 0:
            yield Bound(threshold - 1, f"long_prefill_token_threshold={threshold}")
        if budget is not None:
            yield Bound(budget - 1, f"max_num_batched_tokens={budget}")
    if args.enable_lora and budget is not None and args.max_num_seqs is not None:
        yield _with_adapters(budget, args.max_num_seqs)


def _of_defaults(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> Iterator[Bound]:
    """Yield the bounds of what vLLM sets where the user has not; which of several, hangs on who starts the engine."""
    if not args.enable_lora or None not in (args.max_num_batched_tokens, args.max_num_seqs):
        return
    for context in UsageContext:
        filled = copy.copy(args)
        filled._set_default_max_num_seqs_and_batched_tokens_args(context, target, parallel)
        yield _with_adapters(filled.max_num_batched_tokens, filled.max_num_seqs)


def _with_adapters(budget: int, num_reqs: int) -> Bound:
    """vLLM wants room in a step for the longest draft of every request where there may be adapters."""
    option = f"enable_lora with max_num_batched_tokens={budget} and max_num_seqs={num_reqs}"
    return Bound(budget // num_reqs - 1, option)
