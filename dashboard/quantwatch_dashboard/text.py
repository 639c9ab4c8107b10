"""Numbers, times and names as a person reads them. Nothing here returns markup."""

import html
import math
import re
from collections.abc import Sequence
from datetime import datetime, tzinfo

from quantwatch.domain import UNDECIDED
from quantwatch.report.numbers import Number
from quantwatch.report.numbers import plural as plural  # noqa: PLC0414 - said here, too
from quantwatch.store.kinds import from_kind

NOT_MEASURED = "not measured"
NONE = "–"
ANY = "*"
"""What a filter is called, in addresses, when it leaves nothing out. Nothing else can be called
that: names begin with a letter or a digit."""
_MAX_PLACES = 6
_TURNING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls of the direction of writing."""
_LARGEST_FACTOR = 16.0
_SHORTEST_DIGEST = 36
_ID_END = 8


def escape(value: object) -> str:
    """Return text that HTML shows as it is, whatever it contains."""
    return html.escape(in_order(str(value)), quote=True)


def label(value: object) -> str:
    """Return text that Plotly shows as it is: it knows &lt; but not &quot;."""
    return html.escape(in_order(str(value)), quote=False)


def in_order(value: str) -> str:
    """Return text with what would turn round the rest of its line made visible.

    Only that: other marks belong to how some languages are written.
    """
    return _TURNING.sub(lambda found: _visible(found[0]), value) if _may_turn(value) else value


def _may_turn(value: str) -> bool:
    return not value.isascii() and _TURNING.search(value) is not None


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits: ``0.0123``, ``1.23e−7``, ``NaN``, ``+∞``."""
    if value is None:
        return NOT_MEASURED
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:.{places}f}".replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


def or_dash(value: float | None) -> str:
    """Return a number, a dash where there is none."""
    return NONE if value is None else number(float(value))


def plus_minus(value: float | None, error: float) -> str:
    """Return a mean and its standard error in one notation: ``0.00137 ± 0.00011``."""
    mean = number(value)
    if value is None or not math.isfinite(value):
        return mean
    places = 1 - math.floor(math.log10(error)) if 0 < error < math.inf else _MAX_PLACES + 1
    fixed = places <= _MAX_PLACES and "e" not in mean
    return f"{mean} ± {f'{error:.{max(0, places)}f}' if fixed else number(error, 2)}"


def signed(value: float, digits: int = 4) -> str:
    """Return a difference with its sign: ``+0.1234``, ``−0.1234``, ``0``."""
    shown = number(value, digits)
    return f"+{shown}" if value > 0 and math.isfinite(value) else shown


def factor(log2: float) -> str:
    """Return a ratio by its binary logarithm: ``× 2``, ``÷ 1.41``, ``× 2^40``."""
    size = abs(log2)
    shown = f"2^{size:.0f}" if size > _LARGEST_FACTOR else f"{2.0**size:.3g}"
    return f"{'×' if log2 > 0 else '÷'} {shown}"


def interval(bounds: tuple[float, float] | None) -> str:
    """Return the bounds of an interval: ``0.00115 … 0.00159``."""
    return NOT_MEASURED if bounds is None else f"{number(bounds[0])} … {number(bounds[1])}"


