"""One self-contained HTML file: offline, verdict and culprit on the first screen, < 500 kB."""

from html import escape
from itertools import chain

from quantwatch.domain import Alert, CandidateResult, RunResult, Verdict, layer_index
from quantwatch.metrics.registry import ROUTER_METRICS
from quantwatch.report import positions, words
from quantwatch.report.detection import detection_words
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import plural, printable
from quantwatch.report.repeat import repeat_command
from quantwatch.report.style import CSS
from quantwatch.report.svg import LogAxis, bars, interval

_DETAILED, _LAYER_ROWS, _ALERT_ROWS = 8, 20, 100
"""Candidates drawn in full, rows of a layer table and of the alert table: keeps the file small."""
_LONGEST = 1000
_LAYER_METRICS = ("isolated_error", "lens_kl", "rel_error", "sqnr_db", "cosine", "feature_kl")


def render(result: RunResult) -> str:
    """Return the page."""
    figures = {candidate.name: Figures(candidate) for candidate in result.candidates}
    outcome = words.outcome(result)
    body = "".join(
        [
            f'<header class="{outcome}"><h1>{outcome.upper()} – {_text(result.check)}</h1>',
            f"<p>{_text(words.headline(result))}</p>{_culprit(result)}</header>",
            _facts(result),
            _candidates(result, figures),
            _alerts(result, figures),
            *_details(result, figures),
            _footer(result),
        ]
    )
    title = f"{outcome} – {_text(result.check)}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{CSS}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _text(text: str) -> str:
    """Escape text for HTML and cut it when somebody's error message is a book."""
    shown = printable(text)
    return escape(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} …")


def _culprit(result: RunResult) -> str:
    worst = words.worst_candidate(result)
    return f"<p>{_text(words.explanation(worst))}</p>" if worst is not None else ""


def _facts(result: RunResult) -> str:
    models = [
        (candidate.name, words.model_words(candidate.variant))
        for candidate in result.candidates[:_DETAILED]
    ]
    tokens = f"{plural(result.num_tokens, 'token')} in {plural(result.num_prompts, 'prompt')}"
    tokens = f"{result.suite_name}: {tokens}"
    cached, workers = words.cache_words(result), words.worker_words(result)
    facts = [
        ("reference", words.model_words(result.reference)),
        *([] if cached is None else [("its hidden states", cached)]),
        *([] if workers is None else [("measured by", workers)]),
        *models,
        ("suite", tokens),
        ("baseline", words.baseline_words(result)),
        ("run", f"{result.run_id}, {result.started_at.isoformat(timespec='seconds')}"),
    ]
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>"


def _candidates(result: RunResult, figures: dict[str, Figures]) -> str:
    known = [figures[c.name] for c in result.candidates]
    values = [each.number(each.kl_metric).value or 0.0 for each in known]
    bounds = [each.interval(each.kl_metric) or () for each in known]
    axis = LogAxis.over([*values, *chain.from_iterable(bounds)])
    rows = "".join(_row(result, figures[c.name], axis) for c in result.candidates)
    names = ("candidate", "verdict", "culprit", "KL mean", "95 % interval", "KL p99", "top-1")
    why = "".join(map(_why, result.candidates))
    table = _table((*names, "ppl ratio", "bits/weight"), rows)
    return f"{table}<ul>{why}</ul>" if rows else ""


def _why(candidate: CandidateResult) -> str:
    could = detection_words(candidate)
    noted = [f"note: {note}" for note in words.notes(candidate)]
    lines = [*(() if could is None else (could,)), *noted]
    more = "".join(f"<br>{_text(line)}" for line in lines)
    return f"<li><b>{_text(candidate.name)}</b>: {_text(words.explanation(candidate))}{more}</li>"


def _row(result: RunResult, figures: Figures, axis: LogAxis) -> str:
    candidate, metric = figures.candidate, figures.kl_metric
    kl = figures.number(metric)
    limits = [
        alert.threshold
        for alert in result.alerts
        if (alert.candidate, alert.metric, alert.scope) == (candidate.name, metric, "model")
    ]
    drawing = interval(kl, figures.interval(metric), min(limits, default=None), axis)
    verdict = str(candidate.verdict or "failed")
    cells = [
        f"<b>{_text(candidate.name)}</b>",
        f'<span class="badge {verdict}">{verdict}</span>',
        _text(words.culprit(candidate)),
        f"{figures.at_least}{kl.text()}",
        drawing,
        figures.number(metric, name="p99").text(),
        figures.number("top1_agreement").text(4),
        figures.perplexities[2].text(6),
        figures.bits,
    ]
    return _cells(cells)


