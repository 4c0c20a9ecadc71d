"""Imports point one way: which part of the package may import which, read from the source."""

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_eesd"

CORE = {"config", "files", "policy_args", "policy", "round", "traces", "exit_head", "verify", "kernels"}
CORE |= {
    "request_options",
    "flags",
    "embedded",
    "provenance",
    "conversations",
    "gguf_llama",
    "public_model",
    "progress",
}
# Part -> parts of this package that it may import, besides itself and the bare package (its version).
ALLOWED_PARTS = {
    "__init__": {"config"},
    "config": {"policy_args"},
    "conversations": set(),
    "files": set(),
    "embedded": set(),
    "flags": {"config"},
    "gguf_llama": set(),
    "public_model": {"embedded", "files", "gguf_llama"},
    "kernels": set(),
    "policy_args": set(),
    "progress": set(),
    "provenance": set(),
    "policy": {"config", "files", "policy_args"},
    "round": {"config", "files", "policy", "request_options"},
    "traces": {"config", "files", "policy"},
    "request_options": {"config"},
    "exit_head": CORE,
    "verify": CORE,
    "host": CORE,
    "distill": CORE,
    "simulate": CORE,
    "bench": CORE,
    "doctor": CORE | {"host"},
    "cli": set(),
    "__main__": {"cli"},
}
# Any of vLLM; its public modules only (capitalised names, where that is the top level); nothing.
VLLM_PRIVATE = {"host"}
VLLM_PUBLIC = {"bench", "distill"}
VLLM_PUBLIC_MODULES = {"vllm.inputs", "vllm.plugins", "vllm.sampling_params"}
TRANSFORMERS = {"host", "bench", "distill"}
KERNEL_LIBRARIES = {"torch", "triton"}
#: To be opened; none may be added.
KNOWN_CIRCLES: list[tuple[str, ...]] = []


def imports(source: str, module: str, is_package: bool) -> set[tuple[str, str]]:
    """(module, name or "") of every import, at the top or inside functions, relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
            found |= {(base, alias.name) for alias in node.names}
    return found


def part_of(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def allowed(part: str, base: str, name: str) -> bool:
    """Whether a part of this package may import `name` (or, if empty, nothing in particular) from module `base`."""
    top = base.split(".")[0]
    if top == PACKAGE:
        # `from vllm_eesd import policy` names a part, `from vllm_eesd import __version__` does not.
        target = name if base == PACKAGE and name in ALLOWED_PARTS else part_of(base)
        return target in ALLOWED_PARTS[part] | {part, "__init__"}
    if top == "vllm":
        public = base in VLLM_PUBLIC_MODULES or base == "vllm" and (not name.islower() or name == "__version__")
        return part in VLLM_PRIVATE or part in VLLM_PUBLIC and public
    if top == "transformers":
        return part in TRANSFORMERS
    return part != "kernels" or top in KERNEL_LIBRARIES or top in sys.stdlib_module_names


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module of this package imports and should not."""
    found = sorted(imports(source, module, is_package))
    return [f"{module}: {base} {name}".strip() for base, name in found if not allowed(part_of(module), base, name)]


