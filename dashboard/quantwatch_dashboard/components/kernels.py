"""Kernels as tables: operator × back end, failures, one operator by shape and dtype."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence

from quantwatch.domain import Verdict
from quantwatch.store.kernel_groups import FAILED, NOT_APPLICABLE, PASSED
from quantwatch.store.kernels import KernelCase
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.sparkline import sparkline
from quantwatch_dashboard.components.markup import (
    Html,
    bar,
    image,
    join,
    link,
    numbers,
    sub,
    table,
    tag,
)
from quantwatch_dashboard.components.verdict import pill, tone
from quantwatch_dashboard.logic.kernel_matrix import UNTESTED, Cell, Key, Place, share
from quantwatch_dashboard.logic.kernel_uses import Use, Uses
from quantwatch_dashboard.logic.lines import Sparkline
from quantwatch_dashboard.logic.marks import Mark

_MARKS = {
    PASSED: (Mark("✓", "Passes"), tone(Verdict.PASS)),
    FAILED: (Mark("✕", "Fails"), tone(Verdict.REGRESSION)),
    NOT_APPLICABLE: (Mark("–", "Does not apply"), tone(None)),
    UNTESTED: (Mark("?", "Only timed"), tone(None)),
}
_MOST_USES = 4


def matrix(
    cells: Mapping[Key, Cell], shown: tuple[Sequence[str], Sequence[str]],
    users: Mapping[str, Uses], address: Mapping[str, str],
) -> Html:  # fmt: skip
    """Return one row per operator, one column per back end, and who runs it."""
    operators, backends = shown
    rows = (
        [
            tag("td", tag("span", operator, class_="qw-mono"), class_="qw-name"),
            *(_cell(cells.get((operator, backend)), address) for backend in backends),
            tag("td", used_by(users[operator]), class_="qw-uses"),
        ]
        for operator in operators
    )
    return table(["Operator", *backends, "Run by"], rows, "qw-kernels")


def _cell(cell: Cell | None, address: Mapping[str, str]) -> Html:
    if cell is None:
        return tag("td", text.NONE, class_="qw-soft")
    shown, color = _MARKS[cell.status]
    query = {**address, "op": cell.operator, "backend": cell.backend}
    head = link(pill(shown, color), "kernels", **query)
    error = _line(cell.trend, 2, "largest error ÷ tolerance")
    parts = [head, _room(cell), error, _counts(cell), _speed(cell)]
    return tag("td", *parts, class_=f"qw-field {'qw-bad' if cell.status == FAILED else ''}".strip())


def _room(cell: Cell) -> Html:
    """Return the largest error as a share of what is allowed, with a bar."""
    worst = cell.group.worst_share if cell.group is not None else None
    if worst is None:
        return Html("")
    color = "var(--qw-regression)" if worst > 1 else "var(--qw-pass)"
    return tag("span", f"{share_words(worst)} of tolerance", bar(worst, color), class_="qw-line")


def share_words(value: float | None) -> str:
    """Return a share of the tolerance: ``12 %``, ``15 ×``; 100 % is still allowed."""
    if value is None:
        return text.NONE
    if not math.isfinite(value) or value > 1:
        return f"{text.number(value)} ×" if math.isfinite(value) else "∞ ×"
    return f"{text.number(100 * value, 2 if value < 0.995 else 3)} %"


def _counts(cell: Cell) -> Html:
    group = cell.group
    if group is None:
        return Html("")
    words = f"{group.num_passed:,} of {group.num_cases:,} pass"
    if group.num_failed:
        words = f"{group.num_failed:,} of {group.num_cases:,} fail"
    elif group.num_not_applicable == group.num_cases:
        words = text.plural(group.num_cases, "case")
    if cell.remarks.num_fallbacks:
        words += f" · {cell.remarks.num_fallbacks:,} fallbacks"
    why = "; ".join(f"{reason} ({cases:,})" for reason, cases in cell.remarks.reasons[:5])
    return tag("span", words, class_="qw-sub", title=why or None)


def _speed(cell: Cell) -> Html:
    speed = cell.speed
    if speed is None:
        return Html("")
    slow, fast = speed.slowest, speed.fastest
    if speed.num_shapes == 1:
        bounds = f"95 %: {text.number(slow.ratio_low)} … {text.number(slow.ratio_high)}"
    else:
        bounds = f"{text.number(slow.ratio)} … {text.number(fast.ratio)} by shape"
    head = tag("b", f"{text.number(speed.middle)} × ")
    trend = _line(speed.trend, 0, "speed")
    below = tag("span", bounds, class_="qw-sub")
    return tag("span", head, "F.linear ", trend, below, class_="qw-line")


def _line(values: Sequence[float | None], index: int, what: str) -> Html:
    """Return a sparkline of one value per batch; nothing of fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Html("")
    drawn = sparkline([Sparkline(index, values)], len(values))
    words = f"{what} over {len(known)} batches, newest {text.number(known[-1])}"
    return image(drawn, words, "qw-spark qw-small-spark")


