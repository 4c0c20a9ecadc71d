"""A server of the embedded model in processes of its own: started, asked, watched and stopped."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_LIMIT_S, REQUEST_LIMIT_S = 600, 300
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Server:
    """`vllm serve` on a free port; a context manager that ends every process it started.

    Args:
        model: directory of the target.
        speculative_config: the option's text; None serves without speculation.
        log: file for what the processes print.
        options: further options of the command.
    """

    def __init__(self, model: Path, speculative_config: str | None, log: Path, options: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
            "--max-model-len", "1024", "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "code",
            "--max-num-seqs", "16", *options,
        ]  # fmt: skip
        if speculative_config is not None:
            command += ["--speculative-config", speculative_config]
            command += ["--worker-extension-cls", "soak_worker.SoakExtension"]
        # The in-process settings of other tests are not a server's. Its development endpoints lead to the worker.
        theirs = ("VLLM_ENABLE_V1", "OMP_", "VLLM_CPU_OMP", "VLLM_LOGGING")
        env = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
        env |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(HERE), "PYTHONSAFEPATH": "1"}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                if self._answer("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                said = self.log.read_text(errors="replace").splitlines()
                causes = [line for line in said if "Error" in line][:8]  # the first is the cause, the last its echo
                raise RuntimeError("\n".join(["the server did not start:", *causes, *said[-5:]]))
            time.sleep(0.5)

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End all processes: first asked, then made to."""
        for number, patience_s in ((signal.SIGTERM, 30), (signal.SIGKILL, 10)):
            for pid in self.processes():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            if self.gone_within(patience_s):
                break

    def gone_within(self, seconds: float) -> bool:
        """Return whether all processes have ended, or do so in time."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def processes(self) -> list[int]:
        """Return the ids of the server's processes, zombies aside: all of its session."""
        found = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                try:
                    state, _, _, session = (directory / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:
                    continue
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(directory.name))
        return found

    def named(self, word: str) -> list[int]:
        """Return the processes whose title holds `word`."""
        return [pid for pid in self.processes() if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")]

    def resident_bytes(self) -> int:
        """Return the memory of all processes together; pages that they share count once for each."""
        total = 0
        for pid in self.processes():
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
            except OSError:
                continue
        return total

    def _answer(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_LIMIT_S)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer of one completion request."""
        status, answer = self._answer("POST", "/v1/completions", {"model": "code"} | body)
        return status, json.loads(answer)

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of a completion's text; closing the iterator early disconnects."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_LIMIT_S)
        try:
            text = json.dumps({"model": "code", "stream": True} | body)
            connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "choices" not in chunk:
                        raise RuntimeError(f"the server answered {chunk}")
                    yield "".join(choice["text"] for choice in chunk["choices"])
        finally:
            connection.close()

    def worker(self, method: str, *args: str) -> Any:
        """Return what the worker's method answers."""
        status, answer = self._answer("POST", "/collective_rpc", {"method": method, "args": args})
        assert status == 200, answer
        return json.loads(answer)["results"][0]

    def metric(self, name: str) -> float:
        """Return one of the server's metrics."""
        text = self._answer("GET", "/metrics")[1].decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
