"""Drafts drawn at each request's temperature, and the distributions they came from, kept until they are verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_eesd.host.v1.block_verification import Proposals, choose_each
from vllm_eesd.host.v1.gumbel import draw_with_margins, is_noise_of
from vllm_eesd.host.v1.truncation import draft_logits
from vllm_eesd.policy import DRAWN, GREEDY, SHARED_NOISE
from vllm_eesd.policy.calibration import margin_confidence

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
    distribution is kept, and whatever is drafted changes no token. So their confidence may look at the noise.

    A kept distribution is vocab_size numbers per draft token: 64 requests with 8 drafts over 128256 tokens take 260 MB.
    What has none was certain: n-gram drafts, and those of greedy requests.

    Args:
        unseeded_too: whether all requests that sample have a generator of their own.
    """

    def __init__(self, unseeded_too: bool = False) -> None:
        self._unseeded_too = unseeded_too
        #: Whether the noise of generators is known; None until vLLM's sampler is.
        self._knows_noise: bool | None = None
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

    def meet(self, step: V1Step) -> None:
        """Find out, once, whether vLLM's sampler draws by the noise that this engine can look at."""
        if self._knows_noise is None:
            self._knows_noise = is_noise_of(step.noise_sampler())

    def kind_of(self, params: Any) -> int:
        """Return the kind of the drafts of a request with these sampling parameters; see `RunningRequests`."""
        if params.temperature == 0:
            return GREEDY
        if self._unseeded_too or params.seed is not None or asks_processing(params):
            return SHARED_NOISE if self._knows_noise else DRAWN
        return DRAWN if params.structured_outputs is None else GREEDY

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
        confidence: np.ndarray,
        whole: Callable[[torch.Tensor, float], torch.Tensor],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's draft token, [num_rows] int64, and its confidence, [num_rows] float32.

        What a token was drawn from, if it was by itself, is kept. Its confidence may not look at what was drawn.

        Args:
            rows: [num_rows] int64, of the batch.
            logits: [num_rows, vocabulary drafted from], before temperature.
            best: [num_rows] int64, the most probable token.
            confidence: [num_rows] float32, its probability.
            whole: makes values over the target's vocabulary of those, see `DraftStep.whole`.
        """
        shares = np.array([row in self._generators for row in rows.tolist()], dtype=bool)
        tokens = best.copy()
        if shares.any():
            tokens[shares], margins = self._draw_by_shared_noise(rows[shares], logits[torch.from_numpy(shares)], whole)
            if margins is not None:
                confidence = confidence.copy()
                confidence[shares] = margin_confidence(margins)
        draws = self._draws[rows] & ~shares
        if not draws.any():
            return tokens, confidence
        q = whole(self._shaped(rows, logits).softmax(dim=-1), 0.0).numpy()
        uniforms = torch.rand(len(rows), dtype=torch.float64)
        for index, row in enumerate(rows.tolist()):
            if draws[index]:
                self._drawn_from.setdefault(self._request_ids[row], []).append(q[index])
        choose_each(q, uniforms.numpy(), tokens, draws)
        return tokens, confidence

    def _draw_by_shared_noise(
        self, rows: np.ndarray, logits: torch.Tensor, whole: Callable[[torch.Tensor, float], torch.Tensor]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens that these rows' generators draw next, [num_rows] int64, and their margins; see `draw`.

        Margins are [num_rows] float64; None where vLLM's sampler keeps them to itself.
        """
        for row in rows.tolist():
            if row not in self._ahead:
                if len(self._copies) == len(self._ahead):
                    self._copies.append(torch.Generator())
                ahead = self._ahead[row] = self._copies[len(self._ahead)]
                ahead.set_state(self._generators[row].get_state())
        generators, shaped = [self._ahead[row] for row in rows.tolist()], whole(self._shaped(rows, logits), -torch.inf)
        if self._knows_noise:
            return draw_with_margins(shaped, generators)
        assert self._draw_by is not None
        return self._draw_by(shaped, dict(enumerate(generators)), None, None)[0].numpy(), None

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


def asks_processing(params: Any) -> bool:
    """Return whether a request with these sampling parameters will be among `shared_noise.processed_rows`."""
    return bool(params.min_p or params.logit_bias) or params.thinking_token_budget is not None
