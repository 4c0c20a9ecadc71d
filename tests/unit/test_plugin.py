"""Each seam wraps, is idempotent and refuses a changed host; asking for EESD on such a host says why it cannot run."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import vllm
from vllm.platforms import current_platform

from vllm_eesd.host import engine_seams, plugin, seams, vllm_source
from vllm_eesd.host.v1 import seams as v1_seams

# Locating the CPU's seams imports its worker, which replaces parts of torch.cuda: not where that is in use.
pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU's seams are located by importing them")

SEAMS = [seam for records in plugin.PLACES.values() for seam in records]
TARGETS = [seam.target for seam in SEAMS]
#: Those that an engine on a CPU without Triton needs, by where they are installed.
NEEDED = [(place, i) for place in ("every process", "worker", "worker, V1") for i in range(len(plugin.PLACES[place]))]


def attribute(seam):
    owner, name, _ = seams._locate(importlib.import_module(seam.module), seam.qualified)
    return inspect.getattr_static(owner, name)


def function(raw):
    return getattr(raw, "fget", getattr(raw, "__func__", raw))


@pytest.fixture
def bare_host():
    """No seam installed; whatever every process has is put back. Returns the originals."""
    wrapped = [seam for seam in SEAMS if hasattr(function(attribute(seam)), seams._MARK)]
    for seam in wrapped:
        seams.remove(seam)
    yield [attribute(seam) for seam in SEAMS]
    for seam in SEAMS:
        seams.remove(seam)
    plugin.register()
    for seam in wrapped:
        seams.install(seam)


def test_every_seam_fits_the_installed_vllm():
    assert [status.reason for _, status in plugin.report()] == [""] * len(SEAMS)
    assert len(plugin.check_host()) == len(NEEDED) and all(status.ok for status in plugin.check_host())
    assert all(seam.why and seam.retired_by for seam in SEAMS)


def test_functions_are_found_by_their_indentation_as_a_parser_finds_them():
    """It spares every process the parsing of vLLM's largest files."""
    for seam in SEAMS:
        found = vllm_source.find(vllm_source.installed_source, seam.module, seam.qualified)
        tree = ast.parse(vllm_source.installed_source(seam.module))
        class_name, _, name = seam.qualified.rpartition(".")
        classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
        body = classes[class_name] if class_name else tree.body
        nodes = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
        if not nodes:  # the module has imported it
            assert found.node.name == name
            continue
        first = min([nodes[0].lineno, *(decorator.lineno for decorator in nodes[0].decorator_list)])
        lines = vllm_source.installed_source(seam.module).splitlines()[first - 1 : nodes[0].end_lineno]
        assert found.digest == vllm_source.digest_of_lines(lines)


@pytest.mark.parametrize("text", ['"""\nat the margin\n"""', "'''\n  less than the body\n'''"])
def test_a_function_that_is_not_found_whole_is_a_reason(text):
    source = (
        f"class EngineArgs:\n    def create_speculative_config(self):\n        text = {text}\n        return text\n"
    )
    status = seams.check(engine_seams.SEAMS[0], lambda module: source)
    assert not status.ok and "cannot be read" in status.reason


@pytest.mark.parametrize("index", range(len(TARGETS)), ids=TARGETS)
def test_a_seam_wraps_once_and_comes_off_again(bare_host, index):
    seam = SEAMS[index]
    seams.install(seam)
    wrapped = attribute(seam)
    assert wrapped is not bare_host[index]
    seams.install(seam)
    assert attribute(seam) is wrapped
    assert seams.check(seam).ok  # the check sees the code beneath the wrapper
    seams.remove(seam)
    assert function(attribute(seam)) is function(bare_host[index])


@pytest.mark.parametrize(("place", "index"), NEEDED)
def test_a_changed_host_gets_no_seam_at_all(bare_host, monkeypatch, place, index):
    changed = list(plugin.PLACES[place])
    changed[index] = dataclasses.replace(changed[index], digests=("0" * 16,))
    monkeypatch.setitem(plugin.PLACES, place, changed)
    plugin.register()
    for seam, original in zip(SEAMS[1:], bare_host[1:], strict=True):
        assert attribute(seam) is original
    message = ask_for("eesd")
    assert changed[index].target in message and f"vLLM {vllm.__version__} " in message and "eesd doctor" in message
    assert ask_for({"method": "eesd", "exit_layer": 2}) == message
    assert plain_config() is None


