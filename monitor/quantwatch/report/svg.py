"""Inline SVG drawings for the HTML report: pure functions, no script, no external resource."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from quantwatch.report.numbers import Number

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 150, 46, 8
_DECADES = 8
"""A bar chart never spans more: smaller values are drawn as the smallest bar."""


class LogAxis(NamedTuple):
    """A logarithmic axis from 10**low to 10**high, mapped to 0 … 1."""

    low: int
    high: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "LogAxis":
        """Cover the positive values and a decade below, at most the largest `_DECADES`."""
        positive = [math.log10(value) for value in values if value > 0]
        if not positive:
            return cls(-1, 0)
        high = math.ceil(max(positive))
        return cls(max(math.floor(min(positive)) - 1, high - _DECADES), high)

    def place(self, value: float) -> float:
        """Return where a value lies on the axis, cut at its ends; 0 and below lie at 0."""
        if value <= 0:
            return 0.0
        at = (math.log10(value) - self.low) / (self.high - self.low)
        return min(max(at, 0.0), 1.0)


def bars(
    numbers: Sequence[Number], names: Sequence[str], marked: frozenset[str], title: str
) -> str:
    """Draw one bar per name on a log axis; marked and non-finite ones stand out, 0 has no bar."""
    axis = LogAxis.over([number.value for number in numbers if number.value is not None])
    step = (_WIDTH - _LEFT) / max(len(names), 1)
    drawn = [
        _bar(number, name, axis, (_LEFT + index * step, step), name in marked)
        for index, (number, name) in enumerate(zip(numbers, names, strict=True))
    ]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT + 24}" role="img" aria-label="{escape(title)}"'
    body = "".join([*_grid(axis), *drawn, *_ticks(names, step)])
    return f"<figure><figcaption>{escape(title)}</figcaption><svg {size}>{body}</svg></figure>"


def interval(
    number: Number, bounds: tuple[float, float] | None, limit: float | None, axis: LogAxis
) -> str:
    """Draw a value with its 95 % interval and the limit as a tick on a log axis."""
    parts = ['<path class="grid" d="M4 9h152"/>']
    if bounds is not None:
        low, high = (_across(axis, bound) for bound in bounds)
        width = max(high - low, 1)
        parts.append(f'<rect class="range" x="{low:.1f}" y="5" width="{width:.1f}" height="8"/>')
    if limit is not None:
        parts.append(f'<path class="limit" d="M{_across(axis, limit):.1f} 1v16"/>')
    if number.value is not None:
        parts.append(f'<circle cx="{_across(axis, number.value):.1f}" cy="9" r="3"/>')
    words = number.text(4) + (f", limit {limit:.4g}" if limit is not None else "")
    return (
        f'<svg class="interval" viewBox="0 0 160 18"><title>{words}</title>{"".join(parts)}</svg>'
    )


def _across(axis: LogAxis, value: float) -> float:
    return 4 + 152 * axis.place(value)


def _bar(number: Number, name: str, axis: LogAxis, span: tuple[float, float], marked: bool) -> str:
    if number.kind == "missing" or number.value == 0:
        return ""
    share = 1.0 if number.value is None else max(axis.place(number.value), 0.02)
    height = share * (_HEIGHT - _TOP)
    kind = ' class="bad"' if number.value is None else ' class="hot"' if marked else ""
    x, width = span[0] + span[1] * 0.1, span[1] * 0.8
    box = f'x="{x:.1f}" y="{_HEIGHT - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<rect{kind} {box}><title>{escape(name)}: {number.text(4)}</title></rect>"


def _grid(axis: LogAxis) -> list[str]:
    lines = []
    for power in range(axis.low, axis.high + 1):
        y = _HEIGHT - axis.place(10.0**power) * (_HEIGHT - _TOP)
        label = f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>'
        lines.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH}"/>{label}')
    return lines


def _ticks(names: Sequence[str], step: float) -> list[str]:
    every = max(1, math.ceil(len(names) / 16))
    return [
        f'<text x="{_LEFT + (index + 0.5) * step:.1f}" y="{_HEIGHT + 16}" text-anchor="middle">'
        f"{escape(name.removeprefix('layers.'))}</text>"
        for index, name in enumerate(names)
        if index % every == 0
    ]
