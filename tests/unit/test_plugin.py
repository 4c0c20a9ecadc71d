"""Each seam wraps, is idempotent and refuses a changed host; asking for EESD on such a host says why it cannot run."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_eesd.host import plugin, seams, v2_seams

TARGETS = [seam.target for seam in plugin.SEAMS]


def attribute(seam):
    owner, name, _ = seams._locate(seam.target)
    return inspect.getattr_static(owner, name)


@pytest.fixture
def bare_host():
    """No seam installed; whatever was, is put back."""
    for seam in plugin.SEAMS:
        seams.remove(seam)
    yield [attribute(seam) for seam in plugin.SEAMS]
    for seam in plugin.SEAMS:
        seams.remove(seam)
    plugin.register()


def test_every_seam_fits_the_installed_vllm():
    assert [status.reason for status in plugin.check_host()] == [""] * len(plugin.SEAMS)
    assert all(seam.why and seam.retired_by for seam in plugin.SEAMS)


@pytest.mark.parametrize("index", range(len(TARGETS)), ids=TARGETS)
def test_a_seam_wraps_once_and_comes_off_again(bare_host, index):
    seam = plugin.SEAMS[index]
    seams.install(seam)
    wrapped = attribute(seam)
    assert wrapped is not bare_host[index]
    seams.install(seam)
    assert attribute(seam) is wrapped
    assert seams.check(seam).ok  # the check sees the code beneath the wrapper
    seams.remove(seam)
    after = attribute(seam)
    assert getattr(after, "fget", getattr(after, "__func__", after)) is getattr(
        bare_host[index], "fget", getattr(bare_host[index], "__func__", bare_host[index])
    )


@pytest.mark.parametrize("index", range(len(TARGETS)), ids=TARGETS)
def test_a_changed_host_gets_no_seam_at_all(bare_host, monkeypatch, index):
    changed = list(plugin.SEAMS)
    changed[index] = dataclasses.replace(changed[index], digests=("0" * 16,))
    monkeypatch.setattr(plugin, "SEAMS", tuple(changed))
    plugin.register()
    for seam, original in zip(plugin.SEAMS[1:], bare_host[1:], strict=False):
        assert attribute(seam) is original
    message = ask_for("eesd")
    assert changed[index].target in message and "vLLM 0.32.0" in message and "eesd doctor" in message
    assert ask_for({"method": "eesd", "exit_layer": 2}) == message


def test_a_changed_host_serves_everything_else(bare_host):
    plugin.refuse("a test")
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs.create_speculative_config(engine_args(None), None, None) is None


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
    gone = dataclasses.replace(plugin.SEAMS[0], target="vllm.engine.arg_utils:EngineArgs.no_such_method")
    assert "not found" in seams.check(gone).reason
    gone = dataclasses.replace(plugin.SEAMS[0], target="vllm.no_such_module:A.b")
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
    assert plugin.seams_table() in page
    assert plugin.seams_table(v2_seams.SEAMS) in page


def test_a_worker_can_start_where_numba_was_used():
    import numba
    from vllm.triton_utils import dispatcher

    plugin.register()
    assert numba.njit(lambda: 1)() == 1
    dispatcher._rebind_kernels([])


def test_a_pipeline_rank_without_a_drafter_prepares_its_inputs_as_before():
    """vLLM makes a drafter on the last rank only; ngram on two ranks must not notice that this plugin is installed."""
    prepare = plugin._wrap_calc_spec_decode_metadata(lambda self, *args: args)
    nothing_drafted, cu_num_tokens = np.zeros(2, dtype=np.int32), np.array([3, 5], dtype=np.int32)
    assert prepare(SimpleNamespace(), nothing_drafted, cu_num_tokens) == (nothing_drafted, cu_num_tokens)
