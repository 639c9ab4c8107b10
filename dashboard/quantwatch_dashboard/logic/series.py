"""From a run's records to what charts and tables take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.domain import MODEL, CandidateResult, RunResult, is_layer, layer_index
from quantwatch.report import words
from quantwatch.report.figures import forward_order
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.figures import figures_of
from quantwatch_dashboard.logic.lines import Blamed, LayerLine
from quantwatch_dashboard.logic.ranking import rank

WHOLE = "whole layer"
_ENDS = ("embedding", "final_norm", "head")


def leading(result: RunResult) -> CandidateResult | None:
    """Return the candidate that the page is about: the worst verdict, then the worst output KL."""
    judged = [c for c in result.candidates if c.verdict is not None]
    if not judged:
        return None
    return min(judged, key=lambda c: rank(c.verdict, _kl(c)))


def _kl(candidate: CandidateResult) -> float | None:
    found = candidate.find("logit_kl")
    return None if found is None else found.mean


def layers(result: RunResult) -> tuple[str, ...]:
    """Return the whole layers that any candidate was measured at, in forward order."""
    found = {str(m.scope) for c in result.candidates for m in c.measurements if is_layer(m.scope)}
    return tuple(sorted(found, key=forward_order))


def taps(result: RunResult) -> tuple[str, ...]:
    """Return the places that a reader may choose: the layers and what lies at both ends."""
    found = {m.scope for c in result.candidates for m in c.measurements if m.metric == "rel_error"}
    ends = [end for end in _ENDS if end in found]
    return tuple(sorted({*layers(result), *ends}, key=forward_order))


def scopes(candidate: CandidateResult) -> tuple[str, ...]:
    """Return every place that a candidate was compared at, in forward order, and the output."""
    found = {m.scope for m in candidate.measurements if m.metric == "rel_error"}
    return (*sorted(found, key=forward_order), MODEL)


def num_nonfinite(result: RunResult) -> dict[str, int]:
    """Return how many values of the output and of the taps are not finite, by candidate."""
    return {c.name: figures_of(c).num_nonfinite for c in result.candidates if c.failure is None}


def default_prompt(result: RunResult, candidate: CandidateResult, options: Sequence[str]) -> str:
    """Return the prompt on which the outlier is worst, else the one with the worst token."""
    at = outlier(result, candidate)
    rows = [candidate.find("rel_error", at) if at else None, candidate.find("logit_kl")]
    worst = [str(row.max_prompt) for row in rows if row is not None and row.max_prompt is not None]
    return next((prompt for prompt in worst if prompt in options), options[0])


def blamed(result: RunResult, lead: str) -> list[Blamed]:
    """Return both errors of every place that has both: its own and the one that arrives there."""
    found = []
    for index, candidate in enumerate(result.candidates):
        figures = figures_of(candidate)
        rows = [m.scope for m in candidate.measurements if m.metric == "isolated_error"]
        places = [str(s) for s in rows if figures.row("rel_error", s) is not None]
        if not places:
            continue
        broken = outlier(result, candidate)
        found.append(
            Blamed(
                candidate.name, index, places, _values(candidate, "isolated_error", places),
                _values(candidate, "rel_error", places), strong=candidate.name == lead,
                culprit=places.index(broken) if broken in places else None,
            )
        )  # fmt: skip
    return found


def lens_lines(result: RunResult, lead: str, statistic: str) -> list[LayerLine]:
    """Return one statistic of each measured candidate's per-layer KL."""
    places = layers(result)
    return [
        LayerLine(c.name, i, _values(c, "lens_kl", places, statistic), strong=c.name == lead)
        for i, c in enumerate(result.candidates)
        if c.failure is None
    ]


def parts(result: RunResult) -> tuple[str, ...]:
    """Return the parts of a layer that were measured alone: `whole layer`, `mlp`, …"""
    found = {
        m.scope.split(".", 2)[2]
        for c in result.candidates
        for m in c.measurements
        if m.metric == "isolated_error" and m.scope.count(".") >= 2
    }
    return (WHOLE, *sorted(found, key=lambda part: (part.count("."), part)))


def isolated_places(result: RunResult, part: str) -> tuple[str, ...]:
    """Return the scopes on the axis: this part of every layer, and what lies at both ends."""
    measured = {
        m.scope for c in result.candidates for m in c.measurements if m.metric == "isolated_error"
    }
    first, *last = (str(end) for end in _ENDS)
    middle = (
        layers(result) if part == WHOLE else tuple(f"{layer}.{part}" for layer in layers(result))
    )
    shown = (first, *middle, *last)
    return tuple(place for place in shown if place in measured or place in middle)


