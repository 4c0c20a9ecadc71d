"""What the rule of Model Runner V2 must be worth, on a device whose host runs ahead of it: `compare_draft_rules.py`."""

import numpy as np
import pytest
from compare_draft_rules import TRACES, goodput_by_rule

TRACE = {path.name.split(".")[0]: path for path in TRACES}


@pytest.mark.parametrize(("batch", "factor", "num_seeds"), [(1, 1.08, 3), (32, 1.03, 2)])
def test_deciding_ahead_beats_waiting_for_confidences(batch, factor, num_seeds):
    found = [
        goodput_by_rule("8B", batch, TRACE["held_out_code"], 1.0, seed, ["waits", "ahead"]) for seed in range(num_seeds)
    ]
    assert np.mean([row["ahead"] for row in found]) >= factor * np.mean([row["waits"] for row in found])


@pytest.mark.parametrize("batch", [1, 8, 32, 64])
def test_where_nothing_can_be_predicted_it_costs_next_to_nothing(batch):
    found = goodput_by_rule("8B", batch, TRACE["random_tokens"], 1.0, 0, ["ahead", "n-grams"])
    assert min(found.values()) >= 0.98
