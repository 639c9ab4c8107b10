"""GPU telemetry as tables: the cards, and what each did during the newest runs."""

from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

from quantwatch_dashboard import text
from quantwatch_dashboard.charts.strip import strip
from quantwatch_dashboard.components.markup import Html, bar, image, link, numbers, sub, table, tag
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.gpu_runs import Card, CardUse, RunUse


def cards(found: Iterable[Card]) -> Html:
    """Return one row per card over all runs that are shown."""
    heads = numbers("Attempts", "Peak memory", "Hottest", "Throttled", "ECC errors")
    headers = ["Card", *heads, "Peak memory by run"]
    return table(headers, map(_card, found))


def _card(card: Card) -> list[object]:
    uuid = tag("span", card.uuid, class_="qw-sub qw-mono")
    whole = "" if card.memory_total is None else f" of {text.size(round(card.memory_total))}"
    peak = text.NONE if card.memory_peak is None else f"{text.size(round(card.memory_peak))}{whole}"
    drawn = strip(card.memory_shares)
    throttled = f"{card.num_throttled} of {card.num_attempts}"
    return [
        tag("td", card.name, uuid, class_="qw-name"),
        tag("td", str(card.num_attempts), class_="qw-n"),
        tag("td", peak, class_="qw-n"),
        tag("td", _degrees(card.hottest), class_="qw-n"),
        tag("td", throttled, class_="qw-n qw-hot" if card.num_throttled else "qw-n"),
        tag("td", text.number(card.ecc_uncorrected), class_="qw-n"),
        tag(
            "td",
            image(drawn, "peak memory by run, oldest first, from zero", "qw-spark qw-small-spark"),
        ),
    ]


def runs(found: Sequence[RunUse], now: datetime, zone: tzinfo) -> Html:
    """Return one row per attempt and card; without cards the reason why."""
    heads = numbers("Peak memory", "Load, mean", "Load, max", "Hottest", "Power, mean")
    rows = (row for use in found for row in _rows(use, now, zone))
    return table(["Run", "Card", *heads, "Throttled by", *numbers("Process memory")], rows)


def _rows(use: RunUse, now: datetime, zone: tzinfo) -> Iterable[list[object]]:
    attempt = use.attempt
    when = sub(moment(attempt.started_at, now, zone))
    named = tag("td", link(attempt.check, "run", run=attempt.run_id), when, class_="qw-name")
    memory = tag("td", text.size(attempt.peak_memory_bytes), class_="qw-n")
    if not use.cards:
        yield [named, tag("td", use.why, colspan="7", class_="qw-soft"), memory]
    for card in use.cards:
        yield [named, *_cells(card, use.driver), memory]


def _cells(card: CardUse, driver: str) -> list[object]:
    share = card.memory_share
    peak = text.NONE if card.memory_peak is None else text.size(round(card.memory_peak))
    filled = Html("")
    if share is not None:
        filled = bar(share, "var(--qw-link)", f"{text.share(share)} of the card")
    missing = tag("span", "; ".join(card.not_told), class_="qw-sub") if card.not_told else Html("")
    throttles = ", ".join(card.throttles)
    return [
        tag(
            "td", card.name, tag("span", f"driver {driver or 'not told'}", class_="qw-sub"), missing
        ),
        tag("td", peak, filled, class_="qw-n"),
        tag("td", _percent(card.load_mean), class_="qw-n"),
        tag("td", _percent(card.load_max), class_="qw-n"),
        tag("td", _degrees(card.hottest), class_="qw-n"),
        tag(
            "td",
            text.NONE if card.power_mean is None else f"{card.power_mean:.0f} W",
            class_="qw-n",
        ),
        tag("td", throttles or "nothing", class_="qw-hot" if throttles else "qw-soft"),
    ]


def _percent(value: float | None) -> str:
    return text.NONE if value is None else f"{value:.0f} %"


def _degrees(value: float | None) -> str:
    return text.NONE if value is None else f"{value:.0f} °C"
