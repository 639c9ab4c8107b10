"""Which two candidates are compared: pick-lists, a card for each, and a button that swaps them."""

import streamlit as st

from quantwatch.domain import RunResult
from quantwatch.errors import UserError
from quantwatch.store.records import RunSummary
from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import compare
from quantwatch_dashboard.components.address import pick
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.logic import series
from quantwatch_dashboard.logic.contrast import Side
from quantwatch_dashboard.queries import compare as compare_queries
from quantwatch_dashboard.queries import runs as run_queries

_SIDES = ("a", "b")


def choose(url: str, a: RunResult, b: RunResult) -> tuple[Side, Side]:
    """Let the reader choose both, and swap them; return what is chosen."""
    left, middle, right = st.columns([10, 2, 10], vertical_alignment="top")
    with right:
        after = _side(url, "b", b, avoid=None)
    with left:
        same = a.run_id == b.run_id and len(a.candidates) > 1
        named = after.candidate.name
        before = _side(url, "a", a, avoid=named if same else None, like=named)
    with middle:
        st.html(tag("div", class_="qw-swap-space"))
        st.button("⇄ Swap", on_click=_swap, key="swap", width="stretch")
    return before, after


def _side(url: str, side: str, result: RunResult, avoid: str | None, like: str = "") -> Side:
    runs: dict[str, RunSummary | RunResult] = {result.run_id: result}
    runs |= compare_queries.options(url, result.check)
    letter = side.upper()
    run = pick(f"Run {letter}", f"run_{side}", list(runs), result.run_id,
               lambda run_id: _described(runs[run_id]))  # fmt: skip
    chosen = run_queries.result(url, run)
    names = [c.name for c in chosen.candidates if c.failure is None]
    lead = series.leading(chosen)
    if not names or lead is None:
        raise UserError(f"Run {run} measured no candidate: there is nothing to compare.")
    usual = like if like in names else lead.name
    usual = next((name for name in names if name != avoid), usual) if usual == avoid else usual
    name = pick(f"Candidate {letter}", f"candidate_{side}", names, usual)
    found = Side(chosen, next(c for c in chosen.candidates if c.name == name))
    st.html(compare.side_card(side, found, clock.now(), clock.zone()))
    return found


def _described(run: RunSummary | RunResult) -> str:
    verdict = "no verdict" if run.verdict is None else run.verdict.value
    when = text.minute(run.started_at, clock.zone())
    return text.run_line(when, verdict, run.run_id, run.check)


def _swap() -> None:
    """Let each side be the other one."""
    for name in ("run", "candidate"):
        keys = [f"{name}_{side}" for side in _SIDES]
        values = [st.query_params.get(key, "") for key in keys]
        for key, value in zip(keys, reversed(values), strict=True):
            st.query_params[key] = value
