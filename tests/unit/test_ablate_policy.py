"""The list of tuned constants: every number of a policy is on it, or says why not."""

import ast
import pkgutil
from pathlib import Path

import ablate_policy
import numpy as np
import pytest

import vllm_eesd
from vllm_eesd.policy_args import GoodputArgs, PolicyArgs

PACKAGE = Path(vllm_eesd.__file__).parent
FILES = [*sorted((PACKAGE / "policy").glob("*.py")), PACKAGE / "round" / "ngram.py", PACKAGE / "round" / "idle.py"]
#: The other numbers of those modules by the reason why they are not tuned constants.
REASONS = {
    "the policy's own parameter, as its paper has it": "policy.thresholds.ENTROPY_FACTOR "
    "policy.thresholds.OTHER_TOKENS policy.thresholds.TARGET_ACCEPTANCE policy.thresholds.STEP "
    "policy.thresholds.ACCEPTANCE_WEIGHT policy.thresholds.THRESHOLD_WEIGHT",
    "keeps a number within its domain": "policy.thresholds._TINY policy.thompson._MARGIN "
    "policy.expected_gain._LEAST_CHANCE",
    "part of a file's format": "policy.calibration.EDGES policy.calibration.NUM_BINS policy.state.VERSION",
    "refuses input": "policy.calibration.MAX_FILE_BYTES policy.costs.MAX_MS "
    "policy.posterior.MAX_COUNT policy.state.MAX_FILE_BYTES",
    "follows from how far the host runs ahead": "policy.goodput.MOST_UNDER_WAY",
    "size of a table": "policy.costs._SIZES policy.posterior.MAX_PRIOR_KEYS round.ngram.NUM_CLASSES",
    "follows from the normal distribution": "policy.costs.STANDARD_ERROR",
    "follows from another constant": "policy.goodput.PLAIN_EVERY",
    "of a metric": "policy.protocol.INTERVAL_DRAWS",
    "a name for a source of drafts": "policy.source.GREEDY policy.source.DRAWN policy.source.SHARED_NOISE "
    "policy.source.NGRAM",
    "a switch": "policy_args.GoodputArgs.ngram",
    "about time that no replay has": "round.ngram.MAX_SEARCHED round.idle.MAY_NOT_DRAFT policy.goodput.PLAIN_ROUNDS "
    "policy.costs.PLAIN_REACH",
}
TUNED = [f"{module}.{name}" for module, found in ablate_policy.REMOVED.items() for name in found]
NOT_TUNED = [name for names in REASONS.values() for name in names.split()]


def names_assigned(source: str) -> list[str]:
    """Names in capitals that a module assigns at its top level, tuples taken apart."""
    statements = ast.parse(source).body
    targets = [t for s in statements if isinstance(s, ast.Assign) for t in s.targets]
    targets += [s.target for s in statements if isinstance(s, ast.AnnAssign)]
    names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return [name for name in names if name.isupper()]


def is_number(value) -> bool:
    kind = np.asarray(value).dtype.kind if not isinstance(value, dict) else "O"
    return kind in "ifu"


def test_every_number_is_listed_once():
    found = [
        f"policy_args.GoodputArgs.{name}" for name in GoodputArgs.model_fields if name not in PolicyArgs.model_fields
    ]
    for path in FILES:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        names = [f"{module}.{name}" for name in names_assigned(path.read_text(encoding="utf-8"))]
        found += [name for name in names if is_number(pkgutil.resolve_name(f"vllm_eesd.{name}"))]
    assert sorted(TUNED + NOT_TUNED) == sorted(found)


def test_at_most_25_are_tuned():
    assert len(TUNED) <= 25


def test_the_test_above_would_see_a_new_constant():
    assert names_assigned("A, _B_C = 1, 2.5\nD: float = 3.0\nE = F = 4\ng = 1\nclass H:\n    I = 1\n") == [
        *("A", "_B_C", "E", "F", "D")
    ]
    assert is_number(1) and is_number((0.2, 5.0)) and not is_number("1") and not is_number({"a": 1})


def test_a_variant_is_what_compiled_code_sees_and_leaves_no_trace():
    from vllm_eesd.round import ngram

    text, before = np.tile(np.arange(5, dtype=np.int32), 4), ngram._longest_match
    assert ngram._longest_match(text)[0] == 15
    with ablate_policy.changed("round.ngram.MAX_MATCH", 7) as policy_args:
        assert ngram._longest_match(text)[0] == 7 and policy_args == {}
    assert ngram._longest_match is before and ngram._longest_match(text)[0] == 15 < ngram.MAX_MATCH
    with ablate_policy.changed("policy_args.GoodputArgs.probe_budget", 0.02) as policy_args:
        assert policy_args == {"probe_budget": 0.02}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("m.A", 8, (16, 4)), ("m.B", 1, (2, 1)), ("m.C", 0.5, (1.0, 0.25)), ("policy.costs.MIN_SAMPLES", 3, (6, 2))],
)
def test_counts_stay_whole_numbers(name, value, expected):
    found = ablate_policy.variants(name, value, 0)
    assert (found["doubled"], found["halved"]) == expected and type(found["halved"]) is type(value)