def modules():
    """(file, dotted name) of every module of the package, kernels under their installed name."""
    for folder, name in ((REPOSITORY / PACKAGE, PACKAGE), (REPOSITORY / "kernels", f"{PACKAGE}.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield path, ".".join((name, *(part for part in parts if part != "__init__")))


def test_imports_point_one_way():
    wrong = []
    for path, module in modules():
        wrong += violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert wrong == []


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The pairs of modules of which each leads to the other, by however many imports."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for other in edges[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    leads_to = {name: reached(name) for name in edges}
    return {frozenset((a, b)) for a in edges for b in leads_to[a] if a != b and a in leads_to[b]}


def test_no_modules_import_one_another():
    """Imports for a type's name count too: what two files know of each other is one file, or three."""
    sources = {name: (path.read_text(encoding="utf-8"), path.name == "__init__.py") for path, name in modules()}
    edges = {
        name: {target for base, found in imports(source, name, is_package) for target in (base, f"{base}.{found}")}
        & set(sources) - {name}
        for name, (source, is_package) in sources.items()
    }
    assert circles(edges) == {frozenset(pair) for pair in KNOWN_CIRCLES}


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles(edges) == {frozenset(pair) for pair in ("ab", "bc", "ac")}


def runners_that_meet(source, module, is_package=False):
    """What a module of one model runner imports of the other's."""
    other = {"v1": "v2", "v2": "v1"}.get((module.split(".") + ["", ""])[2] if ".host." in module else "")
    named = [f"{base}.{name}" for base, name in sorted(imports(source, module, is_package))]
    return [name for name in named if other and f"{name}.".startswith(f"{PACKAGE}.host.{other}.")]


def test_neither_model_runner_imports_the_other():
    wrong = [
        (module, name)
        for path, module in modules()
        for name in runners_that_meet(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    ]
    assert wrong == []
    planted = "from vllm_eesd.host.v1.batch import V1Step", "from vllm_eesd.host import v1", "from ..v1 import seams"
    assert all(runners_that_meet(line, "vllm_eesd.host.v2.lengths") for line in planted)
    assert not runners_that_meet(planted[0], "vllm_eesd.host.v1.proposer")


#: Names that vLLM's batches and requests go by in the adapters.
BATCHES = {"input_batch", "_batch", "scheduler_output", "_scheduled", "req_states", "_req_states"}


def batch_attributes(source):
    """Attributes read of what is called like one of vLLM's batches; what EESD itself puts there is its own."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    named = ((node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", ""), node.attr)
             for node in nodes)  # fmt: skip
    return [f"{name}.{attr}" for name, attr in named if name in BATCHES and not attr.startswith("eesd_")]


def test_only_their_views_read_attributes_of_vllms_batches():
    read = {
        path.relative_to(REPOSITORY).as_posix(): batch_attributes(path.read_text(encoding="utf-8"))
        for runner in ("v1", "v2")
        for path in (REPOSITORY / PACKAGE / "host" / runner).glob("*.py")
        if path.name != "batch.py"
    }
    # The step's new requests, which the runner's own seam hands on.
    assert {path: names for path, names in read.items() if names} == {
        f"{PACKAGE}/host/v2/seams.py": ["scheduler_output.scheduled_new_reqs"]
    }
    assert batch_attributes("runner.input_batch.req_ids; states = self._req_states.draft_tokens") == [
        "input_batch.req_ids",
        "_req_states.draft_tokens",
    ]


def test_every_part_has_a_rule():
    assert {part_of(module) for _, module in modules()} <= set(ALLOWED_PARTS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_eesd.kernels.rejection", "import numpy"),
        ("vllm_eesd.kernels.rejection", "from vllm_eesd.config import EESDConfig"),
        ("vllm_eesd.config", "from vllm_eesd import policy"),
        ("vllm_eesd.config", "from vllm_eesd.policy.guard import Guard"),
        ("vllm_eesd.policy.beta_ts", "import vllm_eesd.round.draft"),
        ("vllm_eesd.policy.beta_ts", "from ..round.draft import DraftRound"),
        ("vllm_eesd.round.draft", "def late():\n    from vllm_eesd.host import compat"),
        ("vllm_eesd.round.draft", "from vllm import LLM"),
        ("vllm_eesd.exit_head.checkpoint", "import transformers"),
        ("vllm_eesd.bench.latency", "from vllm_eesd.host.v1.proposer import EarlyExitProposer"),
        ("vllm_eesd.bench.latency", "from vllm.v1.worker.gpu_model_runner import GPUModelRunner"),
        ("vllm_eesd.bench.latency", "import vllm.v1"),
        ("vllm_eesd.bench.latency", "from vllm import envs"),
        ("vllm_eesd.traces.page", "from vllm_eesd.bench.streaming import DraftStream"),
        ("vllm_eesd.traces.rounds", "from vllm import LLM"),
        ("vllm_eesd.doctor", "import vllm"),
    ],
)
def test_a_planted_import_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vllm_eesd.kernels.rejection", "import math, torch, triton.language as tl\nfrom .reference import rejection"),
        ("vllm_eesd.policy.beta_ts", "from vllm_eesd.config import EESDConfig\nfrom . import posterior"),
        (
            "vllm_eesd.host.v1.proposer",
            "from vllm.v1.worker import gpu_model_runner\nfrom vllm_eesd.round.draft import draft_tokens",
        ),
        (
            "vllm_eesd.bench.latency",
            "import vllm\nfrom vllm import LLM, __version__\nfrom vllm.inputs import tokens_input",
        ),
        ("vllm_eesd.cli", "from vllm_eesd import __version__"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert violations(source, module) == []