def isolated_lines(result: RunResult, lead: str, part: str) -> list[LayerLine]:
    """Return each measured candidate's isolated error; outliers (alerts) are marked and named."""
    places = isolated_places(result, part)
    return [
        _isolated_line(result, c, i, places, strong=c.name == lead)
        for i, c in enumerate(result.candidates)
        if c.failure is None
    ]


def _isolated_line(
    result: RunResult,
    candidate: CandidateResult,
    index: int,
    places: Sequence[str],
    *,
    strong: bool,
) -> LayerLine:
    alerted = _outliers(result, candidate)
    marked = frozenset(i for i, place in enumerate(places) if place_key(place) in alerted)
    culprit = candidate.culprit.scope if candidate.culprit is not None else None
    at = next((i for i in marked if culprit and place_key(culprit) == place_key(places[i])), None)
    return LayerLine(
        candidate.name, index, _values(candidate, "isolated_error", places),
        strong=strong, marked=marked, culprit=at, label=culprit or "",
    )  # fmt: skip


def place_key(scope: str) -> str:
    """Return the layer that a scope belongs to, or the scope itself outside the layers."""
    index = layer_index(scope)
    return scope if index is None else f"layers.{index}"


def culprit_part(candidate: CandidateResult | None) -> str:
    """Return the part of a layer that the culprit is, `whole layer` when it is none."""
    scope = (
        candidate.culprit.scope if candidate is not None and candidate.culprit is not None else None
    )
    return scope.split(".", 2)[2] if scope is not None and scope.count(".") >= 2 else WHOLE


def outlier(result: RunResult, candidate: CandidateResult) -> str | None:
    """Return the place at which a candidate broke, None when nothing stands out.

    That is where its first non-finite value is, else its culprit's layer if a rule on the isolated
    error says that it is an outlier: the largest of equally large errors is nobody's fault.
    """
    if candidate.first_nonfinite is not None:
        return place_key(candidate.first_nonfinite.scope)
    scope = candidate.culprit.scope if candidate.culprit is not None else None
    alerted = _outliers(result, candidate)
    return place_key(scope) if scope is not None and place_key(scope) in alerted else None


@dataclass(frozen=True, slots=True)
class Spike:
    """The isolated errors, ratios without a unit, among which one stands out; in forward order."""

    part: str
    places: tuple[str, ...]
    values: tuple[float | None, ...]
    at: int


def spike(result: RunResult, candidate: CandidateResult) -> Spike | None:
    """Return the place that broke among its peers in the other layers, None when none stands out.

    None also when it was not measured alone, or is not finite only because of what came before.
    """
    part = culprit_part(candidate)
    places = isolated_places(result, part)
    broken = outlier(result, candidate)
    at = next((i for i, place in enumerate(places) if place_key(place) == broken), None)
    if at is None:
        return None
    values = _values(candidate, "isolated_error", places)
    found = values[at]
    inherited = candidate.first_nonfinite is not None and found is not None and isfinite(found)
    return None if found is None or inherited else Spike(part, places, tuple(values), at)


def fault(result: RunResult, lead: CandidateResult) -> str:
    """Name the place that broke; when none stands out, the worst alert says what is wrong."""
    if lead.first_nonfinite is not None:
        return f"Not finite from {lead.first_nonfinite.scope} on"
    if outlier(result, lead) is not None and lead.culprit is not None and lead.culprit.scope:
        return lead.culprit.scope
    own = [alert for alert in words.worst_first(result.alerts) if alert.candidate == lead.name]
    return own[0].words if own else words.headline(result)


def _outliers(result: RunResult, candidate: CandidateResult) -> set[str]:
    return {
        place_key(alert.scope)
        for alert in result.alerts
        if alert.candidate == candidate.name and alert.metric == "isolated_error"
    }


def lens_threshold(result: RunResult) -> float | None:
    """Return the limit on the per-layer KL: of alerts, else of rules, else of the defaults.

    What a rule allows beside a baseline or the other layers is no limit of the whole picture.
    """
    written = {rule["name"]: rule for rule in result.config.get("rules", ())}
    for alert in result.alerts:
        fixed = written.get(alert.rule, {}).get("kind", "absolute") == "absolute"
        if alert.metric == "lens_kl" and alert.statistic == "mean" and fixed:
            return alert.threshold
    default = next(rule for rule in DEFAULT_RULES if rule.metric == "lens_kl")
    threshold: float | None = written.get(default.name, {}).get("threshold")
    return default.threshold if threshold is None else threshold


def _values(
    candidate: CandidateResult, metric: str, places: Sequence[str], statistic: str = "mean"
) -> list[float | None]:
    figures = figures_of(candidate)
    return [text.plain(figures.number(metric, place, statistic)) for place in places]
