"""The command `eesd`: finds the command, and imports its flags and its work when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NamedTuple

import vllm_eesd

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(NamedTuple):
    """A command.

    Attributes:
        name: as typed, `bench` and a measurement in two words.
        help: its line in the list of commands.
        flags: "module:function" that adds its flags to a parser.
        implementation: "module:function" that runs it.
    """

    name: str
    help: str
    flags: str
    implementation: str


COMMANDS = [
    Command(
        "demo",
        "complete held-out code with plain vLLM and with EESD, side by side",
        "vllm_eesd.bench.flags:demo",
        "vllm_eesd.bench.demo:run",
    ),
    Command(
        "bench latency",
        "tokens per second of several methods, interleaved in one run",
        "vllm_eesd.bench.flags:latency",
        "vllm_eesd.bench.latency:run",
    ),
    Command(
        "bench throughput",
        "requests that arrive at random, at several rates",
        "vllm_eesd.bench.flags:throughput",
        "vllm_eesd.bench.throughput:run",
    ),
    Command(
        "bench sweep",
        "exit layer x longest draft x policy, each against plain",
        "vllm_eesd.bench.flags:sweep",
        "vllm_eesd.bench.sweep:run",
    ),
    Command(
        "probe",
        "say, without training, whether and from which layer drafting will pay",
        "vllm_eesd.distill.flags:probe",
        "vllm_eesd.distill.probe:run",
    ),
    Command(
        "distill",
        "train an exit head for a frozen target",
        "vllm_eesd.distill.flags:distill",
        "vllm_eesd.distill.run:run",
    ),
    Command(
        "trace-record",
        "record what drafts are worth at every position, for simulate",
        "vllm_eesd.bench.flags:trace_record",
        "vllm_eesd.bench.trace_record:run",
    ),
    Command(
        "simulate",
        "replay recorded acceptance under every draft-length policy",
        "vllm_eesd.simulate.flags:simulate",
        "vllm_eesd.simulate.run:run",
    ),
    Command(
        "plan",
        "what recorded acceptance would be worth on another machine and model",
        "vllm_eesd.simulate.flags:plan",
        "vllm_eesd.simulate.plan:run",
    ),
    Command(
        "calibrate",
        "measure what a head's confidences mean; writes into the head",
        "vllm_eesd.distill.flags:calibrate",
        "vllm_eesd.distill.calibrate:run",
    ),
    Command(
        "import",
        "turn a Balcony or Kangaroo checkpoint into an exit head",
        "vllm_eesd.distill.flags:import_head",
        "vllm_eesd.distill.import_head:run",
    ),
    Command(
        "trace",
        "one generation as a page: its text round by round, and where time went",
        "vllm_eesd.bench.flags:trace",
        "vllm_eesd.bench.trace:run",
    ),
    Command(
        "top",
        "a server's acceptance, draft lengths, goodput and speedup, live",
        "vllm_eesd.bench.flags:top",
        "vllm_eesd.bench.top:run",
    ),
    Command(
        "doctor",
        "tell whether EESD can run here, and what to do if not",
        "vllm_eesd.flags:doctor",
        "vllm_eesd.doctor:run",
    ),
]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a user's mistake is one line on stderr and 2."""
    args = build_parser().parse_args(argv)
    module, function = args.implementation.split(":")
    try:
        return getattr(importlib.import_module(module), function)(args)
    except (ValueError, OSError) as error:
        if os.environ.get("EESD_DEBUG") == "1":
            raise
        print(f"eesd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except ModuleNotFoundError as error:
        if (error.name or vllm_eesd.__name__).split(".")[0] == vllm_eesd.__name__:
            raise  # a defect of this package
        print(f"eesd: error: {error.name} is not installed; `eesd doctor` says what to do", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("eesd: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `args.implementation` names the function that takes the arguments."""
    parser = _Parser(prog="eesd", description="Early-exiting speculative decoding for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-eesd {vllm_eesd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    measurements = None
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group and measurements is None:
            bench = commands.add_parser(group, help="measure")
            measurements = bench.add_subparsers(title="measurements", metavar="MEASUREMENT", required=True)
        subparser = (measurements if group else commands).add_parser(name, help=command.help)
        subparser.flags = command.flags
        subparser.set_defaults(implementation=command.implementation)
    return parser


class _Parser(argparse.ArgumentParser):
    """Adds its flags when it is first used, and reports a wrong argument in one line, as every other user error."""

    flags: str | None = None

    def parse_known_args(self, args=None, namespace=None):
        if self.flags is not None:
            (module, function), self.flags = self.flags.split(":"), None
            getattr(importlib.import_module(module), function)(self)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(USER_ERROR, f"eesd: error: {message}; see {self.prog} --help\n")


if __name__ == "__main__":
    sys.exit(main())
