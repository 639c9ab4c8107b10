"""Kernels as tables: operator × back end, failures, one operator by shape and dtype, batches."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, tzinfo

from quantwatch.config.apply import differences
from quantwatch.domain import Verdict
from quantwatch.store.kernel_groups import FAILED, NOT_APPLICABLE, PASSED
from quantwatch.store.kernels import KernelBatch, KernelCase
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.kernels import shape_words
from quantwatch_dashboard.charts.sparkline import Trend, sparkline
from quantwatch_dashboard.components.markup import Html, image, join, link, table, tag
from quantwatch_dashboard.components.verdict import Mark, pill, tone
from quantwatch_dashboard.kernel_matrix import UNTESTED, Cell, Key, Place, share
from quantwatch_dashboard.kernel_uses import Use, Uses

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
            tag("td", tag("span", operator, class_="qw-mono"), class_="name"),
            *(_cell(cells.get((operator, backend)), address) for backend in backends),
            tag("td", used_by(users[operator]), class_="qw-uses"),
        ]
        for operator in operators
    )
    return table(["Operator", *backends, "Run by"], rows, "qw-kernels")


def _cell(cell: Cell | None, address: Mapping[str, str]) -> Html:
    if cell is None:
        return tag("td", "–", class_="qw-soft")
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
    wide = 100 * min(1.0, worst if math.isfinite(worst) else 1.0)
    color = "var(--qw-regression)" if worst > 1 else "var(--qw-pass)"
    bar = tag("span", tag("b", style=f"width: {wide:.1f}%; --series: {color}"), class_="qw-bar")
    return tag("span", f"{share_words(worst)} of tolerance", bar, class_="qw-line")


def share_words(value: float | None) -> str:
    """Return a share of the tolerance: ``12 %``, ``15 ×``; 100 % is still allowed."""
    if value is None:
        return "–"
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
        words = f"{group.num_cases:,} cases"
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
    drawn = sparkline([Trend(index, values)], len(values))
    words = f"{what} over {len(known)} batches, newest {text.number(known[-1])}"
    return image(drawn, words, "qw-spark qw-small-spark")


def used_by(found: Uses) -> Html:
    """Return which checks ask for an operator, or that it can't be known."""
    if found.measures is not None:
        if not found.measures:
            return tag("span", "no check", class_="qw-soft")
        words = "check measures" if found.measures == 1 else "checks measure"
        return tag("span", f"{found.measures} {words} with it")
    if not found.known:
        why = "No configuration says whether it runs, and no newest run noted anything of it."
        return tag("span", "unknown", class_="qw-soft", title=why)
    parts = [tag("span", *_use(use), class_="qw-line") for use in found.uses[:_MOST_USES]]
    if len(found.uses) > _MOST_USES:
        parts.append(tag("span", f"and {len(found.uses) - _MOST_USES} more", class_="qw-sub"))
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
    headers = ["Operator", "Back end", "Case", *(tag("th", n, class_="n") for n in ("Error", "Of tolerance"))]  # noqa: E501  # fmt: skip
    rows = (
        [
            tag("td", tag("span", case.operator, class_="qw-mono"), class_="name"),
            case.backend,
            tag("td", shape_words(case.shape), _where(case), class_="words"),
            tag("td", text.number(case.error), class_="n"),
            tag("td", share_words(share(case.error, case.tolerance)), class_="n qw-hot"),
            tag("td", text.readable(case.message), _again(case, program, device), class_="words"),
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
        rows.append([tag("td", named, class_="name"), shape_words(shape), *cells])
        last = variant
    return table(["Variant", "Shape", *dtypes], rows, "qw-places qw-tall")


def _place(place: Place | None) -> Html:
    if place is None:
        return tag("td", "–", class_="qw-soft")
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


def batches(found: Iterable[KernelBatch], now: datetime, zone: tzinfo) -> Html:
    """Return the batches, newest first; each name shows the page as of it."""
    rows = (
        [
            tag("td", _as_of(b, zone),
                tag("span", text.age(b.started_at, now), class_="qw-sub")),
            "tests" if b.kind == "test" else "speeds",
            b.device,
            tag("td", (b.git_sha or "installed")[:10], class_="qw-mono"),
            tag("td", f"{b.num_passed:,}" if b.kind == "test" else "–", class_="n"),
            tag("td", f"{b.num_failed:,}" if b.kind == "test" else "–",
                class_="n qw-hot" if b.num_failed else "n"),
            tag("td", f"{b.num_not_applicable:,}" if b.kind == "test" else "–", class_="n"),
            text.duration((b.finished_at - b.started_at).total_seconds()),
        ]
        for b in found
    )  # fmt: skip
    counts = (tag("th", n, class_="n") for n in ("Passed", "Failed", "Not applicable"))
    return table(["Started", "What", "Device", "Commit", *counts, "Took"], rows)


def _as_of(batch: KernelBatch, zone: tzinfo) -> Html:
    shown = text.instant(batch.started_at, zone)
    return link(shown, "kernels", batch=batch.id, device=batch.device)


def changed(before: KernelBatch, after: KernelBatch) -> Html:
    """Return what is another one than at the batch before: commit, libraries, driver, machine."""
    found = list(differences(before.environment, after.environment))
    if before.git_sha != after.git_sha:
        # It is in the environment, too, where nobody would look for it.
        found = [line for line in found if not line.startswith("git_commit:")]
        short = [(sha or "installed")[:10] for sha in (before.git_sha, after.git_sha)]
        found.insert(0, f"commit: {short[0]} → {short[1]}")
    if not found:
        return tag("p", "Nothing changed around it since the batch before.", class_="qw-soft")
    lines = (tag("span", text.readable(line), class_="qw-line qw-mono") for line in found[:12])
    return tag("p", tag("b", "Changed since the batch before"), *lines, class_="qw-small")
