"""The database as it grows: tiers, tables, the disk, and what retention keeps."""

from collections.abc import Iterable

from quantwatch.config.service import RetentionConfig
from quantwatch.store.sizes import Size, Sizes
from quantwatch_dashboard import text
from quantwatch_dashboard.components.facts import facts
from quantwatch_dashboard.components.markup import Html, bar, join, numbers, table, tag

_MOST_TABLES = 10


def forecast(found: Sizes) -> str:
    """Say by how much it grows and when its disk is full."""
    if not found.flows:
        return "How fast it grows is known once a day has passed with runs."
    grows = f"It grows by {text.size(round(found.bytes_per_day))} a day now"
    if found.free_disk_bytes is None:
        return f"{grows}; the server does not tell how much room its disk has."
    days = found.full_in_days
    if days is None:
        return f"{grows}, and retention takes away as much before the disk is full."
    if days > 3650:
        return f"{grows}; the disk lasts for more than ten years."
    return f"{grows}; with that the disk is full in {days:,.0f} days."


def tiers(found: Sizes) -> Html:
    """Return the tiers with their share and how fast each grows."""
    flows: dict[str, float] = {}
    for flow in found.flows:
        growing = flow.bytes_per_day if flow.days_left > 0 else 0.0
        flows[flow.tier] = flows.get(flow.tier, 0.0) + growing
    rows = (
        [*_size(tier, found.total_bytes), tag("td", _grows(flows.get(tier.name)), class_="qw-n")]
        for tier in sorted(found.tiers, key=lambda tier: -tier.num_bytes)
    )
    return table(["Tier", "Share", *numbers("Size", "Rows", "A day")], rows)


def tables(found: Iterable[Size], total_bytes: int) -> Html:
    """Return the tables with something in them, the largest first."""
    known = [size for size in found if size.num_rows]
    heads = ["Table", "Share", *numbers("Size", "Rows")]
    shown = table(heads, (_size(size, total_bytes) for size in known[:_MOST_TABLES]))
    rest = known[_MOST_TABLES:]
    if not rest:
        return shown
    words = f"{len(rest)} more, {text.size(sum(size.num_bytes for size in rest))} together"
    others = table(heads, (_size(size, total_bytes) for size in rest))
    return join([shown, tag("details", tag("summary", words, class_="qw-small"), others)])


def _size(size: Size, total: int) -> list[object]:
    share = size.num_bytes / total if total else 0.0
    return [
        tag("td", size.name, class_="qw-name"),
        tag("td", bar(share, "var(--qw-link)"), f"{100 * share:.1f} %", class_="qw-share"),
        tag("td", text.size(size.num_bytes), class_="qw-n"),
        tag("td", f"{size.num_rows:,}", class_="qw-n"),
    ]


def _grows(rate: float | None) -> str:
    if rate is None:
        return text.NONE
    return text.size(round(rate)) if rate else "no growth"


def retention(config: RetentionConfig, *, known: bool) -> Html:
    """Return how long things are kept."""
    pairs: list[tuple[str, object]] = [
        (str(name), str(value)) for name, value in config.model_dump(mode="json").items()
    ]
    if not known:
        pairs.append(("note", "what was applied is not understood; these are the defaults"))
    return facts(pairs)
