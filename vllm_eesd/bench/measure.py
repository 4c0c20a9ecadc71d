"""The one measuring function: methods interleaved pass by pass, ratios paired per pass, outputs compared."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from vllm_eesd.bench.loops import share_in_loops
from vllm_eesd.bench.vllm_engine import Limits, VllmEngine, each_limit

Tokens = list[int]
#: Methods that draft nothing.
PLAIN = ("plain", "plain-again")
#: Bootstrap samples of a run's ratios: the ends of an interval are then good to the digits shown.
RESAMPLES = 2000


@dataclass(frozen=True)
class Work:
    """What every method is given.

    Attributes:
        prompts: token ids.
        source: the prompts' file.
        max_tokens: generated for each, exactly; at most where texts end where the model ends them.
        rounds: timed.
        limits: each prompt's own number of tokens, where it is not `max_tokens`.
        fixed_length: whether texts go on after their end, to `max_tokens`.
        block: prompts that a method does before the next one has its turn; None: all.
        out_of: prompts in the file, where these are only its first.
    """

    prompts: list[Tokens]
    source: str | os.PathLike
    max_tokens: int
    rounds: int
    limits: Sequence[int] | None = None
    fixed_length: bool = True
    block: int | None = None
    out_of: int | None = None


@dataclass
class Runs:
    """What one method did: one entry per timed pass, and its counters over all of them.

    Attributes:
        first: the first prompt of each pass.
    """

    seconds: list[float] = field(default_factory=list)
    outputs: list[list[Tokens]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    counters: Mapping[str, Any] = field(default_factory=dict)

    def texts(self) -> dict[int, Tokens]:
        """Return each prompt's text of the first pass over it, by the prompt's number from 0."""
        found: dict[int, Tokens] = {}
        for first, outputs in zip(self.first, self.outputs, strict=True):
            found = dict(enumerate(outputs, first)) | found
        return found

    def leaves(self, expected: Mapping[int, Tokens]) -> list[tuple[int, int] | None]:
        """Return (prompt, token), from 0, where each text of each pass leaves the expected one, None: nowhere."""
        found = []
        for first, outputs in zip(self.first, self.outputs, strict=True):
            for prompt, ours in enumerate(outputs, first):
                at = leaves_at(expected[prompt], ours)
                found.append(None if at is None else (prompt, at))
        return found

    def tokens_per_s(self) -> list[float]:
        return [sum(map(len, out)) / seconds for out, seconds in zip(self.outputs, self.seconds, strict=True)]


def measure(
    engines: Mapping[str, VllmEngine],
    prompts: Sequence[Tokens],
    *,
    batch: int,
    max_tokens: Limits,
    rounds: int,
    fixed_length: bool = True,
    block: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Runs]:
    """Return every method's runs over all prompts.

    One warm-up per method stays outside the clock; the order of the methods rotates from pass to pass.

    Args:
        batch: requests at a time: when one ends, the next begins, as under load. (Batches that all begin together end
            with their slowest request, which only speculation has.)
        fixed_length: whether texts go on after their end, to `max_tokens`.
        block: prompts of a pass, about: a method does so many before the next one has its turn; None: all.
    """
    given, limits = list(prompts), each_limit(max_tokens, len(prompts))
    ends = {} if fixed_length else {"ignore_eos": False}
    runs = {method: Runs() for method in engines}
    blocks = even_blocks(len(given), max(block or len(given), batch))
    counted = {}
    for method, engine in engines.items():
        progress(f"batch {batch}: warming up {method}")
        engine.forget_prefixes()
        # Plain emits a token a round, whatever the prompts: one batch warms it up and shows that. Of those that keep
        # counters a block does; of the others the rounds are seen here alone.
        some = batch if method in PLAIN else len(given) if engine.statistics() is None else blocks[0].stop
        counted[method] = count_rounds(engine, given[:some], limits[:some], batch, **ends)
        engine.reset_statistics()
    passes = [(number, some) for number in range(rounds) for some in blocks]
    for turn, (number, some) in enumerate(passes):
        for method in rotated(list(engines), turn):
            place = f", prompts {some.start + 1} to {some.stop} of {len(given)}" if len(blocks) > 1 else ""
            progress(f"batch {batch}: round {number + 1} of {rounds}{place}, {method}")
            engine = engines[method]
            engine.forget_prefixes()
            began = clock()
            outputs = engine.generate(given[some], limits[some], batch, **ends)
            runs[method].seconds.append(clock() - began)
            runs[method].outputs.append(outputs)
            runs[method].first.append(some.start)
    for method, engine in engines.items():
        # Plain's engine says nothing of itself, and has the name of two methods.
        runs[method].counters = engine.statistics() or counted[method]
    return runs


def even_blocks(count: int, size: int) -> list[slice]:
    """Return about equal parts of so many prompts, of about that size."""
    parts = max(1, round(count / size))
    ends = [count * part // parts for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def rotated(methods: list[str], round_index: int) -> list[str]:
    """Return the methods in this round's order: each is first in turn."""
    start = round_index % len(methods)
    return methods[start:] + methods[:start]


