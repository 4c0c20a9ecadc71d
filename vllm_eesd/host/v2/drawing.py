"""Which rows of a round have drafts drawn at their requests' temperatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_eesd.kernels.cpu.noise import MAX_POSITION
from vllm_eesd.round.draft import DraftRound

if TYPE_CHECKING:
    from vllm import SamplingParams


class Drawing:
    """What requests ask for that decides how their drafts are made and verified.

    Args:
        max_num_reqs, max_model_len: the engine's.
        draws_drafts: whether drafts of requests that sample are drawn at all.
    Attributes:
        has_grammar: [max_num_reqs] bool, by slot: a grammar cuts drafts for their tokens, so those are not drawn.
    Raises:
        ValueError: texts may grow beyond the positions that the noise of drawn drafts tells apart.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, draws_drafts: bool) -> None:
        if draws_drafts and max_model_len > MAX_POSITION:
            allowed = f'at most {MAX_POSITION}, or "draft_sample_method": "greedy"'
            raise ValueError(f"eesd: max_model_len={max_model_len} is too long to draw drafts; allowed: {allowed}")
        self._draws_drafts = draws_drafts
        self.has_grammar, self._samples = np.zeros((2, max_num_reqs), dtype=bool)

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Take in a slot's new request."""
        self.has_grammar[slot] = params.structured_outputs is not None
        self._samples[slot] = self._draws_drafts and params.temperature > 0

    def any_drawn(self, round_: DraftRound) -> bool:
        """Return whether any row has a draft drawn at its request's temperature."""
        return bool((self._sampling(round_) & ~self.has_grammar[round_.slots]).any())

    def certain(self, round_: DraftRound) -> np.ndarray:
        """Return the rows of sampling requests whose drafts are not drawn, [num_rows] bool."""
        return self._sampling(round_) & self.has_grammar[round_.slots]

    def _sampling(self, round_: DraftRound) -> np.ndarray:
        """Return the rows of sampling requests for which the exit head drafts, [num_rows] bool."""
        return self._samples[round_.slots] & (round_.lengths > 0) & ~round_.from_ngrams