def used_by(found: Uses) -> Html:
    """Return which checks ask for an operator, or that it can't be known."""
    if found.measures is not None:
        if not found.measures:
            return tag("span", "no check", class_="qw-soft")
        said = text.plural(found.measures, "check measures", "checks measure")
        return tag("span", f"{said} with it")
    if not found.known:
        why = "No configuration says whether it runs, and no newest run noted anything of it."
        return tag("span", "unknown", class_="qw-soft", title=why)
    parts = [tag("span", *_use(use), class_="qw-line") for use in found.uses[:_MOST_USES]]
    if more := text.more(len(found.uses), _MOST_USES):
        parts.append(sub(more))
    if found.doubtful:
        named = ", ".join(found.doubtful[:_MOST_USES])
        parts.append(tag("span", f"unknown: {named} (recipe in a file)", class_="qw-sub"))
    return join(parts) if parts else tag("span", "no check", class_="qw-soft")


def _use(use: Use) -> list[object]:
    how = f" ({use.backend})" if use.backend else ""
    partly = tag("span", "noted: ", "; ".join(use.fallbacks), class_="qw-sub")
    named = link(use.check, "check", check=use.check)
    return [named, f" {use.variant}{how}", *([partly] if use.fallbacks else [])]


def failures(cases: Iterable[KernelCase], program: str, device: str) -> Html:
    """Return one row per failed case with the command that repeats it."""
    headers = ["Operator", "Back end", "Case", *numbers("Error", "Of tolerance")]
    rows = (
        [
            tag("td", tag("span", case.operator, class_="qw-mono"), class_="qw-name"),
            case.backend,
            tag("td", text.shape(case.shape), _where(case), class_="qw-text"),
            tag("td", text.number(case.error), class_="qw-n"),
            tag("td", share_words(share(case.error, case.tolerance)), class_="qw-n qw-hot"),
            tag("td", text.readable(case.message), _again(case, program, device), class_="qw-text"),
        ]
        for case in cases
    )
    return table([*headers, "What happened, and how to see it again"], rows, "qw-failures")


def _where(case: KernelCase) -> Html:
    words = " · ".join(word for word in (case.variant, case.dtype, case.layout) if word)
    return tag("span", words, class_="qw-sub")


def _again(case: KernelCase, program: str, device: str) -> Html:
    return tag("pre", repeat(case, program, device), class_="qw-code qw-mono")


def repeat(case: KernelCase, program: str, device: str) -> str:
    """Return the command that runs one case again."""
    words = ["kernels", "test", "--op", case.operator, "--case", case.name, "--device", device]
    return f"{program} {shlex.join(words)}"


def by_shape(found: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Place]]) -> Html:
    """Return one row per variant and shape, one column per dtype: all layouts together."""
    dtypes = list(dict.fromkeys(dtype for row in found.values() for dtype in row))
    rows, last = [], None
    for (variant, shape), row in found.items():
        # Said once: thirty equal words in a column hide where the next variant begins.
        named = (variant or "all") if variant != last else ""
        cells = (_place(row.get(dtype)) for dtype in dtypes)
        rows.append([tag("td", named, class_="qw-name"), text.shape(shape), *cells])
        last = variant
    return table(["Variant", "Shape", *dtypes], rows, "qw-places qw-tall")


def _place(place: Place | None) -> Html:
    if place is None:
        return tag("td", text.NONE, class_="qw-soft")
    total = place.num_passed + place.num_failed + place.num_not_applicable
    if place.num_failed:
        return tag(
            "td", f"✕ {share_words(place.worst_share)}",
            tag("span", f"{place.num_failed} of {total} layouts fail", class_="qw-sub"),
            class_="qw-bad", title=place.message or None,
        )  # fmt: skip
    if not place.num_passed:
        return tag("td", "does not apply", class_="qw-soft", title=place.message or None)
    used = place.worst_share or 0.0
    return tag("td", f"✓ {share_words(place.worst_share)}", class_="qw-heat",
               style=f"--heat: {100 * min(1.0, used):.0f}%")  # fmt: skip