def test_a_worker_whose_seams_do_not_fit_refuses_before_it_installs_any(bare_host, monkeypatch):
    changed = list(v1_seams.SEAMS)
    changed[-1] = dataclasses.replace(changed[-1], digests=("0" * 16,))
    monkeypatch.setitem(plugin.PLACES, "worker, V1", changed)
    with pytest.raises(RuntimeError, match="rejection_sample its code has changed"):
        plugin.prepare_worker("V1", "V1")
    assert [attribute(seam) for seam in SEAMS] == bare_host


def test_registration_wraps_what_every_process_needs_and_nothing_of_a_worker(bare_host):
    for _ in range(2):
        plugin.register()
        wrapped = [seam for seam in SEAMS if hasattr(function(attribute(seam)), seams._MARK)]
        assert wrapped == list(plugin.PLACES["every process"])
    plugin.prepare_worker("V1", "V1")
    wrapped = [seam for seam in SEAMS if hasattr(function(attribute(seam)), seams._MARK)]
    assert wrapped == [*plugin.PLACES["every process"], *plugin.PLACES["worker"], *v1_seams.SEAMS]


def test_a_check_that_fails_is_a_refusal_not_a_crash(bare_host, monkeypatch):
    monkeypatch.setattr(seams, "check_all", lambda records: 1 / 0)
    plugin.register()
    assert "the seams cannot be checked (ZeroDivisionError: division by zero)" in ask_for("eesd")
    assert plain_config() is None


def test_a_place_that_somebody_else_has_replaced_is_a_reason(bare_host, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_speculative_config", lambda self, *args: None)
    assert "has been replaced by" in seams.check(engine_seams.SEAMS[0]).reason


def test_a_registration_that_fits_ends_a_refusal(bare_host):
    plugin.refuse("a test")
    assert "a test" in ask_for("eesd")
    plugin.register()
    assert engine_seams.refusal == ""


def test_a_changed_host_serves_everything_else(bare_host):
    plugin.refuse("a test")
    assert plain_config() is None


def test_no_other_module_took_a_wrapped_function_by_name():
    """Wrapping a module's function reaches that module alone."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent
    wrapped = [seam for seam in SEAMS if "." not in seam.qualified]
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    for seam in wrapped:
        takes = re.compile(rf"^ *from {re.escape(seam.module)} import (?:\([^)]*|[^(\n]*)\b{seam.qualified}\b", re.M)
        assert [path.name for path, source in sources.items() if takes.search(source)] == []


def plain_config():
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.create_speculative_config(engine_args(None), None, None)


def engine_args(spec):
    """Stands for EngineArgs(speculative_config=spec), which would look for a model first."""
    return SimpleNamespace(speculative_config=spec, spec_method=None, spec_model=None, spec_tokens=None)


def ask_for(spec):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError) as error:
        EngineArgs.create_speculative_config(engine_args(spec), None, None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_vanished_place_is_a_reason_not_a_crash():
    for target in ("vllm.engine.arg_utils:EngineArgs.no_such_method", "vllm.no_such_module:A.b", "no_such_package:a"):
        gone = dataclasses.replace(engine_seams.SEAMS[0], target=target)
        assert "not found" in seams.check(gone).reason


def test_the_bare_word_on_the_command_line():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def read(value):
        return parser.parse_args(["--model", "x", "--speculative-config", value]).speculative_config

    assert read("eesd") == "eesd"
    assert read('{"method": "ngram", "num_speculative_tokens": 3}') == {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(SystemExit):
        read("eagle")


def test_the_docs_table_is_the_records():
    page = (Path(__file__).resolve().parents[2] / "docs" / "seams.md").read_text()
    for records in plugin.PLACES.values():
        assert seams.table(records) in page


def test_a_worker_can_start_where_numba_was_used():
    import numba
    from llvmlite.binding import ffi
    from vllm.triton_utils import dispatcher

    plugin.register()
    assert numba.njit(lambda: 1)() == 1
    ffi.lib._fntab.pop("__dict__", None)
    dispatcher._rebind_kernels([])
    ffi.lib._fntab.pop("__dict__")
    assert hasattr(ffi.lib, "__dict__")  # whoever looks at all modules' attributes asks for it
    dispatcher._rebind_kernels([])


def test_a_pipeline_rank_without_a_drafter_prepares_its_inputs_as_before():
    """vLLM makes a drafter on the last rank only; ngram on two ranks must not notice that this plugin is installed."""
    prepare = functools.partial(v1_seams._calc_spec_decode_metadata, lambda self, *args: args)
    nothing_drafted, cu_num_tokens = np.zeros(2, dtype=np.int32), np.array([3, 5], dtype=np.int32)
    assert prepare(SimpleNamespace(), nothing_drafted, cu_num_tokens) == (nothing_drafted, cu_num_tokens)
