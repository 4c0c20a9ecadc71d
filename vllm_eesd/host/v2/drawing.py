"""Which rows of a round have drafts drawn at their requests' temperatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_eesd.kernels.reference.noise import MAX_POSITION
from vllm_eesd.policy import DRAWN, GREEDY, SHARED_NOISE
from vllm_eesd.round.draft import DraftRound

if TYPE_CHECKING:
    from vllm import SamplingParams


class Drawing:
    """What requests ask for that decides how their drafts are made and verified.

    Args:
        max_num_reqs, max_model_len: the engine's.
        draws_drafts: whether drafts of requests that sample are drawn at all.
        unseeded_too: see `Verification`.
    Attributes:
        has_grammar: [max_num_reqs] bool, by slot: a grammar cuts drafts for their tokens, so those are not drawn.
        names_logprobs: [max_num_reqs] bool, by slot: whose logprobs vLLM's rejection sampler would get wrong.
        may_share: whether this engine's verification can be by shared noise.
        has_margins: whether the margins of drafts drawn by the target's noise are known.
        shares_noise: [max_num_reqs] bool, by slot: drafts are drawn by the noise that the target's tokens will be, and
            must equal them; these may be cut for what they are.
    Raises:
        ValueError: texts may grow beyond the positions that the noise of drawn drafts tells apart.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, draws_drafts: bool, unseeded_too: bool = False) -> None:
        if draws_drafts and max_model_len > MAX_POSITION:
            allowed = f'at most {MAX_POSITION}, or "draft_sample_method": "greedy"'
            raise ValueError(f"eesd: max_model_len={max_model_len} is too long to draw drafts; allowed: {allowed}")
        self._draws_drafts, self._unseeded_too = draws_drafts, unseeded_too
        self.may_share = self.has_margins = True
        self.has_grammar, self.names_logprobs, self.shares_noise, self._samples = np.zeros(
            (4, max_num_reqs), dtype=bool
        )

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Take in a slot's new request."""
        self.has_grammar[slot] = params.structured_outputs is not None
        self.names_logprobs[slot] = bool(params.logprob_token_ids)
        self._samples[slot] = self._draws_drafts and params.temperature > 0
        self.shares_noise[slot] = self._samples[slot] and self._shares(params)

    def _shares(self, params: SamplingParams) -> bool:
        return self.may_share and (self._unseeded_too or params.seed is not None)

    def kind_of(self, params: SamplingParams) -> int:
        """Return the kind of the drafts of a request with these sampling parameters; see `RunningRequests`."""
        if not (self._draws_drafts and params.temperature > 0):
            return GREEDY
        if self._shares(params):
            return SHARED_NOISE if self.has_margins else DRAWN
        return DRAWN if params.structured_outputs is None else GREEDY

    def kind(self, round_: DraftRound) -> int:
        """Return the draft steps of a round: GREEDY, or DRAWN or SHARED_NOISE if there is such a draft among them."""
        sampling, shares = self._sampling(round_), self.shares_noise[round_.slots]
        if (sampling & shares).any():
            return SHARED_NOISE
        return DRAWN if (sampling & ~self.has_grammar[round_.slots]).any() else GREEDY

    def certain(self, round_: DraftRound) -> np.ndarray:
        """Return the rows of sampling requests whose drafts are not drawn, [num_rows] bool."""
        return self._sampling(round_) & self.has_grammar[round_.slots] & ~self.shares_noise[round_.slots]

    def _sampling(self, round_: DraftRound) -> np.ndarray:
        """Return the rows of sampling requests for which the exit head drafts, [num_rows] bool."""
        return self._samples[round_.slots] & (round_.lengths > 0) & ~round_.from_ngrams
