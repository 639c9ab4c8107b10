"""What can be downloaded: tables and matrices as CSV, the report as HTML, pictures as PNG."""

from collections.abc import Callable

import streamlit as st

from quantwatch.domain import RunResult
from quantwatch.report import html
from quantwatch_dashboard import access
from quantwatch_dashboard.components import page
from quantwatch_dashboard.logic import exports
from quantwatch_dashboard.logic.focus import Focus
from quantwatch_dashboard.queries import tokens


def csv(label: str, made: Callable[[], bytes], name: str) -> None:
    """Show a button for a CSV file, which is made only when it is pressed."""
    st.download_button(
        label, access.for_readers(made), exports.file_name(name), "text/csv",
        on_click="ignore", key=f"csv-{label}",
    )  # fmt: skip


def matrices(focus: Focus) -> None:
    """Offer the chosen metric of one prompt, or of the measured tokens of all prompts."""
    suite = focus.result.suite_hash
    grid = tokens.grid(focus.url, focus.key, suite)
    if grid is None:
        return
    part = exports.around(grid, focus.position)

    # Read anew: Streamlit keeps this function, and with it whatever it holds.
    def one() -> bytes:
        found = tokens.grid(focus.url, focus.key, suite)
        return exports.matrix_csv([] if found is None else [exports.around(found, focus.position)])

    def every() -> bytes:
        return exports.matrix_csv(tokens.each_measured(focus.url, focus.key[:3], suite))

    page.section(
        "Download",
        "Every digit as it was stored; one row per token, one column per place. Pictures have a"
        " button of their own, at their top right, that saves them as PNG. A file has at most"
        f" {exports.MOST_CELLS:,} cells: of all prompts the first ones that fit, whole.",
    )
    left, middle, _ = st.columns([3, 3, 4])
    with left:
        name, words = f"{focus.file_name}-prompt{focus.prompt}", f"prompt {focus.prompt}"
        if part is not grid:
            ends = part.places[0].position, part.places[-1].position
            name = f"{name}-tokens{ends[0]}-{ends[1]}"
            words = f"{words}, tokens {ends[0]} to {ends[1]}"
        csv(f"Matrix of {words}, CSV", one, f"{name}.csv")
    with middle:
        csv("Measured tokens of all prompts, CSV", every, f"{focus.file_name}.csv")


def whole(result: RunResult) -> None:
    """Offer every statistic of the run, and the report that needs no server."""
    left, middle, _ = st.columns([3, 3, 4])
    with left:
        name = f"{result.run_id}-measurements.csv"
        csv("All measurements, CSV", lambda: exports.measurements_csv(result), name)
    with middle:
        st.download_button(
            "Report, HTML", access.for_readers(lambda: html.render(result)),
            exports.file_name(f"{result.run_id}.html"), "text/html", on_click="ignore",
            key="report-html",
        )  # fmt: skip
