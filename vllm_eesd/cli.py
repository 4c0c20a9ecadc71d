"""The command `eesd`: argument parsing only. Every subcommand's work is imported when it is called.

One short function per subcommand; the file is long because there are many.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import vllm_eesd

USER_ERROR = 2
METHODS_HELP = (
    "of plain, eesd, eesd-head, ngram, suffix, draft_model, eagle; comma-separated (default plain,eesd,ngram)"
)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


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
            raise  # ours to mend
        print(f"eesd: error: {error.name} is not installed; `eesd doctor` says what to do", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("eesd: interrupted", file=sys.stderr)
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `args.implementation` names the function that takes the arguments."""
    parser = _Parser(prog="eesd", description="Early-exiting speculative decoding for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-eesd {vllm_eesd.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_bench(commands)
    _add_probe(commands)
    _add_distill(commands)
    _add_trace_record(commands)
    _add_simulate(commands)
    _add_plan(commands)
    _add_calibrate(commands)
    _add_import(commands)
    _add_trace(commands)
    _add_top(commands)
    _add_doctor(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, as every other user error."""

    def error(self, message):
        self.exit(USER_ERROR, f"eesd: error: {message}; see {self.prog} --help\n")


def _add_demo(commands) -> None:
    demo = commands.add_parser("demo", help="complete held-out code with plain vLLM and with EESD, side by side")
    demo.add_argument("--model", metavar="DIR", help="target; default: the embedded models/eesd-code-10m")
    demo.add_argument("--head", metavar="DIR", help="exit head; default: eesd/ in the target's directory")
    _add_drafting(demo)
    demo.add_argument(
        "--max-tokens", type=_positive, default=256, metavar="T", help="new tokens a prompt (default 256)"
    )
    demo.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line; default: held-out code")
    demo.add_argument("--json", default="build/demo.json", metavar="FILE", help="results (default build/demo.json)")
    demo.add_argument("--no-color", action="store_true", help="mark drafted tokens without colours")
    demo.set_defaults(implementation="vllm_eesd.bench.demo:run")


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure")
    measurements = bench.add_subparsers(title="measurements", metavar="MEASUREMENT", required=True)
    latency = measurements.add_parser("latency", help="tokens per second of several methods, interleaved in one run")
    _add_measured(latency)
    latency.add_argument("--methods", type=_words, default=["plain", "eesd", "ngram"], help=METHODS_HELP)
    latency.add_argument(
        "--batch", type=_positive_list, default=[1, 4], help="batch sizes, comma-separated (default 1,4)"
    )
    latency.add_argument("--rounds", type=_positive, default=5, metavar="R", help="passes over all methods (default 5)")
    _add_drafting(latency)
    _add_peers(latency)
    _add_temperature(latency)
    latency.set_defaults(implementation="vllm_eesd.bench.latency:run")
    _add_throughput(measurements)
    _add_sweep(measurements)


def _add_throughput(measurements) -> None:
    throughput = measurements.add_parser("throughput", help="requests that arrive at random, at several rates")
    _add_measured(throughput)
    throughput.add_argument("--methods", type=_words, default=["plain", "eesd", "ngram"], help=METHODS_HELP)
    throughput.add_argument(
        "--rate", type=_positive_reals, default=[1.0, 2.0, 4.0], metavar="R,...", help="per second (default 1,2,4)"
    )
    throughput.add_argument("--requests", type=_positive, default=32, metavar="Q", help="per round (default 32)")
    throughput.add_argument("--rounds", type=_positive, default=3, metavar="R", help="passes (default 3)")
    throughput.add_argument("--seed", type=int, default=0, help="of the arrivals (default 0)")
    _add_drafting(throughput)
    _add_peers(throughput)
    _add_temperature(throughput)
    throughput.set_defaults(implementation="vllm_eesd.bench.throughput:run")


def _add_sweep(measurements) -> None:
    sweep = measurements.add_parser("sweep", help="exit layer x longest draft x policy, each against plain")
    _add_measured(sweep)
    sweep.add_argument(
        "--exit-layers", type=_words, default=["head"], metavar="N,...", help="headless; or head (default head)"
    )
    sweep.add_argument("--lengths", type=_positive_list, default=[2, 4, 8], metavar="K,...", help="(default 2,4,8)")
    sweep.add_argument(
        "--policies", type=_words, default=["goodput", "fixed"], metavar="P,...", help="(default goodput,fixed)"
    )
    sweep.add_argument("--batch", type=_positive_list, default=[1], help="batch sizes, comma-separated (default 1)")
    sweep.add_argument("--rounds", type=_positive, default=3, metavar="R", help="passes (default 3)")
    sweep.set_defaults(implementation="vllm_eesd.bench.sweep:run")


def _add_measured(parser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    parser.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", metavar="FILE", help="JSONL with a `prompt` a line")
    prompts.add_argument("--workload", metavar="NAME", help="in a clone: one of models/prompts")
    parser.add_argument("--max-tokens", type=_positive, default=128, metavar="T", help="per prompt (default 128)")
    parser.add_argument("--dtype", default="float32", help="of the target (default float32, where identity can hold)")
    parser.add_argument("--json", metavar="OUT", help="write a JSON list of rows")


def _add_temperature(parser) -> None:
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of every request; above 0 output is not compared"
    )


def _add_peers(parser) -> None:
    parser.add_argument(
        "--peers", metavar="P", help="directory of draft_model/ and eagle/; default: peers/ in the target's"
    )


def _add_probe(commands) -> None:
    probe = commands.add_parser("probe", help="say, without training, whether and from which layer drafting will pay")
    probe.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    probe.add_argument(
        "--text", nargs="+", metavar="FILE", help="text, .jsonl or .bin to measure on; default: the target's own"
    )
    probe.add_argument("--windows", type=_positive, default=16, metavar="W", help="sequences measured on (default 16)")
    probe.add_argument("--seq-len", type=_positive, default=256, metavar="T", help="tokens a sequence (default 256)")
    probe.add_argument("--json", metavar="OUT", help="write all that was measured")
    probe.add_argument("--plot", metavar="PNG", help="draw it (needs matplotlib)")
    probe.set_defaults(implementation="vllm_eesd.distill.probe:run")


def _add_distill(commands) -> None:
    distill = commands.add_parser("distill", help="train an exit head for a frozen target")
    distill.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    distill.add_argument(
        "--exit-layer", type=_exit_layer, required=True, metavar="N", help="target layers a draft runs, or auto"
    )
    distill.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text, .py, .jsonl with a `text` a line, .bin token ids; or a directory or Hub data set of text",
    )
    distill.add_argument("--held-out", nargs="+", metavar="FILE", help="to measure on; default: windows of --data")
    distill.add_argument(
        "--self-generate", type=_positive, metavar="W", help="also train on W windows the target wrote"
    )
    distill.add_argument("--temperature", type=float, default=1.0, help="of what the target writes (default 1.0)")
    distill.add_argument(
        "--generator",
        choices=["auto", "vllm", "transformers"],
        default="auto",
        help="what runs the target while it writes (default auto: vLLM where it can)",
    )
    distill.add_argument("-o", "--output", required=True, metavar="HEAD", help="directory to write the head to")
    distill.add_argument("--steps", type=_positive, default=1000, metavar="S", help="optimizer steps (default 1000)")
    distill.add_argument("--minutes", type=_positive_real, metavar="T", help="stop after this long, if earlier")
    distill.add_argument("--batch", type=_positive, default=8, metavar="B", help="sequences a step (default 8)")
    distill.add_argument("--seq-len", type=_positive, default=512, metavar="T", help="tokens a sequence (default 512)")
    distill.add_argument(
        "--lr", type=_positive_real, default=None, help="peak learning rate (default: by the target's width)"
    )
    distill.add_argument(
        "--init",
        default="last",
        metavar="last|exit|HEAD",
        help="start from the target's last or exit layer, or from another head (default last)",
    )
    distill.add_argument(
        "--loss",
        choices=["forward_kl", "reverse_kl", "tv", "ce_target", "ce_text", "jsd"],
        default="forward_kl",
        help="what the head minimises (default forward_kl)",
    )
    distill.add_argument("--jsd-beta", type=float, default=0.5, metavar="B", help="beta of jsd (default 0.5)")
    distill.add_argument(
        "--head-type",
        choices=["transformer", "deep_context", "mlp"],
        default="deep_context",
        help="(default deep_context)",
    )
    distill.add_argument(
        "--draft-vocab", type=_thousands, metavar="V", help="draft from the V (32k: 32000) most frequent tokens only"
    )
    distill.add_argument(
        "--accumulate", type=_positive, default=1, metavar="A", help="parts a step is computed in, to save memory"
    )
    distill.add_argument("--seed", type=int, default=0, help="of the data order (default 0)")
    distill.add_argument("--compile", action="store_true", help="compile the training step")
    distill.add_argument(
        "--shard-target", action="store_true", help="launched processes share one copy of the target (FSDP)"
    )
    distill.add_argument(
        "--measure-every", type=_positive, default=100, metavar="S", help="measure on held-out text (default 100 steps)"
    )
    distill.add_argument(
        "--measure-greedy", action="store_true", help="measure on the target's greedy text, as --self-generate does"
    )
    distill.add_argument("--tensorboard", metavar="DIR", help="write the losses there (needs tensorboard)")
    distill.add_argument("--work", metavar="DIR", help="checkpoints to resume from and write to")
    distill.add_argument("--json", metavar="OUT", help="write the training record")
    distill.set_defaults(implementation="vllm_eesd.distill.run:run")


def _add_trace_record(commands) -> None:
    record = commands.add_parser("trace-record", help="record what drafts are worth at every position, for simulate")
    record.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    record.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    record.add_argument("--prompts", required=True, metavar="FILE", help="JSONL with a `prompt` a line")
    record.add_argument("--workload", required=True, metavar="NAME", help="what the prompts are, for tables")
    record.add_argument("--max-tokens", type=_positive, default=128, metavar="T", help="per prompt (default 128)")
    record.add_argument("--temperature", type=float, default=0.0, help="of the target (default 0, greedy)")
    record.add_argument("--num-speculative-tokens", type=int, default=8, metavar="K", help="drafted (default 8)")
    record.add_argument(
        "--batch", type=_positive_list, default=[1, 4, 8], help="batch sizes whose steps to time (default 1,4,8)"
    )
    record.add_argument("-o", "--output", required=True, metavar="TRACE", help="file to write, compressed if *.gz")
    record.set_defaults(implementation="vllm_eesd.bench.trace_record:run")


def _add_simulate(commands) -> None:
    simulate = commands.add_parser("simulate", help="replay recorded acceptance under every draft-length policy")
    simulate.add_argument("traces", nargs="+", metavar="TRACE", help="dense traces; of several also their mixture")
    simulate.add_argument("--policies", type=_words, metavar="P,...", help="comma-separated (default: all)")
    simulate.add_argument("--cost-scale", metavar="draft=F,verify=F", help="multiply costs of drafting, verification")
    simulate.add_argument("--batch", type=_positive, default=1, metavar="B", help="requests at once (default 1)")
    simulate.add_argument("--seed", type=int, default=0, help="of policies and timing noise (default 0)")
    simulate.add_argument("--json", metavar="OUT", help="write a JSON list of rows")
    simulate.add_argument("--plot", metavar="PNG", help="goodput, regret and lengths (needs the extra [plot])")
    simulate.set_defaults(implementation="vllm_eesd.simulate.run:run")


def _add_plan(commands) -> None:
    plan = commands.add_parser("plan", help="what recorded acceptance would be worth on another machine and model")
    plan.add_argument("--trace", required=True, metavar="TRACE", help="dense trace, made by `eesd trace-record`")
    plan.add_argument("--gpu", required=True, metavar="G", help="a100, b200, h100, h200, l4 or l40s")
    plan.add_argument("--exit-layer", type=_positive, required=True, metavar="N", help="target layers a draft runs")
    plan.add_argument("--headless", action="store_true", help="without an exit layer behind them")
    plan.add_argument("--model", metavar="DIR", help="read the target's sizes from its config.json")
    for size, text in (
        ("layers", "decoder layers"),
        ("hidden", "width"),
        ("vocab", "vocabulary"),
        ("intermediate", "the MLP's width (default 3.5 times the width)"),
        ("heads", "attention heads (default: width / head-dim)"),
        ("kv-heads", "heads of keys and values (default 8)"),
        ("head-dim", "(default 128)"),
    ):
        plan.add_argument(f"--{size}", type=_positive, metavar="n", help=text)
    plan.add_argument("--tp", type=_positive, default=1, metavar="T", help="devices, tensor parallel (default 1)")
    plan.add_argument("--dtype", default="bfloat16", help="of the weights: bfloat16 or fp8 (default bfloat16)")
    plan.add_argument("--context", type=_positive, default=1024, metavar="C", help="tokens in the cache (default 1024)")
    plan.add_argument("--batch", type=_positive_list, default=[1, 2, 4, 8, 16, 32, 64], help="(default 1,2,...,64)")
    plan.add_argument("--policy", default="goodput", help="how the draft length is chosen (default goodput)")
    plan.add_argument("--reached", type=_positive_real, default=1.0, help="share of published peaks (default 1)")
    for overhead in ("step", "draft", "round", "verify"):
        plan.add_argument(f"--{overhead}-overhead-ms", type=float, default=0.0, metavar="MS", help="added (default 0)")
    plan.add_argument("--seed", type=int, default=0, help="of the policy and of timing noise (default 0)")
    plan.add_argument("--json", metavar="OUT", help="write what was planned")
    plan.set_defaults(implementation="vllm_eesd.simulate.plan:run")


def _add_calibrate(commands) -> None:
    calibrate = commands.add_parser("calibrate", help="measure what a head's confidences mean; writes into the head")
    calibrate.add_argument("model", metavar="MODEL", help="target: a directory or a Hub id")
    calibrate.add_argument("head", metavar="HEAD", help="exit head of that target; gets calibration.json and a prior")
    calibrate.add_argument(
        "--data", nargs="+", required=True, metavar="FILE", help="held-out text, .jsonl or .bin: not what it trained on"
    )
    calibrate.add_argument("--windows", type=_positive, default=64, metavar="W", help="sequences (default 64)")
    calibrate.add_argument(
        "--seq-len", type=_positive, default=256, metavar="T", help="tokens a sequence, a quarter read (default 256)"
    )
    calibrate.add_argument("--json", metavar="OUT", help="write what was measured")
    calibrate.set_defaults(implementation="vllm_eesd.distill.calibrate:run")


def _add_import(commands) -> None:
    importer = commands.add_parser("import", help="turn a Balcony or Kangaroo checkpoint into an exit head")
    importer.add_argument("model", metavar="MODEL", help="target it was trained for: a directory or a Hub id")
    importer.add_argument("checkpoint", metavar="CHECKPOINT", help="directory with config.json and .safetensors")
    importer.add_argument("-o", "--output", required=True, metavar="HEAD", help="directory to write the head to")
    importer.add_argument("--exit-layer", type=_positive, metavar="N", help="where the checkpoint does not say")
    importer.add_argument("--format", choices=["auto", "balcony", "kangaroo"], default="auto", help="(default auto)")
    importer.add_argument("--json", metavar="OUT", help="write what was done")
    importer.set_defaults(implementation="vllm_eesd.distill.import_head:run")


def _add_trace(commands) -> None:
    trace = commands.add_parser("trace", help="one generation as a page: its text round by round, and where time went")
    trace.add_argument("--model", required=True, metavar="M", help="target: a directory or a Hub id")
    trace.add_argument("--head", metavar="H", help="exit head; default: eesd/ in the target's directory")
    trace.add_argument("--prompt", required=True, metavar="P", help="text to complete")
    trace.add_argument("--max-tokens", type=_positive, default=128, metavar="T", help="new tokens (default 128)")
    trace.add_argument("--dtype", default="float32", help="of the target (default float32)")
    _add_drafting(trace)
    trace.add_argument("-o", "--output", required=True, metavar="HTML", help="page to write")
    trace.set_defaults(implementation="vllm_eesd.view.trace:run")


def _add_top(commands) -> None:
    top = commands.add_parser("top", help="a server's acceptance, draft lengths, goodput and speedup, live")
    top.add_argument("--url", required=True, metavar="URL", help="of the server, like http://127.0.0.1:8000")
    top.add_argument("--interval", type=_positive_real, default=2.0, metavar="S", help="seconds a look (default 2)")
    top.add_argument("--window", type=_positive_real, default=10.0, metavar="S", help="seconds summed (default 10)")
    top.add_argument("--count", type=_positive, metavar="C", help="looks, then end (default: until Ctrl-C)")
    top.set_defaults(implementation="vllm_eesd.view.top:run")


def _add_doctor(commands) -> None:
    doctor = commands.add_parser("doctor", help="tell whether EESD can run here, and what to do if not")
    doctor.add_argument("--model", metavar="M", help="also look at this target's directory and its exit head")
    doctor.add_argument("--json", metavar="OUT", help="write what was found")
    doctor.set_defaults(implementation="vllm_eesd.doctor:run")


def _add_drafting(parser) -> None:
    # These defaults are EESDConfig's, as distill's are TrainConfig's: repeated, so that `eesd --help` imports nothing
    # heavy; a test compares them.
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="the longest draft (default 8; 16 if text may be copied)",
    )
    parser.add_argument("--policy", default="goodput", help="how the draft length is chosen (default goodput)")


def _positive(text: str) -> int:
    number = int(text) if text.strip().isascii() and text.strip().isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be a whole number of at least 1")
    return number


def _thousands(text: str) -> int:
    return 1000 * _positive(text[:-1]) if text.endswith(("k", "K")) else _positive(text)


def _exit_layer(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _positive_real(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be above 0 and finite")
    return number


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, must be a comma-separated list")
    return words


def _positive_reals(text: str) -> list[float]:
    return [_positive_real(word) for word in _words(text)]


def _positive_list(text: str) -> list[int]:
    return [_positive(word) for word in _words(text)]


if __name__ == "__main__":
    sys.exit(main())
