"""The page of one generation: its text round by round, why each round went as it did, and where the time went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Any

from vllm_eesd.traces.spell import SpelledRound

#: A round of median length gets so many pixels of the time line; where there are many, it scrolls.
ROUND_PX = 15
TICKS = 8
#: Heights in the time line's own units: a lane of emitted tokens above one of time.
TOKENS_HEIGHT, TIME_TOP, TIME_HEIGHT = 50, 56, 24


@dataclass(frozen=True)
class Generation:
    """One request's rounds, spelled out.

    Attributes:
        title: what was run, for the headline.
        details: (name, value) pairs shown under it.
        prompt: its text.
        first: what the prompt's own forward pass emitted.
        rounds: as `spell` makes them.
    """

    title: str
    details: list[tuple[str, str]]
    prompt: str
    first: str
    rounds: list[SpelledRound]


def render(generation: Generation) -> str:
    """Return the page: one HTML document that needs nothing else."""
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    rounds = generation.rounds
    return template.substitute(
        title=escape(generation.title),
        details="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in generation.details),
        figures="".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in figures(rounds)),
        prompt=escape(generation.prompt),
        first=_text(generation.first),
        rounds="".join(_round(number, record) for number, record in enumerate(rounds)),
        timeline=_timeline(rounds),
        num_rounds=len(rounds),
        # "<" cannot appear, so no text can end the script element.
        data=json.dumps([_shown(record) for record in rounds]).replace("<", "\\u003c"),
    )


def figures(rounds: Sequence[SpelledRound]) -> list[tuple[str, str]]:
    """Return (name, value) pairs that sum the rounds up; nothing can be divided by where there are none."""
    emitted = sum(len(record["emitted"]) for record in rounds)
    drafted = sum(len(record["draft"]) for record in rounds)
    accepted = sum(record["accepted"] for record in rounds)
    copied = sum(len(record["draft"]) for record in rounds if record["copied"])
    draft_ms, verify_ms = (sum(times(record)[part] for record in rounds) for part in (0, 1))
    plain_ms = sum(record["plain_ms"] * len(record["emitted"]) for record in rounds)
    total_ms = draft_ms + verify_ms

    def ratio(part: float, whole: float, pattern: str) -> str:
        return pattern.format(part / whole) if whole else "-"

    return [
        ("tokens from rounds", str(emitted)),
        ("rounds", str(len(rounds))),
        ("tokens per round", ratio(emitted, len(rounds), "{:.2f}")),
        ("drafted per round", ratio(drafted, len(rounds), "{:.2f}")),
        ("of drafts accepted", ratio(accepted, drafted, "{:.0%}")),
        ("of drafts copied", ratio(copied, drafted, "{:.0%}")),
        ("ms per token", ratio(total_ms, emitted, "{:.2f}")),
        ("of the time drafting", ratio(draft_ms, total_ms, "{:.0%}")),
        ("estimated speedup", ratio(plain_ms, total_ms, "{:.2f}x")),
    ]


def times(record: SpelledRound) -> tuple[float, float]:
    """Return a round's ms of drafting and of verification."""
    return sum(record["draft_steps_ms"]) + record["draft_rest_ms"], record["verify_ms"]


def _shown(record: SpelledRound) -> dict[str, Any]:
    """What the page's script shows of a round."""
    draft_ms, verify_ms = times(record)
    shown = {name: value for name, value in record.items() if name not in ("request", "draft", "emitted")}
    return shown | {"draft_ms": draft_ms, "verify_ms": verify_ms, "num_emitted": len(record["emitted"])}


def _round(number: int, record: SpelledRound) -> str:
    accepted = [text for text, verdict in record["drafted"] if verdict == "accepted"]
    tokens = [_token(text, "accepted") for text in accepted] + [_token(record["own"], record["kind"])]
    return f'<span class="round" data-round="{number}">{"".join(tokens)}</span>'


def _token(text: str, kind: str) -> str:
    return f'<span class="token {kind}">{_text(text)}</span>' if text else ""


def _text(text: str) -> str:
    # A line end has no width to colour: the mark's content is the style sheet's, so that copied text stays the text.
    return escape(text).replace("\n", '<i class="line-end"></i>\n')


def _timeline(rounds: Sequence[SpelledRound]) -> str:
    """Bars over time: above what each round emitted, below its drafting and its verification."""
    if not rounds:
        return ""
    starts = [record["at_s"] * 1e3 - rounds[0]["at_s"] * 1e3 for record in rounds]
    total = starts[-1] + sum(times(rounds[-1]))
    lengths = sorted(sum(times(record)) for record in rounds)
    width = total / (lengths[len(lengths) // 2] or 1.0) * ROUND_PX
    unit = TOKENS_HEIGHT / max(len(record["emitted"]) for record in rounds)
    bars = []
    for number, (start, record) in enumerate(zip(starts, rounds, strict=True)):
        draft_ms, verify_ms = times(record)
        length, accepted = draft_ms + verify_ms, record["accepted"] * unit
        parts = [
            _bar("accepted", start, TOKENS_HEIGHT - accepted, length, accepted),
            _bar(record["kind"], start, TOKENS_HEIGHT - accepted - unit, length, unit),
            _bar("draft", start, TIME_TOP, draft_ms, TIME_HEIGHT),
            _bar("verify", start + draft_ms, TIME_TOP, verify_ms, TIME_HEIGHT),
            _bar("all", start, 0, length, TIME_TOP + TIME_HEIGHT),
        ]
        bars.append(f'<g data-round="{number}">{"".join(parts)}</g>')
    ticks = [f'<span style="left:{100 * n / TICKS:g}%">{total * n / TICKS:.0f} ms</span>' for n in range(TICKS)]
    return (
        f'<div class="scroll"><div class="lanes" style="min-width:{width:.0f}px">'
        f'<svg viewBox="0 0 {total:.3f} {TIME_TOP + TIME_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="time line of drafting and verification">{"".join(bars)}</svg>'
        f'<div class="ticks">{"".join(ticks)}</div></div></div>'
    )


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.3f}" y="{y:.2f}" width="{width:.3f}" height="{height:.2f}"/>'
