"""Every kernel compiles for GPUs that need not be there, and spills no register."""

import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compile_kernels.py"
SPEC = importlib.util.spec_from_file_location("compile_kernels", SCRIPT)
compile_kernels = sys.modules["compile_kernels"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compile_kernels)

CASES = compile_kernels.all_cases()
# To save time, all of them for one architecture, and for the others those that need most registers and every sixth of
# the rest. The script that writes the table in docs/tables/kernels.md compiles all of them for all.
CHOSEN = [(case, 90) for case in CASES]
CHOSEN += [(case, 80) for case in CASES[1::6]]
CHOSEN += [(case, 100) for i, case in enumerate(CASES) if i % 6 == 2 or case.name.endswith("x64x64 logits")]
# What a program of sm_80 may have; the others have more. Its registers are 65,536 for all warps of a multiprocessor.
SHARED_BYTES = 163 * 1024


@pytest.fixture(autouse=True)
def compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "capability"), CHOSEN, ids=[f"{case.name} sm_{c}" for case, c in CHOSEN])
def test_it_compiles_without_spills(case, capability):
    if not compile_kernels.takes(case, capability):
        pytest.skip(f"sm_{capability} has no float8 e4m3")
    taken = compile_kernels.compile_for(case, capability)
    assert taken.stack_bytes == 0, f"{case.name} spills {taken.stack_bytes} bytes per thread on sm_{capability}"
    assert taken.shared_bytes <= SHARED_BYTES


@pytest.mark.filterwarnings("ignore")
def test_a_spill_would_be_seen():
    case = next(case for case in CASES if case.name.startswith("exit_head bf16 1x"))
    assert compile_kernels.compile_for(case, 90, maxnreg=32).stack_bytes > 0


def test_every_kernel_is_compiled():
    from vllm_eesd.kernels import gpu

    files = (importlib.import_module(f"{gpu.__name__}.{file.name}") for file in pkgutil.iter_modules(gpu.__path__))
    defined = {
        name
        for module in files
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    assert {case.kernel.__name__ for case in CASES} == defined


def test_the_documented_table_is_of_these_cases():
    page = compile_kernels.PAGE.read_text(encoding="utf-8")
    between = page.split(compile_kernels.OPEN)[1].split(compile_kernels.CLOSE)[0]
    rows = [line.split("|")[1].strip() for line in between.splitlines() if line.startswith("|")][2:]
    assert rows == [case.name for case in CASES], "run python benchmarks/compile_kernels.py"
