"""Batches of kernel tests and timings, and what was another one from batch to batch."""

from collections.abc import Iterable
from datetime import datetime, tzinfo

from quantwatch.config.apply import differences
from quantwatch.store.kernels import KernelBatch
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, link, numbers, sub, table, tag
from quantwatch_dashboard.components.words import moment


def table_of(found: Iterable[KernelBatch], now: datetime, zone: tzinfo) -> Html:
    """Return the batches, newest first; each name shows the page as of it."""
    rows = (
        [
            tag("td", _as_of(b, zone), sub(moment(b.started_at, now, zone))),
            "tests" if b.kind == "test" else "speeds",
            b.device,
            tag("td", (b.git_sha or "installed")[:10], class_="qw-mono"),
            tag("td", _count(b, b.num_passed), class_="qw-n"),
            tag("td", _count(b, b.num_failed), class_="qw-n qw-hot" if b.num_failed else "qw-n"),
            tag("td", _count(b, b.num_not_applicable), class_="qw-n"),
            text.took(b.started_at, b.finished_at),
        ]
        for b in found
    )  # fmt: skip
    counts = numbers("Passed", "Failed", "Not applicable")
    return table(["Started", "What", "Device", "Commit", *counts, "Took"], rows)


def _count(batch: KernelBatch, number: int) -> str:
    return f"{number:,}" if batch.kind == "test" else text.NONE


def _as_of(batch: KernelBatch, zone: tzinfo) -> Html:
    shown = text.minute(batch.started_at, zone)
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
