"""Drafts drawn at each request's temperature, and the distributions they came from, kept until they are verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.kernels.cpu.exit_head import draw_tokens

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class DraftSampling:
    """Draws draft tokens of Model Runner V1's rows from the draft model's distribution at the request's temperature.

    Greedy requests draft the most probable token. So do requests under a grammar, certain of it: the grammar cuts a
    draft because of its token, which only a draft that was not drawn allows. Other sampling parameters do not shape
    the draft distribution; they are the target's, and verification keeps its distribution whatever was drafted from.

    Kept distributions are logits, vocab_size of them per draft token: 64 requests with 8 drafts over 128256 tokens
    take 260 MB in float32.
    """

    def __init__(self) -> None:
        self._logits: dict[str, list[torch.Tensor]] = {}
        self._request_ids: list[str] = []
        self._temperature = np.zeros(0, dtype=np.float32)
        self._certain = np.zeros(0, dtype=bool)
        self._generators: dict[int, torch.Generator] = {}

    def begin_round(self, runner: GPUModelRunner, finished: set[str]) -> None:
        """Forget what has been verified, and read what the rows of the runner's batch draft with.

        A request that is not in the batch has been passed over by the scheduler and still has its drafts.
        """
        batch = runner.input_batch
        self._request_ids = list(batch.req_ids)
        # What ended in a step without tokens, the last one before an idle server, was told to no round.
        ended = [request_id for request_id in self._logits if request_id not in runner.requests]
        self.forget((*finished, *ended, *self._request_ids))
        self._temperature = batch.temperature_cpu[: len(self._request_ids)].copy()
        self._generators = batch.generators
        if self._temperature.any():
            params = (runner.requests[request_id].sampling_params for request_id in self._request_ids)
            self._certain = np.array([p.structured_outputs is not None for p in params], dtype=bool)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what drafts of these requests were drawn from: none of them will be verified any more."""
        for request_id in request_ids:
            self._logits.pop(request_id, None)

    def draw(self, rows: np.ndarray, logits: torch.Tensor, best: np.ndarray) -> np.ndarray:
        """Return each row's draft token, [num_rows] int64, and keep the logits of those that sample.

        Args:
            rows: [num_rows] int64, of the batch.
            logits: [num_rows, vocab_size], before temperature.
            best: [num_rows] int64, the most probable token.
        """
        sampled = self._temperature[rows] > 0
        if not sampled.any():
            return best
        certain = np.flatnonzero(self._certain[rows])
        if len(certain):
            logits = logits.clone()
            logits[certain] = -torch.inf
            logits[certain, best[certain]] = 0.0
        uniforms = torch.rand(len(rows), dtype=torch.float64)
        for index, row in enumerate(rows.tolist()):
            if (generator := self._generators.get(row)) is not None:
                uniforms[index : index + 1].uniform_(generator=generator)
            if sampled[index]:
                self._logits.setdefault(self._request_ids[row], []).append(logits[index])
        return draw_tokens(logits, torch.from_numpy(self._temperature[rows]), uniforms).numpy()

    def keep_certain(self, row: int, token_ids: Sequence[int], vocab_size: int) -> None:
        """Keep that these tokens are a row's draft for certain: they were copied, not drawn."""
        if self._temperature[row] > 0 and len(token_ids):
            logits = torch.full((len(token_ids), vocab_size), -torch.inf)
            logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 0.0
            self._logits[self._request_ids[row]] = list(logits)

    def logits_of(self, request_ids: Sequence[str], num_drafts: Sequence[int], vocab_size: int) -> torch.Tensor | None:
        """Return what these requests' drafts were drawn from; None if none was drawn.

        Args:
            request_ids: of the batch.
            num_drafts: how many drafts of each are verified: the first ones of those drawn, the scheduler may cut.
            vocab_size: of the logits.
        Returns:
            [num_reqs, longest, vocab_size], before temperature; 0 where nothing was drawn.
        """
        kept = [self._logits.get(request_id, [])[:num] for request_id, num in zip(request_ids, num_drafts, strict=True)]
        drawn = next((logits[0] for logits in kept if logits), None)
        if drawn is None:
            return None
        gathered = drawn.new_zeros(len(kept), max(num_drafts), vocab_size)
        for request, logits in enumerate(kept):
            if logits:
                torch.stack(logits, out=gathered[request, : len(logits)])
        return gathered
