"""What every test may rely on: the environment of a CPU engine, the `gpu` marker, the embedded model."""

import collections
import functools
import importlib.util
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the repository root there, where kernels/ would hide Hugging Face's `kernels` package.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPOSITORY]

# vLLM reads these when it is imported; `make test` sets the same, a bare pytest relies on this.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# On CPUs vLLM 0.32 compiles ahead of time anew at every start, whatever its cache holds: an engine that was compiled
# before took 60 s of a core to start and be tested, and takes 26 s this way.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
# Code compiled for one instruction set must not be taken from a cache by a run that pretends to have another.
if isa := "-".join(os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")).strip("-"):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        os.environ.setdefault(name, os.path.join(tempfile.gettempdir(), f"eesd-{name.lower()}-{os.getuid()}-{isa}"))
# Engine processes must not find the folder kernels/ in place of Hugging Face's `kernels` package.
os.environ.setdefault("PYTHONSAFEPATH", "1")


#: Folders whose tests a process has only if it is of their kind; `.ci/test` starts one of each.
V2, KERNELS = REPOSITORY / "tests" / "engine_v2", REPOSITORY / "tests" / "kernels" / "interpreted"


#: Tests that take a minute or more each, or are many; shorter ones have most of it. `make test ARGS=--long` runs them.
LONG = (
    # Whole engines, whose options and requests other tests have one by one.
    "tests/soak/test_soak.py::test_a_short_soak",
    "tests/engine_v1/test_embedded.py::test_greedy_identity_on_real_prompts[compiled]",
    "tests/engine_v1/test_embedded.py::test_greedy_identity_on_real_prompts[preemption]",
    "tests/engine_v1/test_public_clients.py::test_a_client_is_answered_as_by_plain_vllm",
    "tests/engine_v1/test_data_parallel.py::test_eight_clients_of_two_engines[by default two]",
    "tests/engine_v1/test_server.py::test_a_pause_while_requests_are_streamed[mode=keep-3]",
    # What the tests beside them do, with other weights, layers or ranks, or compiled.
    "tests/engine_v1/test_kv_connectors.py::test_a_prefill_and_a_decode_engine[compiled]",
    "tests/engine_v1/test_reloaded_weights.py::test_reloaded_weights[packed by oneDNN]",
    "tests/engine_v1/test_reloaded_weights.py::test_bfloat16",
    "tests/engine_v1/test_reloaded_weights.py::test_two_ranks",
    "tests/engine_v1/test_tensor_parallel.py::test_more_ranks_than_kv_heads",
    "tests/engine_v1/test_training_parity.py::test_heads_of_several_layers[6-2-aux_layers0]",
    "tests/engine_v2/test_gpu_start.py::test_greedy_identity_from_graphs[drawn drafts, metadata updated in the graph]",
    "tests/engine_v2/test_compiled.py::test_greedy_identity_with_everything_compiled[kernels]",
    # Alone what another test has in every batch, or by another policy.
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[adaedl-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[beta_ts-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[calibrated_ts-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[confidence-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[draft_verify-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_every_policy[fixed-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[T=0.5-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[T=1.5, top_k and top_p-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[repetition penalty-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[frequency penalty-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[min_p-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[logit_bias-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[logprobs-greedy]",
    "tests/engine_v1/test_exact_distribution.py::test_one_kind_of_request[own seeds-greedy]",
    "tests/engine_v2/test_shared_noise.py::test_a_seed_means_plain_vllms_text[beta_ts]",
    "tests/engine_v2/test_shared_noise.py::test_a_seed_means_plain_vllms_text[calibrated_ts]",
    "tests/engine_v2/test_shared_noise.py::test_a_seed_means_plain_vllms_text[confidence]",
)


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def kind_of_this_process() -> Path | None:
    """The folder whose tests Triton's interpreter is on for, if it is: for V2 as vLLM's backend, or by the variable."""
    if importlib.util.find_spec("triton_cpu_interpreter"):
        return V2
    return KERNELS if os.environ.get("TRITON_INTERPRET") == "1" else None


def is_elsewhere(path: Path) -> bool:
    """Whether a test or folder of tests is a matter of another kind of process."""
    kind = next((folder for folder in (V2, KERNELS) if path.is_relative_to(folder)), None)
    here = kind_of_this_process()
    if here is None:
        return kind is not None and not has_gpu()
    return kind != here and not here.is_relative_to(path)


def pytest_ignore_collect(collection_path):
    return True if is_elsewhere(collection_path) else None


def pytest_addoption(parser):
    parser.addoption("--fuzz-examples", type=int, default=0, help="inputs per fuzz target; 0: few, the same every time")
    parser.addoption("--fuzz-minutes", type=float, default=0, help="how long pairs of options are tried; 0: a few")
    parser.addoption("--fuzz-seed", type=int, default=None, help="of these draws; printed where it is not given")
    parser.addoption("--fuzz-first", type=int, default=0, help="number of the first draw: to repeat one, or to go on")
    parser.addoption("--long", action="store_true", help="also the tests that take minutes each, `LONG`")
    parser.addoption("--report", default=None, help="write counts and the features' outcomes to this JSON file")


def pytest_configure(config):
    for name in config.args:
        path = config.invocation_params.dir.joinpath(name.partition("::")[0]).resolve()
        if is_elsewhere(path):
            raise pytest.UsageError(f"{name} wants another process, Triton interpreted or not: .ci/test {name}")
    keep_to_own_cores()
    config.addinivalue_line("markers", "feature(name, outcome): a row of docs/compatibility.md that this test decides")
    config.addinivalue_line("markers", "fault(kind, number): so many are planted; if it passes, survived; bare: some")
    examples = config.getoption("--fuzz-examples")
    settings.register_profile(
        "fuzz",
        max_examples=examples or 40,
        derandomize=not examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    if config.getoption("--report") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Report(Path(config.getoption("--report"))))


def keep_to_own_cores():
    """Give each of several workers its share of the cores: two engines spinning on one core wait for each other."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    share = sorted(os.sched_getaffinity(0))[int(worker.removeprefix("gw")) :: workers]
    if share:
        os.sched_setaffinity(0, share)


def leaves_long_out(config) -> bool:
    """Whether only the tests outside `LONG` are run: those that are named are wanted."""
    named = any("::" in name or name.endswith(".py") for name in config.args)
    return not config.getoption("--long") and not named


def pytest_report_header(config):
    elsewhere = [str(folder.relative_to(REPOSITORY)) for folder in (V2, KERNELS) if is_elsewhere(folder)]
    lines = [f"not in this process, but in make test's next: {', '.join(elsewhere)}"] if elsewhere else []
    long = [name for name in LONG if not is_elsewhere(REPOSITORY / name.partition("::")[0])]
    if long and leaves_long_out(config):
        lines += ["left out, as they take minutes each (make test ARGS=--long):", *(f"  {name}" for name in long)]
    return lines


def leave_long_out(config, items) -> None:
    """Deselect the tests of `LONG`.

    Raises:
        pytest.UsageError: one of them is no test of its file.
    """
    names = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in names}
    lost = [name for name in LONG if name.partition("::")[0] in files and name not in names]
    if lost:
        raise pytest.UsageError(f"in LONG of tests/conftest.py, and no test: {', '.join(lost)}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in LONG])
    items[:] = [item for item in items if item.nodeid not in LONG]


def pytest_collection_modifyitems(config, items):
    if leaves_long_out(config):
        leave_long_out(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none")
        for item in marked:
            item.add_marker(skip)


#: What the test that runs now counted.
COUNTS: collections.Counter[str] = collections.Counter()


@pytest.fixture(scope="session")
def counts() -> collections.Counter[str]:
    """Counters that end up in the report."""
    return COUNTS


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Attach what a test counted and the features it decides: reports travel from workers to who writes the file."""
    report = (yield).get_result()
    if report.skipped and kind_of_this_process() and not hasattr(report, "wasxfail"):
        if not item.get_closest_marker("gpu"):  # whoever skips here is tested nowhere
            report.outcome, report.longrepr = "failed", f"skipped under the interpreter: {report.longrepr[-1]}"
    planted = [marker.args for marker in item.iter_markers("fault") if marker.args and report.when == "call"]
    for kind, number in planted:
        COUNTS[f"faults planted: {kind}"] += number
        COUNTS[f"faults survived: {kind}"] += number * report.passed
    report.eesd_counts = dict(COUNTS)
    COUNTS.clear()
    report.eesd_features = []
    if report.when == "call" or report.outcome != "passed" and report.when == "setup":
        for name, outcome in (marker.args for marker in item.iter_markers("feature")):
            decided = {"feature": name, "outcome": outcome, "test": item.nodeid, "result": report.outcome}
            report.eesd_features.append(decided)


class Report:
    """Brings the file named by `--report` up to date; what a run did not touch stays: it may be run in pieces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: collections.Counter[str] = collections.Counter()
        self._features: list[dict] = []

    def pytest_runtest_logreport(self, report):
        self._counts.update(report.eesd_counts)
        self._features += report.eesd_features
        if report.eesd_features:
            self.write()  # now: whoever ends a long run early keeps what it has seen

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        from vllm_eesd.provenance import hardware, versions

        path = self._path
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"counts": {}, "features": []}
        decided = {(entry["feature"], entry["test"]): entry for entry in [*old["features"], *self._features]}
        content = {
            "hardware": hardware(),
            "versions": versions(),
            "counts": dict(sorted((old["counts"] | self._counts).items())),
            "features": list(decided.values()),
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@pytest.fixture
def log_lines():
    """The project's log lines from WARNING on, whatever other libraries made of the root logger before."""
    logger, records = logging.getLogger("vllm.eesd"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(handler.format(record))
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """Directory of the embedded target; its exit head is in `eesd/` beneath."""
    directory = REPOSITORY / "models" / "eesd-code-10m"
    for name in ("config.json", "model.safetensors", "eesd/config.json"):
        assert (directory / name).is_file(), f"{directory / name} is missing: check out models/ again"
    return directory