def count_rounds(
    engine: VllmEngine, prompts: list[Tokens], limits: list[int], batch: int, **ends: Any
) -> dict[str, int]:
    """Return the decoding rounds and the tokens emitted in them, seen from outside the engine.

    A request's first step ends its prompt and is no decoding round.
    """
    counters = {"rounds": 0, "emitted": 0}
    started: set[int] = set()
    for step in engine.stream(prompts, limits, batch, **ends):
        for index, tokens in step:
            if index in started and tokens:
                counters["rounds"] += 1
                counters["emitted"] += len(tokens)
            started.add(index)
    return counters


def round_statistics(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of a drafter's counters, None where there is nothing to divide.

    Args:
        counters: rounds, emitted; from a drafter also drafted, accepted, accepted_per_position.
    Returns:
        acceptance_length: tokens emitted per round, the target's own included.
        acceptance_rate: accepted / drafted.
        mean_draft_length: tokens drafted per round.
        ngram_share: of the drafts accepted, those that were n-gram drafts.
        acceptance_per_position: unconditional: of all rounds, the share that accepted a draft at that position.
    """
    rounds, drafted = counters.get("rounds", 0), counters.get("drafted")
    accepted, copied = counters.get("accepted_per_position"), counters.get("copied_accepted")
    return {
        "acceptance_length": counters["emitted"] / rounds if rounds else None,
        "acceptance_rate": counters["accepted"] / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds and drafted is not None else None,
        "ngram_share": copied / counters["accepted"] if copied is not None and counters["accepted"] else None,
        "acceptance_per_position": [n / rounds for n in accepted] if rounds and accepted else None,
    }


def paired_ratios(runs: Runs, plain: Runs) -> list[float]:
    """Return the method's speed over plain's, round by round."""
    return [ours / theirs for ours, theirs in zip(runs.tokens_per_s(), plain.tokens_per_s(), strict=True)]


def bootstrap_interval(ratios: list[float]) -> list[float] | None:
    """Return the 95% interval of the ratios' median, None for fewer than three; always the same for the same ratios."""
    from scipy.stats import bootstrap

    if len(ratios) < 3:
        return None
    settings = {"n_resamples": RESAMPLES, "method": "percentile", "rng": 0}
    found = bootstrap((ratios,), statistics.median, vectorized=False, **settings).confidence_interval
    return [round(float(found.low), 3), round(float(found.high), 3)]


def first_difference(expected: list[Tokens], outputs: list[Tokens]) -> str | None:
    """Return where outputs leave the expected tokens, in words, None if they are the same."""
    for index, (right, ours) in enumerate(zip(expected, outputs, strict=True)):
        if (at := leaves_at(right, ours)) is not None:
            return described(index, at, right, ours)
    return None


def leaves_at(expected: Tokens, ours: Tokens) -> int | None:
    """Return the first token, from 0, that is not the expected one, None if a text is the expected one whole."""
    if expected == ours:
        return None
    pairs = enumerate(zip(expected, ours, strict=False))
    return next((at for at, (right, found) in pairs if right != found), min(len(expected), len(ours)))


def described(prompt: int, at: int, expected: Tokens, ours: Tokens) -> str:
    """Return in words where a text leaves the expected one; both numbers are from 0."""
    found, wanted = (str(tokens[at]) if at < len(tokens) else "nothing" for tokens in (ours, expected))
    return f"prompt {prompt + 1}, token {at + 1}: {found} instead of {wanted}"


def share_of(leaves: Sequence[tuple[int, int] | None]) -> float:
    """Return the share of texts that are the expected ones."""
    return sum(leaf is None for leaf in leaves) / len(leaves)


def rows(runs: Mapping[str, Runs], *, exact: bool, compared: bool = True) -> list[dict[str, Any]]:
    """Return one row of results per method.

    Every pass's texts are compared with plain's first. With `exact` (float32) the comparison is a gate, `identical` its
    verdict: a method whose output differs gets no speedup. Otherwise rounding may change a text, drafts or none, and
    `identical_share` is all that is said. Without plain there is nothing to compare with. Sampled outputs differ by
    chance: they are not `compared`.
    """
    plain = runs.get("plain")
    expected = plain.texts() if plain and compared else None
    result = []
    for method, ours in runs.items():
        leaves = ours.leaves(expected) if expected else []
        difference = _first_words(ours, leaves, expected) if expected else None
        row: dict[str, Any] = {"method": method, "tokens_per_s": round(statistics.median(ours.tokens_per_s()), 2)}
        row["tokens_per_text"] = round(statistics.fmean(len(text) for out in ours.outputs for text in out), 1)
        row |= {"speedup_vs_plain": None, "speedup_spread": None, "speedup_interval": None}
        if plain and not (exact and difference):
            ratios = paired_ratios(ours, plain)
            row["speedup_vs_plain"] = round(statistics.median(ratios), 3)
            row["speedup_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            row["speedup_interval"] = bootstrap_interval(ratios)
        row |= {name: _rounded(value) for name, value in round_statistics(ours.counters).items()}
        row["looping_share"] = _rounded(share_in_loops(tokens for output in ours.outputs for tokens in output))
        row |= {"identical": None, "identical_share": None, "first_difference": difference}
        if leaves:
            row |= {"identical": difference is None if exact else None, "identical_share": _rounded(share_of(leaves))}
        result.append(row)
    return result


def _first_words(ours: Runs, leaves: list[tuple[int, int] | None], expected: Mapping[int, Tokens]) -> str | None:
    """Return in words where the first text that does leave the expected one does so."""
    texts = (text for outputs in ours.outputs for text in outputs)
    for leaf, text in zip(leaves, texts, strict=True):
        if leaf is not None:
            return described(*leaf, expected[leaf[0]], text)
    return None


def controls(
    plain: VllmEngine, runs: Mapping[str, Runs], work: Work, batch: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return what says how to read greedy texts that are not plain's where rounding may change them.

    Returns:
        control_batch: another batch size; None where there is only one prompt. control_identical_share: the share of
            plain's texts there that are its texts here.
        margins: of each method, for each place where one of its texts first leaves plain's: by how much, in log
            probability, plain's likeliest token is ahead of the second; ascending.
    """
    expected = runs["plain"].texts()
    other = max(1, batch // 2) if batch > 1 else min(8, len(work.prompts))
    control: dict[str, Any] = {"control_batch": None, "control_identical_share": None}
    if other != batch:
        plain.forget_prefixes()
        ends = {} if work.fixed_length else {"ignore_eos": False}
        limits = each_limit(work.limits or work.max_tokens, len(work.prompts))
        texts = plain.generate(work.prompts, limits, other, **ends)
        leaves = Runs(outputs=[texts], first=[0]).leaves(expected)
        control = {"control_batch": other, "control_identical_share": _rounded(share_of(leaves))}
    places = {method: sorted(set(filter(None, ours.leaves(expected)))) for method, ours in runs.items()}
    wanted = sorted({place for found in places.values() for place in found})
    texts = [work.prompts[prompt] + expected[prompt][:at] for prompt, at in wanted]
    margin_at = dict(zip(wanted, plain.top_two_margins(texts) if texts else [], strict=True))
    return control, {method: sorted(_rounded(margin_at[p]) for p in some) for method, some in places.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value
