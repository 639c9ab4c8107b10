"""Markdown for a pull request or a chat: verdict first, below 60 lines whatever the model."""

import re

from quantwatch.domain import CandidateResult, RunResult
from quantwatch.report import positions, words
from quantwatch.report.detection import detection_words
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import plural, printable
from quantwatch.report.repeat import repeat_command

_CANDIDATES, _LAYERS, _ALERTS = 10, 5, 8
_NUMBERS = (
    ("isolated_error", "isolated error"), ("lens_kl", "lens KL"), ("rel_error", "relative error"),
)  # fmt: skip
_ROUTER = (("router_overlap", "router overlap"), ("router_flips", "flips"))
_ESCAPED = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render(result: RunResult) -> str:
    """Return the report; long lists are cut and say by how much."""
    figures = {candidate.name: Figures(candidate) for candidate in result.candidates}
    lines = [
        f"# {words.outcome(result).upper()} – {escape(result.check)}",
        "",
        escape(words.headline(result)),
        "",
        *_facts(result),
        "",
        *_candidates(result, figures),
        *_worst_layers(result, figures),
        *_by_position(result),
        *_alerts(result, figures),
        *_repeat(result),
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text as one line of Markdown in which nothing is markup."""
    return _ESCAPED.sub(r"\\\1", " ".join(printable(text).split()))


def _facts(result: RunResult) -> list[str]:
    tokens = f"{plural(result.num_tokens, 'token')} in {plural(result.num_prompts, 'prompt')}"
    cached, workers = words.cache_words(result), words.worker_words(result)
    return [
        f"- reference: {escape(words.model_words(result.reference))}",
        *([] if cached is None else [f"- its hidden states: {escape(cached)}"]),
        *([] if workers is None else [f"- measured by: {escape(workers)}"]),
        f"- suite: {escape(result.suite_name)}, {tokens}",
        f"- baseline: {escape(words.baseline_words(result))}",
        f"- run: {escape(result.run_id)}, {result.started_at.isoformat(timespec='seconds')}",
    ]


def _candidates(result: RunResult, figures: dict[str, Figures]) -> list[str]:
    head = "| candidate | verdict | KL mean ± se | KL p99 | top-1 | ppl ratio | culprit |"
    shown = result.candidates[:_CANDIDATES]
    rows = [_row(candidate, figures[candidate.name]) for candidate in shown]
    said = [f"- **{escape(c.name)}**: {escape(_said(c))}" for c in shown]
    hidden = _cut(len(result.candidates), _CANDIDATES, "candidates")
    return [head, "|---|---|---|---|---|---|---|", *rows, *hidden, "", *said, ""] if shown else []


def _row(candidate: CandidateResult, figures: Figures) -> str:
    cells = [
        escape(candidate.name),
        str(candidate.verdict or "failed"),
        words.mean_words(figures),
        figures.number(figures.kl_metric, name="p99").text(),
        figures.number("top1_agreement").text(4),
        figures.perplexities[2].text(6),
        escape(words.culprit(candidate)),
    ]
    return f"| {' | '.join(cells)} |"


def _said(candidate: CandidateResult) -> str:
    """Return why a candidate is what it is, what else would have been found, and its notes."""
    could, noted = detection_words(candidate), "; ".join(words.notes(candidate))
    said = (words.explanation(candidate), could, noted and f"Notes: {noted}")
    return " ".join(filter(None, said))


def _worst_layers(result: RunResult, figures: dict[str, Figures]) -> list[str]:
    """Show the layers of the worst candidate only, ranked by isolated error (whose fault it is)."""
    worst = words.worst_candidate(result)
    if worst is None or worst.bit_equal:
        return []
    chosen = figures[worst.name]
    layers = chosen.worst("isolated_error", chosen.layers, _LAYERS)
    if not layers:
        return []
    numbers = dict(_NUMBERS) | (dict(_ROUTER) if chosen.has_routers else {})
    rows = [
        f"| {layer} | {' | '.join(chosen.number(name, layer).text() for name in numbers)} |"
        for layer in layers
    ]
    title = f"Worst {len(layers)} of {len(chosen.layers)} layers of **{escape(worst.name)}**:"
    head = [f"| layer | {' | '.join(numbers.values())} |", "|---" * (1 + len(numbers)) + "|"]
    return [title, "", *head, *rows, ""]


def _by_position(result: RunResult) -> list[str]:
    """Show the worst candidate's KL by position."""
    worst = words.worst_candidate(result)
    if worst is None or worst.bit_equal:
        return []
    title = f"Mean KL by position in the prompt, **{escape(worst.name)}**:"
    return positions.markdown(result, worst.name, title)


def _alerts(result: RunResult, figures: dict[str, Figures]) -> list[str]:
    groups = words.worst_of_each_rule(result.alerts)
    lines = [
        f"- {words.severity_word(alert)} **{escape(alert.candidate)}**, "
        f"rule {escape(words.rule_name(alert))}: "
        f"{escape(words.alert_words(alert, figures.get(alert.candidate)) + more)}"
        for alert, more in groups[:_ALERTS]
    ]
    hidden = _cut(len(groups), _ALERTS, "breached rules")
    return [f"{plural(len(result.alerts), 'alert')}:", "", *lines, *hidden, ""] if lines else []


def _repeat(result: RunResult) -> list[str]:
    command = " ".join(printable(repeat_command(result) or "").split())
    fence = "`" * (longest_ticks(command) + 1)
    again = [f"Repeat: {fence} {command} {fence}"] if command else []
    return [
        *again,
        f"All figures, if it was stored: `quantwatch report {result.run_id} --format json`",
    ]


def longest_ticks(text: str) -> int:
    """Return the length of the longest run of backticks: a code span needs one more."""
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _cut(total: int, shown: int, things: str) -> list[str]:
    return [f"… and {total - shown} more {things}"] if total > shown else []
