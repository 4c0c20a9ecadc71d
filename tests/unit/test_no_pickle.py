"""Nothing here loads what could run code: no pickle, no eval, no remote code, no shell; read from the source."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = [
    path for folder in ("vllm_eesd", "kernels", "benchmarks", "models") for path in (REPOSITORY / folder).rglob("*.py")
]
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "os.system", "os.popen"}


def dotted(node):
    """`a.b.c` of a name or attribute, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(source):
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] * ((node.module or "").split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            if (
                name in CALLS
                # Its unpickler of plain tensors and containers; the default differs between torch's releases.
                or (name == "torch.load" and given.get("weights_only") is not True)
                or given.get("allow_pickle") is True
                or given.get("trust_remote_code") is True
                or given.get("shell") is True
            ):
                found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_loads_code(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def late():\n    from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(line, shell=True)",
        "exec(text)",
    ],
)
def test_a_planted_one_is_found(source):
    assert len(faults(source)) == 1


def test_the_rest_passes():
    assert faults("import json\ntorch.load(p, weights_only=True)\nmodel.eval()\nos.open(p, 0)") == []
