"""Inside a run: which layer, which token. One candidate and one prompt at a time."""

import streamlit as st

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.metrics.registry import METRICS
from quantwatch.store.records import StoredPrompt
from quantwatch_dashboard import queries, series, text
from quantwatch_dashboard.components import page
from quantwatch_dashboard.components.markup import tag
from quantwatch_dashboard.components.picker import flag, pick
from quantwatch_dashboard.views import run_heatmap, run_tokens

_TOPK = ("topk_logit_deviation_k5", "topk_logit_deviation_k3")
_METRICS = ("rel_error", "lens_kl", *_TOPK)


@st.fragment
def show(url: str, result: RunResult, lead: CandidateResult) -> None:
    """Show heatmaps and the token view; changing a picker redraws only this part."""
    page.section(
        "Inside: which layer, which token",
        "Choose a candidate and a prompt. The page's address keeps the choice.",
    )
    left, middle, right = st.columns([2, 4, 2])
    names = [c.name for c in result.candidates if c.failure is None]
    with left:
        name = pick("Candidate", "candidate", names, lead.name)
    candidate = next(c for c in result.candidates if c.name == name)
    kinds = queries.block_kinds(url, result.run_id, name)
    prompts = queries.prompts(url, result.suite_hash)
    stored = {str(p.index): p for p in prompts if ("per_token", "logit_kl", p.index) in kinds}
    if not stored:
        st.html(tag("p", "No token matrices are stored for this candidate.", class_="qw-soft"))
        return
    default = _default_prompt(result, candidate, stored)
    with middle:
        prompt = int(
            pick("Prompt", "prompt", list(stored), default, lambda key: _describe(stored[key]))
        )
    metrics = [m for m in _METRICS if ("per_token", m, prompt) in kinds]
    with right:
        metric = pick("Metric", "metric", metrics, metrics[0], lambda slug: METRICS[slug].title)
    run_heatmap.show(url, result, candidate, prompt, metric)
    _deviation(url, result, candidate, [m for m in metrics if m in _TOPK])
    run_tokens.show(url, result, candidate, prompt)


def _describe(prompt: StoredPrompt) -> str:
    pieces = prompt.pieces
    excerpt = " ".join("".join(pieces[:24]).split()) if pieces else "text not stored"
    about = f"{prompt.index} · {prompt.category} · {prompt.num_tokens} tokens"
    return f"{about} · {text.clip(excerpt, 60)}"


def _default_prompt(
    result: RunResult, candidate: CandidateResult, options: dict[str, StoredPrompt]
) -> str:
    """Return the prompt on which the outlier is worst, else the one with the worst token."""
    at = series.outlier(result, candidate)
    rows = [candidate.find("rel_error", at) if at else None, candidate.find("logit_kl")]
    worst = [str(row.max_prompt) for row in rows if row is not None and row.max_prompt is not None]
    return next((prompt for prompt in worst if prompt in options), next(iter(options)))


def _deviation(url: str, result: RunResult, candidate: CandidateResult, metrics: list[str]) -> None:
    if not metrics:
        return
    page.section(
        "Top-k logit deviation",
        "How far the candidate's logits lie from the reference's on the reference's top k, read off"
        " at each layer, at the sampled tokens of all prompts.",
    )
    left, middle, _ = st.columns([2, 3, 4], vertical_alignment="bottom")
    with left:
        k = pick("Top k", "k", metrics, metrics[0], lambda slug: METRICS[slug].title)
    with middle:
        normalised = flag("Normalised: ÷ the layer's largest", "normalised")
    run_heatmap.all_prompts(url, result, candidate, k, normalised=normalised)
