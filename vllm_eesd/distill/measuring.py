"""How much held-out text a run can afford to be measured on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch import Tensor, nn

from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.metrics import evaluate
from vllm_eesd.distill.target import Target

#: Windows measured on at most; 64 x 512 tokens give the agreement to about 0.3 percentage points.
MOST_WINDOWS = 64
#: Of those, what is measured again and again during training; no run is measured on fewer.
WATCHED_WINDOWS = 4
#: Of a run's time that measuring may take.
SHARE = 0.05
#: Windows that are trained on in the time that one is measured in. Measuring runs head and LM head once for each of the
#: 8 places of a draft, in float32; training runs each of them three times, counting gradients.
WINDOWS_TRAINED = 4


def num_windows(config: DistillConfig, window_s: Callable[[], float]) -> int:
    """Return how many held-out windows can be measured within `SHARE` of a run, 4 to 64.

    Args:
        config: of the run, whose steps or minutes say how long it is expected to be.
        window_s: returns the seconds that measuring one window takes; asked only where the run's minutes are limited.
    """
    trained = float(config.last_step * config.batch)
    if config.minutes is not None:
        trained = min(trained, 60 * config.minutes / window_s() * WINDOWS_TRAINED)
    watched = WATCHED_WINDOWS * (trained / config.batch // config.measure_every)
    affordable = SHARE * trained / WINDOWS_TRAINED - watched
    # Before and after; of the target's greedy text also once to write it.
    writes = config.self_generate or config.measure_greedy or config.regenerate or config.asks_itself
    passes = 5 if writes else 2
    return int(min(MOST_WINDOWS, max(WATCHED_WINDOWS, affordable // passes)))


def seconds_a_window(target: Target, head: nn.Module, windows: Tensor) -> float:
    """Return how long measuring one window takes.

    Args:
        windows: [num_windows, seq_len] int64; the first is measured.
    """
    began = time.perf_counter()
    evaluate(target, head, windows[:1])
    return max(time.perf_counter() - began, math.ulp(1.0))
