"""KL by position: whether candidates fall behind the further a text goes."""

import streamlit as st

from quantwatch.domain import PositionRange, RunResult, ranges_of
from quantwatch_dashboard.charts.positions import position_chart
from quantwatch_dashboard.components import page, picture
from quantwatch_dashboard.components.explain import term
from quantwatch_dashboard.components.markup import join
from quantwatch_dashboard.logic import naming

Found = dict[str, list[PositionRange]]


def show(result: RunResult) -> None:
    """Show output and per-layer KL by position; nothing of runs whose prompts are that short."""
    output, lens = (_found(result, metric) for metric in ("logit_kl", "lens_kl"))
    if len(_places(output)) < 2:
        return
    page.section(
        "KL by position: how far into a text it holds",
        join(["Mean ", term("logit_kl"), " and ", term("lens_kl"), " (over all layers, at the "
              "sampled positions) in ranges that double in length. Bars are standard errors by "
              "prompt, where two prompts reach that far."]),
    )  # fmt: skip
    left, right = st.columns(2, gap="medium")
    with left:
        _draw(result, output, "logit_kl")
    with right:
        if _places(lens):
            _draw(result, lens, "lens_kl")
        else:
            page.say("The lens was off in this run.")


def _draw(result: RunResult, found: Found, metric: str) -> None:
    figure = position_chart(found, _places(found), unit=naming.axis(metric, "mean"))
    alt = f"{naming.title(metric)} of all candidates by position in the prompt"
    picture.show(figure, f"positions-{metric}", alt, f"{result.run_id}-{metric}-by-position")


def _found(result: RunResult, metric: str) -> Found:
    return {
        candidate.name: [
            each for each in ranges_of(result.capture, candidate.name) if each.metric == metric
        ]
        for candidate in result.candidates
    }


def _places(found: Found) -> list[str]:
    names = {each.first: each.name for ranges in found.values() for each in ranges}
    return [names[first] for first in sorted(names)]
