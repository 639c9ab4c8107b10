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

    def one() -> bytes:
        grid = tokens.grid(focus.url, focus.key, suite)
        return exports.matrix_csv(grid) if grid is not None else b""

    def every() -> bytes:
        grid = tokens.measured_tokens(focus.url, *focus.key[:3], suite)
        return exports.matrix_csv(grid) if grid is not None else b""

    page.section(
        "Download",
        "Every digit as it was stored; one row per token, one column per place. Pictures have a"
        " button of their own, at their top right, that saves them as PNG.",
    )
    left, middle, _ = st.columns([3, 3, 4])
    with left:
        name = f"{focus.file_name}-prompt{focus.prompt}.csv"
        csv(f"Matrix of prompt {focus.prompt}, CSV", one, name)
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
