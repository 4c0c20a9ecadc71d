"""Skip the draft decision for a few steps when recent rounds drafted nothing: deciding is itself the overhead."""

from __future__ import annotations

#: Rounds between two decisions about requests that may not draft at all.
MAY_NOT_DRAFT = 64


class IdleBackoff:
    """Counts the rounds in which a batch goes on as it was, one token each, without a decision about drafts.

    It ends by itself as soon as the batch is another, or a step does anything but decode.

    Attributes:
        num_skipped: rounds skipped since the last `take`.
    """

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._left = self.num_skipped = 0

    def begin(self, num_rounds: int, request_ids: list[str]) -> None:
        """Skip the decision for so many rounds of this batch, 0 for none."""
        self._left = num_rounds
        if num_rounds:
            self._request_ids = list(request_ids)

    def goes_on(self, request_ids: list[str], only_decoded: bool) -> bool:
        """Return whether the round after the step just run is one to skip; if not, the back-off is over.

        Args:
            request_ids: of the step's rows.
            only_decoded: whether each of them ran one token and emitted one.
        """
        if self._left and only_decoded and request_ids == self._request_ids:
            self._left -= 1
            self.num_skipped += 1
            return True
        self._left = 0
        return False

    def take(self) -> int:
        """Return the rounds skipped since the last call."""
        skipped, self.num_skipped = self.num_skipped, 0
        return skipped
