"""Drafts drawn at each request's temperature, and the distributions they came from, kept until they are verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.v1.block_verification import Proposals, choose_each
from vllm_eesd.host.v1.truncation import draft_logits

if TYPE_CHECKING:
    from vllm_eesd.host.v1.batch import V1Step


class DraftSampling:
    """Draws draft tokens of Model Runner V1's rows from the draft model's distribution at the request's temperature.

    Greedy requests draft the most probable token. So do requests under a grammar, certain of it: the grammar cuts a
    draft because of its token, which only a draft that was not drawn allows. Top-k and top-p cut the draft distribution
    too. Other sampling parameters do not shape it; they are the target's, and verification keeps its distribution
    whatever was drafted from.

    Where a request has a generator of its own, its drafts are drawn by the noise with which the target's tokens will
    be: that of the generator, read ahead from a copy. They are verified by equality, see `shared_noise`, so of them no
    distribution is kept, and whatever is drafted changes no token.

    A kept distribution is vocab_size numbers per draft token: 64 requests with 8 drafts over 128256 tokens take 260 MB.
    What has none was certain: n-gram drafts, and those of greedy requests.
    """

    def __init__(self) -> None:
        self._drawn_from: dict[str, list[np.ndarray]] = {}
        self._request_ids: list[str] = []
        self._scale = np.zeros(0, dtype=np.float32)
        self._draws = np.zeros(0, dtype=bool)
        self._top_k: torch.Tensor | None = None
        self._top_p: torch.Tensor | None = None
        #: By row: those of the requests, and copies that are a draft further with every draft of the round.
        self._generators: dict[int, torch.Generator] = {}
        self._ahead: dict[int, torch.Generator] = {}
        self._copies: list[torch.Generator] = []
        self._draw_by: Callable[..., tuple[torch.Tensor, object]] | None = None

    def begin_round(self, step: V1Step) -> None:
        """Forget what has been verified, and read what the rows of the step's batch draft with.

        A request that is not in the batch has been passed over by the scheduler and still has its drafts, unless it was
        preempted.
        """
        self._request_ids = list(step.req_ids)
        # What ended in a step without tokens, the last one before an idle server, was told to no round.
        ended = [request_id for request_id in self._drawn_from if request_id not in step.requests]
        self.forget((*step.finished, *step.preempted, *ended, *self._request_ids))
        temperature = step.temperatures()
        self._draws = temperature > 0
        self._scale = np.where(self._draws, temperature, np.float32(1.0))
        self._top_k, self._top_p = step.top_k_and_top_p()
        self._generators, self._ahead, self._draw_by = step.generators(), {}, step.noise_sampler()
        if self._draws.any():
            self._draws &= ~step.has_grammar()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what drafts of these requests were drawn from: none of them will be verified any more."""
        for request_id in request_ids:
            self._drawn_from.pop(request_id, None)

    def draw(
        self,
        rows: np.ndarray,
        logits: torch.Tensor,
        best: np.ndarray,
        whole: Callable[[torch.Tensor, float], torch.Tensor],
    ) -> np.ndarray:
        """Return each row's draft token, [num_rows] int64, and keep what it was drawn from, if it was by itself.

        Args:
            rows: [num_rows] int64, of the batch.
            logits: [num_rows, vocabulary drafted from], before temperature.
            best: [num_rows] int64, the most probable token.
            whole: makes values over the target's vocabulary of those, see `DraftStep.whole`.
        """
        shares = np.array([row in self._generators for row in rows.tolist()], dtype=bool)
        tokens = best.copy()
        if shares.any():
            tokens[shares] = self._draw_by_shared_noise(rows[shares], logits[torch.from_numpy(shares)], whole)
        draws = self._draws[rows] & ~shares
        if not draws.any():
            return tokens
        q = whole(self._shaped(rows, logits).softmax(dim=-1), 0.0).numpy()
        uniforms = torch.rand(len(rows), dtype=torch.float64)
        for index, row in enumerate(rows.tolist()):
            if draws[index]:
                self._drawn_from.setdefault(self._request_ids[row], []).append(q[index])
        choose_each(q, uniforms.numpy(), tokens, draws)
        return tokens

    def _draw_by_shared_noise(
        self, rows: np.ndarray, logits: torch.Tensor, whole: Callable[[torch.Tensor, float], torch.Tensor]
    ) -> np.ndarray:
        """Return the tokens that these rows' generators draw next, [num_rows] int64; see `draw`."""
        for row in rows.tolist():
            if row not in self._ahead:
                if len(self._copies) == len(self._ahead):
                    self._copies.append(torch.Generator())
                ahead = self._ahead[row] = self._copies[len(self._ahead)]
                ahead.set_state(self._generators[row].get_state())
        generators = {index: self._ahead[row] for index, row in enumerate(rows.tolist())}
        assert self._draw_by is not None
        return self._draw_by(whole(self._shaped(rows, logits), -torch.inf), generators, None, None)[0].numpy()

    def _shaped(self, rows: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """Return logits at the rows' temperatures, cut by their top-k and top-p, float32."""
        k, p = (None if all_of is None else all_of[rows] for all_of in (self._top_k, self._top_p))
        return draft_logits(logits.float() / torch.from_numpy(self._scale[rows])[:, None], k, p)

    def proposals(self, request_ids: Sequence[str], num_drafts: Sequence[int], vocab_size: int) -> Proposals:
        """Return what these requests' drafts were drawn from.

        Args:
            request_ids: of the batch.
            num_drafts: how many drafts of each are verified: the first ones of those drawn, the scheduler may cut.
            vocab_size: of the logits.
        """
        found = Proposals.none(len(request_ids), vocab_size)
        kept: list[np.ndarray] = []
        for request, (request_id, num) in enumerate(zip(request_ids, num_drafts, strict=True)):
            if drawn_from := self._drawn_from.get(request_id, [])[:num]:
                found.first_q[request] = len(kept)
                kept += drawn_from
        return found._replace(q=np.stack(kept)) if kept else found
