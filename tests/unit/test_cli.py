"""`eesd`: what the flags become, and how mistakes end."""

import subprocess
import sys
import types

import pytest

from vllm_eesd import cli
from vllm_eesd.config import EESDConfig
from vllm_eesd.distill.train import TrainConfig

MINIMAL = {
    "vllm_eesd.bench.demo": ["demo"],
    "vllm_eesd.bench.latency": ["bench", "latency", "--model", "M", "--prompts", "P"],
    "vllm_eesd.distill.run": ["distill", "M", "--exit-layer", "2", "--data", "a.txt", "b.py", "-o", "H"],
    "vllm_eesd.simulate.run": ["simulate", "a.jsonl.gz", "b.jsonl"],
    "vllm_eesd.distill.calibrate": ["calibrate", "M", "H", "--data", "a.txt"],
    "vllm_eesd.distill.probe": ["probe", "M"],
    "vllm_eesd.bench.trace": ["trace", "--model", "M", "--prompt", "P", "-o", "trace.html"],
    "vllm_eesd.bench.top": ["top", "--url", "http://127.0.0.1:8000"],
    "vllm_eesd.bench.trace_record": ["trace-record", "--model", "M", "--prompts", "P", "--workload", "W", "-o", "T"],
    "vllm_eesd.embedded": ["embedded"],
    "vllm_eesd.public_model": ["model", "smollm2"],
    "vllm_eesd.doctor": ["doctor"],
}


@pytest.fixture
def implementation(monkeypatch):
    """Put a stand-in for an implementation module in place; returns what it was called with."""

    def stand_in(module, result=0):
        calls = []

        def run(args):
            calls.append(args)
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(run=run))
        return calls

    return stand_in


@pytest.mark.parametrize(("module", "argv"), MINIMAL.items())
def test_each_command_calls_its_implementation(module, argv, implementation):
    calls = implementation(module, result=3)
    assert cli.main(argv) == 3
    assert len(calls) == 1


@pytest.mark.parametrize("module", MINIMAL)
def test_each_implementation_exists(module):
    assert callable(__import__(module, fromlist=["run"]).run)


def test_every_command_is_among_them():
    assert {f"vllm_eesd.{command.module}" for command in cli.COMMANDS} == set(MINIMAL)


@pytest.mark.parametrize(("argv", "heavy"), [(["--help"], {"pydantic", "torch"}), (["distill", "--help"], {"torch"})])
def test_help_imports_nothing_heavy(argv, heavy):
    code = f"from vllm_eesd import cli\ntry: cli.main({argv})\nexcept SystemExit: import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.splitlines()[-1].split())


def test_help_tells_every_default_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # names with a hyphen are wrapped at it
    with pytest.raises(SystemExit):
        cli.main(["bench", "latency", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    methods = "(default plain,plain-again,eesd,eesd-fixed@4,ngram)"
    for told in ("(default 5)", "(default 1,4)", methods, "(default goodput)"):
        assert shown.count(told) == 1
    assert "None" not in shown and "False" not in shown


def test_latency_lists_are_parsed(implementation):
    calls = implementation("vllm_eesd.bench.latency")
    cli.main([*MINIMAL["vllm_eesd.bench.latency"], "--methods", "plain, eesd", "--batch", "1,16", "--rounds", "2"])
    assert (calls[0].methods, calls[0].batch, calls[0].rounds) == (["plain", "eesd"], [1, 16], 2)


def test_distill_takes_several_files(implementation):
    calls = implementation("vllm_eesd.distill.run")
    cli.main(MINIMAL["vllm_eesd.distill.run"])
    assert (calls[0].model, calls[0].exit_layer, calls[0].data, calls[0].output) == ("M", 2, ["a.txt", "b.py"], "H")


@pytest.mark.parametrize(("given", "meant"), [("32k", 32_000), ("8K", 8_000), ("auto", "auto"), ("all", "all")])
def test_a_draft_vocabulary_may_be_given_in_thousands(implementation, given, meant):
    calls = implementation("vllm_eesd.distill.run")
    cli.main([*MINIMAL["vllm_eesd.distill.run"], "--draft-vocab", given])
    assert calls[0].draft_vocab == meant


@pytest.mark.parametrize(("given", "meant"), [("0", 0), ("7", 7), ("auto", "auto")])
def test_an_exit_layer_may_be_the_embedding(implementation, given, meant):
    calls = implementation("vllm_eesd.distill.run")
    cli.main([*MINIMAL["vllm_eesd.distill.run"], "--exit-layer", given])
    assert calls[0].exit_layer == meant


def test_drafting_defaults_are_the_configs():
    args, config = cli.build_parser().parse_args(["demo"]), EESDConfig()
    assert (args.num_speculative_tokens, args.policy) == (config.num_speculative_tokens, config.policy)


def test_distill_defaults_are_the_train_configs():
    args = cli.build_parser().parse_args(MINIMAL["vllm_eesd.distill.run"])
    assert {field: getattr(args, field) for field in TrainConfig.model_fields} == TrainConfig().model_dump()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nope"],
        ["bench"],
        ["demo", "--max-tokens", "0"],
        ["demo", "--num-speculative-tokens", "x"],
        ["bench", "latency", "--model", "M"],
        [*MINIMAL["vllm_eesd.bench.latency"], "--batch", "1,x"],
        [*MINIMAL["vllm_eesd.bench.latency"], "--methods", "plain,,eesd"],
        [*MINIMAL["vllm_eesd.distill.run"], "--lr", "nan"],
        [*MINIMAL["vllm_eesd.distill.run"], "--minutes", "0"],
        [*MINIMAL["vllm_eesd.distill.run"], "--exit-layer", "1.5"],
        [*MINIMAL["vllm_eesd.distill.run"], "--draft-vocab", "0k"],
        [*MINIMAL["vllm_eesd.distill.run"], "--draft-vocab", "k"],
        [*MINIMAL["vllm_eesd.distill.run"], "--draft-vocab", "3.2k"],
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    output = capsys.readouterr()
    assert raised.value.code == 2
    assert output.out == ""
    assert output.err.startswith("eesd: error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ValueError("policy='x' is not valid:\n  allowed: y"), FileNotFoundError("no such M")]
)
def test_a_user_error_is_one_line_and_exit_2(error, implementation, capsys):
    implementation("vllm_eesd.bench.demo", result=error)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == f"eesd: error: {' '.join(str(error).split())}\n"


def test_a_missing_package_leads_to_the_doctor(implementation, capsys):
    implementation("vllm_eesd.bench.demo", result=ModuleNotFoundError("No module named 'vllm.x'", name="vllm.x"))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "eesd: error: vllm.x is not installed; `eesd doctor` says what to do\n"


def test_a_missing_module_of_ours_is_a_defect(implementation):
    implementation("vllm_eesd.bench.demo", result=ModuleNotFoundError("x", name="vllm_eesd.bench.x"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["demo"])


def test_debug_shows_the_traceback(implementation, monkeypatch):
    implementation("vllm_eesd.bench.demo", result=ValueError("x"))
    monkeypatch.setenv("EESD_DEBUG", "1")
    with pytest.raises(ValueError, match="x"):
        cli.main(["demo"])


def test_a_defect_is_not_taken_for_a_user_error(implementation):
    implementation("vllm_eesd.bench.demo", result=RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["demo"])
