"""The command `vllm serve`, as a user's shell runs it."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from servers import stop, wait_until_healthy

START_LIMIT_S = 1200
#: The in-process settings of other tests are not a user's.
OF_OTHERS = ("VLLM_ENABLE_V1", "OMP_", "VLLM_CPU_OMP", "VLLM_LOGGING")
SAMPLE = re.compile(r"^(\S+?)\{(.*)\} (\S+)$", re.M)


def command(model, *options):
    return [str(Path(sys.executable).parent / "vllm"), "serve", str(model), *options]


def environment(**settings):
    return {k: v for k, v in os.environ.items() if not k.startswith(OF_OTHERS)} | settings


def refused(model, *options, **settings):
    """Return what the command says that ends by itself, and not well.

    Args:
        settings: environment variables.
    """
    run = subprocess.run(
        command(model, *options), env=environment(**settings), capture_output=True, text=True, timeout=START_LIMIT_S
    )
    assert run.returncode not in (0, -9), run.stdout[-3000:]
    return run.stdout + run.stderr


@contextlib.contextmanager
def serving(model, *options, log, **settings):
    """Serve a model as "code" on a free port, and give the address.

    Args:
        log: file for what its processes print.
        settings: environment variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options += ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "code", "--dtype", "float32")
    with open(log, "w") as file:
        # A session of its own: killing only the parent would leave the engine core behind.
        process = subprocess.Popen(
            command(model, *options), stdout=file, stderr=file, env=environment(**settings), start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        try:
            wait_until_healthy(address, process, log, START_LIMIT_S)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{Path(log).read_text()[-3000:]}") from None
        yield address
    finally:
        stop(process)


def samples(address, name):
    """Return the samples of a metric at a server's endpoint: [(labels as they are written, value)]."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode()
    return [(labels, float(value)) for found, labels, value in SAMPLE.findall(text) if found == name]


def metric(address, name, **labels):
    """Return the sum of a metric's samples that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(value for given, value in samples(address, name) if all(label in given for label in wanted))
