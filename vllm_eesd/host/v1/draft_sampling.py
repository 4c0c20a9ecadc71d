"""Drafts drawn at each request's temperature, and the distributions they came from, kept until they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.v1.block_verification import Proposals, choose_each

if TYPE_CHECKING:
    from vllm_eesd.host.v1.batch import V1Step


class DraftSampling:
    """Draws draft tokens of Model Runner V1's rows from the draft model's distribution at the request's temperature.

    Greedy requests draft the most probable token. So do requests under a grammar, certain of it: the grammar cuts a
    draft because of its token, which only a draft that was not drawn allows. Other sampling parameters do not shape
    the draft distribution; they are the target's, and verification keeps its distribution whatever was drafted from.

    A kept distribution is vocab_size numbers per draft token: 64 requests with 8 drafts over 128256 tokens take 260 MB.
    What has none was certain: n-gram drafts, and those of greedy requests.
    """

    def __init__(self) -> None:
        self._drawn_from: dict[str, list[np.ndarray]] = {}
        self._request_ids: list[str] = []
        self._scale = np.zeros(0, dtype=np.float32)
        self._draws = np.zeros(0, dtype=bool)
        self._generators: dict[int, torch.Generator] = {}

    def begin_round(self, step: V1Step) -> None:
        """Forget what has been verified, and read what the rows of the step's batch draft with.

        A request that is not in the batch has been passed over by the scheduler and still has its drafts.
        """
        self._request_ids = list(step.req_ids)
        # What ended in a step without tokens, the last one before an idle server, was told to no round.
        ended = [request_id for request_id in self._drawn_from if request_id not in step.requests]
        self.forget((*step.finished, *ended, *self._request_ids))
        temperature = step.temperatures()
        self._draws = temperature > 0
        self._scale = np.where(self._draws, temperature, np.float32(1.0))
        self._generators = step.generators()
        if self._draws.any():
            self._draws &= ~step.has_grammar()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what drafts of these requests were drawn from: none of them will be verified any more."""
        for request_id in request_ids:
            self._drawn_from.pop(request_id, None)

    def draw(self, rows: np.ndarray, logits: torch.Tensor, best: np.ndarray) -> np.ndarray:
        """Return each row's draft token, [num_rows] int64, and keep what it was drawn from, if it was.

        Args:
            rows: [num_rows] int64, of the batch.
            logits: [num_rows, vocab_size], before temperature.
            best: [num_rows] int64, the most probable token.
        """
        draws = self._draws[rows]
        if not draws.any():
            return best
        q = (logits.float() / torch.from_numpy(self._scale[rows])[:, None]).softmax(dim=-1).numpy()
        uniforms = torch.rand(len(rows), dtype=torch.float64)
        for index, row in enumerate(rows.tolist()):
            if (generator := self._generators.get(row)) is not None:
                uniforms[index : index + 1].uniform_(generator=generator)
            if draws[index]:
                self._drawn_from.setdefault(self._request_ids[row], []).append(q[index])
        tokens = best.copy()
        choose_each(q, uniforms.numpy(), tokens, draws)
        return tokens

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
