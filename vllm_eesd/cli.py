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
        module: of this package; its `run` takes the arguments.
        flags: the function that adds its flags to a parser, in `flags.py` beside that module.
        help: its line in the list of commands.
    """

    name: str
    module: str
    flags: str
    help: str


COMMANDS = [
    Command("demo", "bench.demo", "demo", "answer questions with plain vLLM and with EESD, side by side"),
    Command("bench latency", "bench.latency", "latency", "tokens per second of several methods, in one run"),
    Command("probe", "distill.probe", "probe", "say, without training, whether and from which layer drafting will pay"),
    Command("distill", "distill.run", "distill", "train an exit head for a frozen target"),
    Command("calibrate", "distill.calibrate", "calibrate", "measure what a head's confidences mean, and store it"),
    Command("trace", "bench.trace", "trace", "one generation as a page: its text round by round, and where time went"),
    Command("trace-record", "bench.trace_record", "trace_record", "record what drafts are worth, for simulate"),
    Command("simulate", "simulate.run", "simulate", "replay recorded acceptance under every draft-length policy"),
    Command("top", "bench.top", "top", "a server's acceptance, draft lengths, goodput and speedup, live"),
    Command("model", "public_model", "model", "print the directory of a model by its name, for vllm serve"),
    Command("embedded", "embedded", "embedded", "print the directory of the embedded model, for vllm serve"),
    Command("doctor", "doctor", "doctor", "tell whether EESD can run here, and what to do if not"),
]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code; a user's mistake is one line on stderr and 2."""
    args = build_parser().parse_args(argv)
    try:
        return importlib.import_module(args.implementation).run(args)
    except (ValueError, OSError) as error:
        if os.environ.get("EESD_DEBUG") == "1":
            raise
        # A config's errors name the plugin, for they stand in vLLM's log too.
        print(f"eesd: error: {' '.join(str(error).split()).removeprefix('eesd: ')}", file=sys.stderr)
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
        subparser = (measurements if group else commands).add_parser(name, help=command.help, description=command.help)
        module = f"{vllm_eesd.__name__}.{command.module}"
        subparser.flags = f"{module.rpartition('.')[0]}.flags", command.flags
        subparser.set_defaults(implementation=module)
    return parser


class _Help(argparse.HelpFormatter):
    """Tells every default that a flag's own text does not tell."""

    def _get_help_string(self, action):
        default, text = action.default, action.help or ""
        if default is None or default is False or default == argparse.SUPPRESS or "default" in text:
            return text
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        return f"{text} (default {shown})"


class _Parser(argparse.ArgumentParser):
    """Adds its flags when it is first used, and reports a wrong argument in one line, as every other user error."""

    #: Module, and function that adds them.
    flags: tuple[str, str] | None = None

    def __init__(self, **settings):
        super().__init__(formatter_class=_Help, **settings)

    def parse_known_args(self, args=None, namespace=None):
        if self.flags is not None:
            (module, function), self.flags = self.flags, None
            getattr(importlib.import_module(module), function)(self)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        self.exit(USER_ERROR, f"eesd: error: {message}; see {self.prog} --help\n")


if __name__ == "__main__":
    sys.exit(main())