def _alerts(result: RunResult, figures: dict[str, Figures]) -> str:
    if not result.alerts:
        return "<h2>Alerts</h2><p>No rule is breached.</p>"
    rows = [
        _alert(alert, figures.get(alert.candidate))
        for alert in words.worst_first(result.alerts)[:_ALERT_ROWS]
    ]
    hidden = len(result.alerts) - len(rows)
    more = f"<p>… and {hidden} more alerts</p>" if hidden else ""
    table = _table(("severity", "candidate", "rule", "what", "value and limit"), "".join(rows))
    return f"<h2>Alerts ({len(result.alerts)})</h2>{table}{more}"


def _badge(alert: Alert) -> str:
    return str(alert.severity) if alert.is_decided else str(Verdict.INCONCLUSIVE)


def _alert(alert: Alert, figures: Figures | None) -> str:
    number = words.alert_value(alert)
    bounds = words.alert_interval(alert, figures)
    axis = LogAxis.over([number.value or 0.0, alert.threshold, *(bounds or ())])
    cells = [
        f'<span class="badge {_badge(alert)}">{words.severity_word(alert)}</span>',
        _text(alert.candidate),
        _text(words.rule_name(alert)),
        _text(words.alert_words(alert, figures)),
        interval(number, bounds, alert.threshold, axis),
    ]
    return _cells(cells)


def _details(result: RunResult, figures: dict[str, Figures]) -> list[str]:
    order = list(Verdict)
    measured = [c for c in result.candidates if c.measurements]
    measured.sort(key=lambda c: order.index(c.verdict or Verdict.PASS))
    sections = [_section(result, c, figures[c.name]) for c in measured[:_DETAILED]]
    hidden = len(measured) - len(sections)
    return [*sections, f"<p>… and {hidden} more candidates without drawings</p>" if hidden else ""]


def _section(result: RunResult, candidate: CandidateResult, figures: Figures) -> str:
    """Draw whose fault it is first (isolated error), then what it does (per-layer KL)."""
    scope = candidate.culprit.scope if candidate.culprit else None
    index = layer_index(scope) if scope is not None else None
    marked = frozenset() if index is None else frozenset({f"layers.{index}"})
    drawings = "".join(
        bars(
            [figures.number(metric, layer) for layer in figures.layers],
            figures.layers,
            marked,
            title,
        )
        for metric, title in (
            ("isolated_error", "Isolated error per layer (whose fault it is; red: the culprit)"),
            ("lens_kl", "Per-layer KL through the lens, nats (how bad it is there)"),
        )
    )
    along = f"{positions.drawing(result, candidate.name)}{_by_position(result, candidate.name)}"
    return f"<h2>{_text(candidate.name)}</h2>{drawings}{_layers(figures)}{along}"


def _by_position(result: RunResult, name: str) -> str:
    rows = positions.cells(positions.table(result, name))
    if len(rows) < 2:
        return ""
    head = ("position", "output KL", "positions", "lens KL, mean of layers", "positions")
    table = _table(head, "".join(_cells(list(row)) for row in rows))
    return f"<details><summary>KL by position</summary>{table}</details>"


def _layers(figures: Figures) -> str:
    layers = figures.worst("isolated_error", figures.layers, _LAYER_ROWS) or list(figures.layers)
    metrics = (*_LAYER_METRICS, *(ROUTER_METRICS if figures.has_routers else ()))
    shown = layers[:_LAYER_ROWS]
    rows = "".join(
        _cells([layer, *(figures.number(metric, layer).text() for metric in metrics)])
        for layer in shown
    )
    summary = f"<summary>Worst {len(shown)} of {len(figures.layers)} layers</summary>"
    return f"<details>{summary}{_table(('layer', *metrics), rows)}</details>"


def _footer(result: RunResult) -> str:
    command = repeat_command(result)
    again = f"<p>Repeat: <code>{escape(command)}</code></p>" if command else ""
    every = f"<code>quantwatch report {_text(result.run_id)} --format json</code>"
    return f"<footer>{again}<p>All figures, if it was stored: {every}</p></footer>"


def _cells(cells: list[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _table(names: tuple[str, ...], rows: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
