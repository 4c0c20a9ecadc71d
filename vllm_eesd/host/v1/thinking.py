"""Thinking budgets on Model Runner V1: every row of logits is told of its thought what a plain step would be.

vLLM's holder counts a request's thought in a state that it brings up to date in every step, by a token or by all that
the step emitted, with the drafts of the next one; where it does so under speculation it forces the end of a thought
one token early or late, and in a step without drafts into another request's row. Here a draft is a token that may yet
be emitted, so its row has the state that the row before has left, and what is emitted decides which state stays.
"""

from __future__ import annotations

import copy

import numpy as np

from vllm_eesd.host.compat import ThinkingBudgetStateHolder


class BudgetsOfRows(ThinkingBudgetStateHolder):
    """vLLM's holder of thinking budgets, for rows of logits in place of requests.

    Args:
        holder: of the batch; unchanged until `keep`.
        of_requests: [num_rows], the batch's row of each row of logits, a request's one after the other.
    """

    def __init__(self, holder: ThinkingBudgetStateHolder, of_requests: np.ndarray) -> None:
        self.__dict__.update(copy.copy(holder).__dict__)
        self._holder, self._requests = holder, of_requests.tolist()
        self._state = {row: holder._state[i] for row, i in enumerate(self._requests) if i in holder._state}
        self.cu_num_tokens, self.in_spec_mode = {}, False

    def update_state(
        self, output_token_ids: list[list[int]], spec_token_ids: list[list[int]] | None, repeat_indices: object = None
    ) -> None:
        """Bring every row's state up to date with the text before it, from the state of the row before.

        Args:
            output_token_ids: of every row, drafts included.
            spec_token_ids: not looked at, as `repeat_indices` is not.
        """
        states, done = self._state, {}
        for row, state in states.items():
            follows = row and self._requests[row] == self._requests[row - 1]
            # What a state holds is replaced, never changed in place.
            self._state = {row: dict(done[row - 1] if follows else state)}
            super().update_state(output_token_ids, None)
            done |= self._state
        self._state = done

    def keep(self, last_rows: list[int]) -> None:
        """Give the batch's holder the states after the last token that each request emits.

        Args:
            last_rows: the row of logits that token was sampled from, of every request.
        """
        for row in last_rows:
            if row in self._state:
                self._holder._state[self._requests[row]] = self._state[row]


def count_by_request(holder: ThinkingBudgetStateHolder, has_budget: list[bool]) -> None:
    """Have a batch's holder force the end of a thought in a row of its request's own, and of no other request.

    Where an engine drafts, vLLM lays out no row for a request without a draft. And a request that moves into the row of
    one that has ended has its budget from then on, in a plain engine too.

    Args:
        holder: of the batch.
        has_budget: of every row, whether its request asked for one.
    """
    holder.in_spec_mode = False
    for row in [row for row in holder._state if row >= len(has_budget) or not has_budget[row]]:
        del holder._state[row]


def rows_with_a_budget(holder: ThinkingBudgetStateHolder | None) -> set[int]:
    """Return the rows of the batch whose requests have a thinking budget."""
    return set() if holder is None else set(holder._state)