def percent(value: float | None) -> str:
    """Return a share as a percentage; 100 % only when it is exactly 1."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{100 * value:.2f}"
    return "100 %" if value == 1 else f"{'> 99.99' if text == '100.00' else text} %"


def share(value: float | None) -> str:
    """Return a share in whole percent, as on a bar: ``34 %``; a dash without one."""
    return NONE if value is None else f"{100 * value:.0f} %"


def more(total: int, shown: int, what: str = "") -> str:
    """Return what a list leaves out: ``and 3 more``, ``and 3 more runs``; "" for nothing."""
    left = total - shown
    return f"and {left:,} more{f' {what}' if what else ''}" if left > 0 else ""


def size(num_bytes: int | None) -> str:
    """Return a size in decimal units, as file sizes are printed."""
    if num_bytes is None:
        return NONE
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``3 min 12 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def took(start: datetime, end: datetime | None) -> str:
    """Return how long something lasted; a dash when it is not over."""
    return NONE if end is None else duration(max(0.0, (end - start).total_seconds()))


def age(then: datetime, now: datetime, *, fine: bool = False) -> str:
    """Return how long ago something was: ``just now``, ``5 min ago``, ``3 d ago``.

    `fine` for what changes every few seconds: ``4 s ago``.
    """
    seconds = (now - then).total_seconds()
    if fine:
        return f"{passed(seconds)} ago"
    return "just now" if seconds < 45 else f"{passed(max(60.0, seconds))} ago"


def passed(seconds: float) -> str:
    """Return a length of time in its largest unit: ``4 s``, ``5 min``, ``2 h``, ``3 d``."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    for unit, length, limit in (("min", 60, 60), ("h", 3600, 48), ("d", 86400, math.inf)):
        if seconds / length < limit:
            return f"{max(1, round(seconds / length))} {unit}"
    raise AssertionError("unreachable: days have no limit")


def until(then: datetime, now: datetime) -> str:
    """Return how far ahead something is: ``now``, ``in 5 min``, ``in 3 d``; an age when over."""
    if (then - now).total_seconds() < 0:
        return age(then, now)
    ahead = age(now, then)
    return "now" if ahead == "just now" else f"in {ahead.removesuffix(' ago')}"


def instant(when: datetime, zone: tzinfo) -> str:
    """Return an absolute time in the reader's time zone, with the zone's name."""
    return when.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def minute(when: datetime, zone: tzinfo) -> str:
    """Return a time in the reader's time zone, to the minute: ``2026-01-31 07:45``."""
    return when.astimezone(zone).strftime("%Y-%m-%d %H:%M")


def second(when: datetime, zone: tzinfo) -> str:
    """Return a time of today in the reader's time zone: ``07:45:12``."""
    return when.astimezone(zone).strftime("%H:%M:%S")


def run_line(when: str, outcome: str, run_id: str, check: str = "") -> str:
    """Return a run in a line: ``nightly · 2026-01-31 07:45 · pass · …5KQ2M8ZV``."""
    return " · ".join(word for word in (check, when, outcome, short_id(run_id)) if word)


def scope(name: str) -> str:
    """Return ``L14`` for layers.14, ``L14 mlp`` for layers.14.mlp; other scopes stay."""
    return re.sub(r"\blayers\.(\d+)(?:\.)?", r"L\1 ", name).strip()


def clip(value: str, length: int) -> str:
    """Return at most so many characters, with an ellipsis when something was cut."""
    return value if len(value) <= length else value[: length - 1] + "…"


def shape(sizes: Sequence[int]) -> str:
    """Return a shape as people write it: ``16 × 576 × 1536``."""
    return " × ".join(map(str, sizes)) or "scalar"


def digest(value: str) -> str:
    """Return the beginning of a digest: ``cdcdcdcdcdcd…``; other text as it is."""
    is_one = len(value) >= _SHORTEST_DIGEST and set(value) <= set("0123456789abcdef")
    return f"{value[:12]}…" if is_one else value


def short_id(name: str) -> str:
    """Return the end of an id, which differs: ``…5KQ2M8ZV``."""
    return f"…{name[-_ID_END:]}"


def token(piece: str | None, token_id: int, length: int = 14) -> str:
    """Return a token's text with its white space visible, or its id where the text isn't kept.

    An empty piece is ``·``: its bytes are part of a character that a later token completes.
    """
    if piece is None:
        return f"id {token_id}"
    visible = "".join(_visible(char) for char in piece)
    return clip(visible, length) if visible else "·"


def readable(piece: str) -> str:
    """Return text to be read as it is, with what would reorder or hide it made visible."""
    return "".join(c if c.isspace() or c.isprintable() else _visible(c) for c in piece)


def _visible(char: str) -> str:
    named = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
    return named.get(char, char if char.isprintable() else f"\\u{ord(char):04x}")


def plain(shown: Number) -> float | None:
    """Return a report's number as a float: NaN and ±∞ as themselves, None when there is none."""
    return None if shown.kind in UNDECIDED else from_kind(shown.value, shown.kind)
