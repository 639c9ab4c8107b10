"""Token by token: B against A for a prompt that both measured, and both alone on one scale."""

import streamlit as st

from quantwatch.store.records import StoredPrompt
from quantwatch_dashboard.charts.heatmap import Look, heatmap
from quantwatch_dashboard.components import page, picture, trouble, window
from quantwatch_dashboard.components.address import flag, pick
from quantwatch_dashboard.components.compare import name_of, worst_place
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.logic import difference, naming, series
from quantwatch_dashboard.logic.cells import Kind
from quantwatch_dashboard.logic.contrast import Side
from quantwatch_dashboard.logic.focus import CHANGES, HEADROOM, MATRICES, RANGES
from quantwatch_dashboard.logic.grid import TokenGrid
from quantwatch_dashboard.logic.rows import whole_layers
from quantwatch_dashboard.queries import tokens
from quantwatch_dashboard.views.run_inside import describe

_READ = "Red: B is worse, blue: B is better, nearly white: equal; logarithmic."
_READ_BITS = "Red: B has less headroom, blue: more, nearly white: equal."


@st.fragment
@trouble.guarded
def show(url: str, a: Side, b: Side) -> None:
    """Show the difference heatmap; changing a picker redraws only this part."""
    page.section("Token by token", "The same prompt in both, layer by layer.")
    if a.result.suite_hash != b.result.suite_hash:
        _say("The suites differ: there is no prompt that both measured.")
        return
    prompts, metrics = _shared(url, a, b)
    if not prompts or not metrics:
        _say("No token matrices that both kept: dropped by retention, or never measured.")
        return
    one, two, three = st.columns([2, 4, 3], vertical_alignment="bottom")
    with one:
        metric = pick("Metric", "metric", metrics, metrics[0], naming.title)
    with two:
        usual = series.default_prompt(b.result, b.candidate, list(prompts))
        prompt = int(pick("Prompt", "prompt", list(prompts), usual, lambda p: describe(prompts[p])))
    with three, st.container(horizontal=True):
        fit = flag("Fit colors to this picture", "fit")
        alone = flag("Both alone as well", "alone")
    grids = [_grid(url, side, metric, prompt) for side in (a, b)]
    if None in grids:
        _say("This metric is not stored for this prompt in both.")
        return
    before, after = (grid for grid in grids if grid is not None)
    changed = (difference.loss if metric == HEADROOM else difference.ratio)(after, before)
    part = _part(changed, prompt)
    _difference(changed.between(*part), metric, (a, b), fit=fit)
    if alone:
        for side, grid, column in zip("ab", (before, after), st.columns(2), strict=True):
            with column:
                st.html(tag("p", name_of(side), (a, b)["ab".index(side)].candidate.name))
                _alone(grid.between(*part), metric, side)


def _say(words: str) -> None:
    page.say(words)


def _shared(url: str, a: Side, b: Side) -> tuple[dict[str, StoredPrompt], list[str]]:
    """Return the prompts and the metrics of which both have a matrix."""
    kinds = tokens.block_kinds(url, *a.key) & tokens.block_kinds(url, *b.key)
    kept = {(metric, prompt) for kind, metric, prompt in kinds if kind == "per_token"}
    metrics = [metric for metric in MATRICES if any(each == metric for each, _ in kept)]
    indices = {prompt for metric, prompt in kept if metric in metrics}
    found = tokens.prompts(url, a.result.suite_hash)
    return {str(p.index): p for p in found if p.index in indices}, metrics


def _grid(url: str, side: Side, metric: str, prompt: int) -> TokenGrid | None:
    grid = tokens.grid(url, (*side.key, metric, prompt), side.result.suite_hash)
    return None if grid is None else whole_layers(grid).measured_only()


def _part(grid: TokenGrid, prompt: int) -> tuple[int, int]:
    """Let the reader choose a stretch of a long prompt, by default around the worst token."""
    if not grid.places:
        return 0, 0
    ends = grid.places[0].position, grid.places[-1].position
    if len(grid.places) < 2 * window.WIDTH:
        return ends
    worst = grid.worst_cell()
    return window.stretch(ends, grid.places[worst[1] if worst else 0].position, prompt)


def _difference(grid: TokenGrid, metric: str, sides: tuple[Side, Side], *, fit: bool) -> None:
    if not grid.num_measured:
        _say("Nothing of this metric was measured at the same places in both.")
        return
    bits = metric == HEADROOM
    kind: Kind = "bits change" if bits else "ratio"
    title = "Headroom lost in B, bits" if bits else f"{naming.title(metric)}: B ÷ A"
    figure = heatmap(grid, Look(title, kind, None if fit else CHANGES[kind]))
    picture.choose(figure, "compare-difference", f"{title} by layer and token", f"compare-{metric}")
    st.html(
        tag(
            "p",
            _READ_BITS if bits else _READ,
            worst_place(grid, kind, sides),
            class_="qw-soft qw-small",
        )
    )


def _alone(grid: TokenGrid, metric: str, letter: str) -> None:
    if not grid.num_measured:
        _say("Nothing was measured here.")
        return
    title = naming.axis(metric)
    kind: Kind = "bits" if metric == HEADROOM else "log"
    figure = heatmap(grid, Look(title, kind, RANGES[metric]))
    name = f"compare-{metric}-{letter}"
    picture.choose(figure, f"compare-{letter}", f"{title} of {letter}", name)
