"""A `vllm serve` in processes of its own, for measurements: started, waited for, and stopped whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_LIMIT_S, STOP_LIMIT_S = 900.0, 30.0


@contextmanager
def serving(model: str, options: Sequence[str], log: Path, limit_s: float = START_LIMIT_S) -> Iterator[str]:
    """Serve a model on a free port of this machine and give the address, like http://127.0.0.1:8000.

    Args:
        options: further ones of `vllm serve`.
        log: file for what its processes print.
        limit_s: to be healthy in.
    Raises:
        RuntimeError: it did not start; one line, which names the log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("w") as file:
        # A session of its own: its processes are stopped together.
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, process, log, limit_s)
        yield address
    finally:
        stop(process)


def wait_until_healthy(address: str, process: subprocess.Popen, log: Path, limit_s: float) -> None:
    """Return when a server answers that it is healthy.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    deadline = time.monotonic() + limit_s
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            ended = f"ended with status {process.returncode}" if process.poll() is not None else "is not healthy"
            raise RuntimeError(f"the server {ended} after at most {limit_s:.0f} s; what it printed: {log}")
        time.sleep(0.5)


def stop(process: subprocess.Popen) -> None:
    """End all processes of a server: first asked, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
            deadline = time.monotonic() + STOP_LIMIT_S
            while group_runs(process.pid) and time.monotonic() < deadline:
                time.sleep(0.2)
        if not group_runs(process.pid):
            return


def group_runs(group: int) -> bool:
    """Return whether a process of a group is there that has not ended."""
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError, ValueError):
                state, _, found = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(found) == group and state != "Z":
                    return True
    return False
