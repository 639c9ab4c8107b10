"""Operations: what the GPUs did during runs."""

import streamlit as st

from quantwatch_dashboard import clock
from quantwatch_dashboard.components import gpus, page, trouble
from quantwatch_dashboard.logic import gpu_runs
from quantwatch_dashboard.queries import operations as operation_queries

_ATTEMPTS = 60


def show(url: str) -> None:
    """Show what the GPUs did during the newest runs, or why nothing is known."""
    uses = gpu_runs.run_uses(operation_queries.telemetry(url, _ATTEMPTS))
    page.section(
        "GPUs during runs",
        f"Sampled once a second while a worker measures, kept with each attempt; the {_ATTEMPTS}"
        " newest runs. Throttling slows a run down; it does not change what is measured.",
    )
    if not any(use.cards for use in uses):
        reasons = list(dict.fromkeys(use.why for use in uses if use.why))
        known = f"The newest runs say: {'; '.join(reasons[:3])}." if reasons else "No run was kept."
        st.html(trouble.state("No GPU was seen during a run", known, "Runs on the CPU are fine."))
        return
    st.html(gpus.cards(gpu_runs.cards(uses)))
    page.section("By run", "The newest first. Process memory is the worker's own peak.")
    st.html(gpus.runs(uses, clock.now(), clock.zone()))
