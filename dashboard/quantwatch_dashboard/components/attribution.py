"""Shares of a candidate's KL as a table with bars, and what is to be restored."""

from quantwatch.domain import AttributedPart, Attribution, Restoration
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, bar, join, link, numbers, pairs, table, tag

MOST = 20
"""Rows that are shown; the command prints all."""
_COLUMNS = ("Share of the KL", "KL alone, nats", "KL of noise", "Direction", "Relative error")


def shares(found: Attribution, run_id: str, color: str) -> Html:
    """Return the costliest parts, each with a link to its place; bars compare with the largest."""
    shown = found.ranked[:MOST]
    largest = max((part.kl for part in shown), default=0.0)
    rows = (_row(found, part, run_id, (largest, color)) for part in shown)
    return table(["Part", *numbers(*_COLUMNS)], rows, "qw-top")


def facts(found: Attribution, num_prompts: int) -> Html:
    """Return the whole that the shares are of, and the controls."""
    shown: list[tuple[str, object]] = [
        ("Candidate's KL", f"{text.number(found.kl)} nats per token"),
        ("Measured on", f"{found.num_scored:,} tokens of {found.num_prompts} of {num_prompts} "
                        f"prompts, seed {found.seed}"),
        ("Additivity", f"{text.or_dash(found.additivity)}: sum of the parts ÷ the whole"),
        ("All parts together", f"{text.number(found.together_kl)} nats"),
        ("Nothing swapped", f"exactly 0 at {found.num_boundaries} boundaries"),
        *(("Note", note) for note in found.notes),
        *_restored(found.restoration),
    ]  # fmt: skip
    return pairs(shown, "qw-facts")


def _row(
    found: Attribution, part: AttributedPart, run_id: str, scale: tuple[float, str]
) -> list[object]:
    largest, color = scale
    query = {"run": run_id, "candidate": found.candidate, "layer": part.scope}
    length = part.kl / largest if largest else 0.0
    cells = (
        text.number(part.kl),
        text.number(part.noise_kl),
        text.or_dash(part.direction),
        text.or_dash(part.relative_error),
    )
    share = join([text.percent(found.share(part)), bar(length, color)])
    return [
        tag("td", link(part.scope, "run", **query), class_="qw-mono qw-small"),
        tag("td", share, class_="qw-n"),
        *(tag("td", cell, class_="qw-n") for cell in cells),
    ]


def _restored(restored: Restoration | None) -> list[tuple[str, object]]:
    if restored is None:
        return []
    if restored.named is None:
        return [("To restore", restored.words)]
    return [("To restore", join([tag("b", restored.named), f" ({restored.words})"]))]
