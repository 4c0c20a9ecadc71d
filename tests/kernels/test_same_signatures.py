"""Each kernel and its reference have the same name and signature; the references know nothing of Triton."""

import inspect
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest
from vllm_eesd.kernels import reference

# Function -> file, in either folder.
FILE_OF = {
    "advance_draft_inputs": "draft_inputs", "choose_tokens": "exit_head", "exit_head": "exit_head",
    "find_ngrams": "ngram", "keep_equal": "keep_equal", "kv_fill": "kv_fill", "prepare_draft_inputs": "draft_inputs",
    "put_ngrams": "ngram", "rejection": "rejection",
}  # fmt: skip
# What only the reference takes: on a GPU the noise is counted by seed and position.
REFERENCE_ONLY = {"rejection": {"uniforms"}}


def parameters(folder, name):
    function = getattr(import_module(f"vllm_eesd.kernels.{folder}.{FILE_OF[name]}"), name)
    return {p.name: (p.kind, p.default) for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize("name", sorted(FILE_OF))
def test_a_kernel_has_its_references_signature(name):
    pytest.importorskip("triton")
    plain, gpu = parameters("reference", name), parameters("gpu", name)
    assert set(plain) - set(gpu) == REFERENCE_ONLY.get(name, set())
    assert list(gpu.items()) == [item for item in plain.items() if item[0] in gpu]


def test_the_references_import_no_triton():
    names = [module.name for module in pkgutil.iter_modules(reference.__path__)]
    assert len(names) > 3
    program = (
        "import sys, torch; before = set(sys.modules); from importlib import import_module;"
        f"[import_module(f'vllm_eesd.kernels.reference.{{name}}') for name in {names}];"
        "sys.exit(any(name.split('.')[0] == 'triton' for name in set(sys.modules) - before))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
