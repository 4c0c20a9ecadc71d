"""One row of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eesd.simulate.replay import Replay


@dataclass(frozen=True)
class Outcome:
    """One policy's replay of one trace."""

    trace: str
    policy: str
    replay: Replay
    length: int | None = None  # best_fixed's

    def row(self) -> dict[str, str | float | int]:
        row = {
            "trace": self.trace,
            "policy": self.policy,
            "goodput_vs_plain": round(self.replay.goodput_vs_plain, 4),
            "mean_draft_length": round(self.replay.mean_draft_length, 3),
        }
        return row if self.length is None else row | {"length": self.length}
