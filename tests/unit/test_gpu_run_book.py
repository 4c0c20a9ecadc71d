"""benchmarks/gpu/run_all.sh without a GPU: every stage up to where work would begin, and what a second run repeats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: In place of the interpreter: understands a stage's arguments as the stage would, and does none of its work.
STAND_IN = """
import argparse, json, os, runpy, sys

arguments = sys.argv[1:]
parse = argparse.ArgumentParser.parse_args

def parse_and_stop(parser, *args):
    options = parse(parser, *args)
    if getattr(options, "implementation", "").startswith("vllm_eesd.bench.latency"):
        from vllm_eesd.bench.engines import EngineSettings
        from vllm_eesd.bench.latency import check_methods, check_sizes
        from vllm_eesd.bench.prompts import read_prompts
        check_methods(options.methods, EngineSettings(options.model))
        check_sizes(len(read_prompts(options.prompts)), options.batch)
    if isinstance(getattr(options, "engine", None), dict):
        with open(os.environ["STAND_IN_LOG"] + ".engines", "a") as log:
            print(json.dumps(options.engine), file=log)
    raise SystemExit(0)

with open(os.environ["STAND_IN_LOG"], "a") as log:
    print(*arguments, file=log)
if os.environ.get("STAND_IN_FAILS", "nothing") in " ".join(arguments):
    sys.exit(7)
if arguments[:2] == ["-m", "pytest"]:
    assert all(os.path.exists(path) for path in arguments[2:] if path.startswith("tests")), arguments
    sys.exit(5 if arguments[-2:] == ["-m", "gpu"] else 0)
argparse.ArgumentParser.parse_args = parse_and_stop
if arguments[0] == "-m":
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__")
sys.argv = arguments
runpy.run_path(arguments[0], run_name="__main__")
"""


@pytest.fixture
def run_all(tmp_path):
    """Return run(*arguments, driver=True, **environment): (exit status, the stages' commands, what was printed)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    for name, text in (("nvidia-smi", "exit 0"), ("python", f'exec {sys.executable} {tmp_path}/stand_in.py "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    log = tmp_path / "log"

    def run(*arguments, driver=True, **environment):
        log.write_text("")
        environment |= {"PYTHON": str(tmp_path / "bin" / "python"), "WORK": str(tmp_path), "STAND_IN_LOG": str(log)}
        path = f"{tmp_path}/bin:{os.environ['PATH']}" if driver else "/usr/bin:/bin"
        command = ["bash", str(ROOT / "benchmarks" / "gpu" / "run_all.sh"), *arguments]
        done = subprocess.run(command, env=os.environ | environment | {"PATH": path}, capture_output=True, text=True)
        return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr

    return run


def test_every_stage_is_understood_and_only_failed_ones_are_repeated(run_all):
    status, commands, printed = run_all(STAND_IN_FAILS="end_to_end.py 8b")
    assert status == 1, printed
    assert printed.count("failed with status") == 1 and "end_to_end_8b (at most" in printed
    assert len(commands) == printed.count("(at most") == 16
    status, commands, printed = run_all()
    assert (status, [command.split()[1] for command in commands]) == (0, ["8b"]), printed
    assert run_all()[:2] == (0, [])
    assert len(run_all("smoke")[1]) == 1  # asked for by name: done or not


def test_without_a_compiler_or_without_graphs_output_is_the_same_too(run_all, tmp_path):
    """Each of the two reaches vLLM as it is meant: quotes and all."""
    status, commands, printed = run_all("eager", "graphs_alone")
    assert status == 0, printed
    assert all("lossless.py --max-tokens" in command for command in commands) and len(commands) == 2
    graphs_alone, eager = map(json.loads, (tmp_path / "log.engines").read_text().splitlines())
    assert eager.pop("enforce_eager") is True
    assert graphs_alone.pop("compilation_config") == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert set(eager) == set(graphs_alone) == {"gpu_memory_utilization"}


def test_nothing_runs_where_there_is_no_driver_or_no_such_stage(run_all):
    status, commands, printed = run_all(driver=False)
    if status == 3:  # a machine with a driver in /usr/bin has one
        assert not commands and "no NVIDIA driver answers" in printed
    status, commands, printed = run_all("smoke", "nosuch")
    assert (status, commands) == (2, []) and "no stage nosuch" in printed
