"""The soak, briefly; `make soak` runs it for 20 minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LIMIT_S = 1800


@pytest.mark.feature("a mixed load: arrivals, aborts, grammars, refusals, faults", "the same answers")
def test_a_short_soak(tmp_path):
    result = tmp_path / "soak.json"
    options = {"minutes": 0.2, "clients": 6, "cases": 13, "inject-every": 5, "seed": 1, "json": result}
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--eager"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    seen = json.loads(result.read_text(encoding="utf-8"))
    assert seen["wrong"] == [] and seen["failures"] == []
    # It was a soak, however slow the machine: answers were compared, and not of one kind of request only.
    assert seen["tokens_compared"] > 0
    assert sum(count > 0 for count in seen["requests"].values()) > 1, seen["requests"]
