"""Faults while drafting: the round drafts nothing, and after a few of them speculation is off for the process."""

from __future__ import annotations

import traceback

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

logger = init_logger("vllm.eesd")
#: Faults after which speculation stays off until the process is started again.
MAX_FAULTS = 3
#: Rounds in a row without a fault after which earlier ones are forgiven: a server that runs for months meets a few.
FORGIVEN_AFTER_ROUNDS = 1000


class CircuitBreaker:
    """Counts the rounds in which drafting raised; the `MAX_FAULTS`-th opens it for good.

    **Why a failed round cannot change the output.** What a round leaves is K/V in the slots of tokens that are
    not computed yet, from its input token on: of the target's layers below N, and of the exit layer. That is also
    what a rejected draft leaves. No token attends past its own position, a position's slots are written by the target's
    forward (exit layer included) before anything there is read, vLLM caches a block for other requests only when all
    its tokens are computed, and `allocated_tokens` keeps drafting inside blocks that are the request's own. So a failed
    round needs no repair: no draft is scheduled, and the next step runs the input token as a plain one would.
    What the adapter itself knew may be half written; it drops that and admits every request anew. What sampled drafts
    were drawn from is dropped with them: the batch has no draft left that it could belong to. On Model Runner V2, whose
    scheduler plans drafts that it has not seen, the worker trims them all away (`RaggedVerification`), and what a draft
    step left in the device's buffers is written anew before the next one reads it.

    **Several ranks.** Draft steps and target steps use the same collectives. A rank that left its round early would
    pair its next collective with another one of its peers, and compute with wrong numbers; so with tensor parallelism
    the rank ends its process, and vLLM's executor ends the engine as for any worker that died.

    **A GPU.** An error that the device itself reports (an illegal access, say) breaks its context: whatever runs next
    fails too, the target's forward included, and the engine ends as it would without EESD.
    """

    def __init__(self) -> None:
        self.num_faults = 0
        self.is_open = False
        #: Faults not forgiven yet.
        self.recent = 0
        self._clean_rounds = 0

    def passed(self) -> None:
        """Count a round that went well."""
        if self.recent:
            self._clean_rounds += 1
            if self._clean_rounds >= FORGIVEN_AFTER_ROUNDS:
                self.recent = 0

    def fault(self, error: Exception) -> None:
        """Count a round that raised `error` and log one line.

        Raises:
            SystemExit: other ranks wait for this one.
        """
        self.num_faults += 1
        self.recent, self._clean_rounds = self.recent + 1, 0
        cause = _described(error)
        if get_tp_group().world_size > 1:
            logger.error("eesd: drafting failed on one of several ranks, which ends the engine: %s", cause)
            raise SystemExit(1)
        self.is_open = self.recent >= MAX_FAULTS
        if self.is_open:
            logger.error(
                "eesd: drafting failed %d times, speculation is off until a restart; requests go on without it: %s",
                self.recent,
                cause,
            )
        else:
            logger.warning("eesd: drafting failed, no request drafts in this round; requests go on: %s", cause)
        logger.debug("eesd: the fault in full", exc_info=error)

    def as_dict(self) -> dict[str, int]:
        """Return what the metrics show: faults since the start, and whether speculation is off because of them."""
        return {"drafter_faults": self.num_faults, "speculation_off": self.is_open}


def _described(error: Exception) -> str:
    """Return an error's kind, message and place on one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.200} (in {place.name}, {place.filename}:{place.lineno})"
