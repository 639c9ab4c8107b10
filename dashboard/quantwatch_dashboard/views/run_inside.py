"""Inside a run: which layer, which token. One candidate, prompt, token and layer at a time."""

import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.store.records import StoredPrompt
from quantwatch_dashboard import text
from quantwatch_dashboard.components import page, trouble, window
from quantwatch_dashboard.components.address import choose, every, given, pick
from quantwatch_dashboard.logic import naming, series
from quantwatch_dashboard.logic.focus import MATRICES, Focus
from quantwatch_dashboard.queries import runs, tokens
from quantwatch_dashboard.text import ANY
from quantwatch_dashboard.views import run_births, run_heatmap, run_tokens, run_topk

_ALONE, _BEFORE = "alone", "baseline"
_NOT_KEPT = (
    "No token matrices are stored for this candidate: they were dropped by retention, or never "
    "measured."
)
_SERVED = "Layers and tokens are not measurable: it is served, and tells of its output alone."
_DRAWN = "layer-drawn"
"""The chosen layer as the charts above show it: they are drawn anew when it changes here."""


def chosen_layer(result: RunResult) -> str | None:
    """Return the layer that the address names, None without one; called before the charts."""
    named = series.place_key(st.query_params.get("layer", ""))
    found = named if named in series.taps(result) else None
    if found is not None:
        st.query_params["layer"] = found
    st.session_state[_DRAWN] = found
    return found


@st.fragment
@trouble.guarded
def show(url: str, result: RunResult, lead: CandidateResult) -> None:
    """Show heatmaps and the token view; changing a picker redraws only this part."""
    page.section(
        "Inside: which layer, which token",
        "Choose what to look at here, or click on the pictures. The page's address keeps it.",
    )
    names = [c.name for c in result.candidates if c.failure is None]
    one, two, three, four = st.columns([2, 4, 2, 2])
    with one:
        name = pick("Candidate", "candidate", names, lead.name)
    candidate = next(c for c in result.candidates if c.name == name)
    kinds = tokens.block_kinds(url, result.run_id, name)
    prompts = tokens.prompts(url, result.suite_hash)
    stored = {str(p.index): p for p in prompts if ("per_token", "logit_kl", p.index) in kinds}
    metrics = [m for m in MATRICES if any(kind[:2] == ("per_token", m) for kind in kinds)]
    if not stored or not metrics:
        page.say(_SERVED if _is_served(candidate) else _NOT_KEPT)
        return
    default = series.default_prompt(result, candidate, list(stored))
    with two:
        prompt = pick("Prompt", "prompt", list(stored), default, lambda p: describe(stored[p]))
    with three:
        metric = pick("Metric", "metric", metrics, metrics[0], naming.title)
    with four:
        before = _before(url, result, name, metric)
    layer, position = _place(url, result, candidate, stored[prompt])
    focus = Focus(url, result, candidate, int(prompt), metric, position, layer, before)
    run_heatmap.show(focus)
    run_topk.show(focus, metrics)
    run_births.show(focus)
    run_tokens.show(focus)


def _is_served(candidate: CandidateResult) -> bool:
    return candidate.variant is not None and candidate.variant.source.get("kind") == "served"


def _place(
    url: str, result: RunResult, candidate: CandidateResult, prompt: StoredPrompt
) -> tuple[str | None, int]:
    """Let the reader choose a layer and a token."""
    key = (result.run_id, candidate.name, "logit_kl", prompt.index)
    grid = tokens.grid(url, key, result.suite_hash)
    assert grid is not None, "prompts without output KL are not offered"
    worst = grid.worst_cell()
    default = grid.places[worst[1] if worst else 0].position
    ends = grid.places[0].position, grid.places[-1].position
    one, two, _ = st.columns([2, 2, 6], vertical_alignment="bottom")
    with one:
        position = window.position(*ends, default, prompt.index)
    with two:
        taps = series.taps(result)
        chosen = choose("Layer", "layer", [ANY, *taps], every("layers"), "stretch")
    layer = given(chosen)
    if layer != st.session_state.get(_DRAWN):
        st.rerun()
    return layer, position


def _before(url: str, result: RunResult, candidate: str, metric: str) -> RunResult | None:
    """Let the reader hold the run against its baseline, when that has this matrix, too."""
    found = None if result.baseline_mismatch else runs.baseline(url, result.baseline_run_id)
    fits = found is not None and found.suite_hash == result.suite_hash
    if found is None or not fits:
        why = "not comparable" if result.baseline_mismatch or found else "no baseline here"
        pick("Compared with", "against", [_ALONE], _ALONE, lambda _: f"nothing ({why})")
        return None
    kinds = tokens.block_kinds(url, found.run_id, candidate)
    kept = any(kind[:2] == ("per_token", metric) for kind in kinds)
    words = {_ALONE: "nothing", _BEFORE: f"baseline {text.short_id(found.run_id)}"}
    options = [_ALONE, _BEFORE] if kept else [_ALONE]
    chosen = pick("Compared with", "against", options, _ALONE, words.__getitem__)
    return found if chosen == _BEFORE else None


def describe(prompt: StoredPrompt) -> str:
    """Return a prompt in a line: number, kind, length, how it begins."""
    pieces = prompt.pieces
    excerpt = " ".join("".join(pieces[:24]).split()) if pieces else "text not stored"
    about = f"{prompt.index} · {prompt.category} · {prompt.num_tokens:,} tokens"
    return f"{about} · {text.clip(text.readable(excerpt), 60)}"
