"""What the plugin adds to a process of plain vLLM: modules (exact) and seconds (medians of alternating runs).

    python benchmarks/import_cost.py --runs 7            `vllm --help`, and loading plugins as every process does
    python benchmarks/import_cost.py --engine MODEL      also the start of a plain engine, in this process

Compared with the same where `VLLM_PLUGINS` names every plugin but this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

_REPORT = "import json, sys, time; began = time.perf_counter()\n{code}\nspent = time.perf_counter() - began\n"
_REPORT += "sys.stdout.flush(); print(); print(json.dumps([spent, sorted(sys.modules)]))"
HELP = """
sys.argv = ["vllm", "--help"]
from vllm.entrypoints.cli.main import main
try:
    main()
except SystemExit:
    pass
"""
LOAD = """
import vllm.engine.arg_utils, vllm.plugins
began = time.perf_counter()
vllm.plugins.load_general_plugins()
"""
ENGINE = """
from vllm import LLM
llm = LLM({model!r}, max_model_len=256, enforce_eager=True, skip_tokenizer_init=True)
"""


def run(code: str, plugin: bool) -> tuple[float, set[str]]:
    """Return (seconds, names of the modules there are in the end) of a fresh process that runs `code`."""
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    others = {entry.name for entry in entry_points(group="vllm.general_plugins")} - {"eesd"}
    environment |= {} if plugin else {"VLLM_PLUGINS": ",".join(sorted(others))}
    command = [sys.executable, "-c", _REPORT.format(code=code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(modules)


def compare(code: str, runs: int) -> dict[str, Any]:
    """Return what the plugin adds to `code`: names of modules, and the medians of the seconds without and with it."""
    without, having = [], []
    for _ in range(runs):
        without.append(run(code, False))
        having.append(run(code, True))
    added = sorted(having[-1][1] - without[-1][1])
    seconds = [statistics.median(seconds for seconds, _ in kind) for kind in (without, having)]
    return {"added": added, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--engine", metavar="MODEL", help="directory of a model to start a plain engine of")
    args = parser.parse_args()
    cases = {"vllm --help": HELP, "loading plugins": LOAD}
    if args.engine:
        cases["a plain engine, in this process"] = ENGINE.format(model=args.engine)
    for name, code in cases.items():
        found = compare(code, args.runs)
        before, after = found["seconds"]
        print(f"{name}: {len(found['added'])} modules, {after - before:+.3f} s ({before:.2f} -> {after:.2f})")


if __name__ == "__main__":
    main()
