"""The result for a terminal: one row per candidate, then why, then the alerts."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantwatch.domain import Alert, CandidateResult, RunResult
from quantwatch.report import words
from quantwatch.report.detection import detection_words
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import plural, printable

COLOURS = {
    "regression": "bold red",
    "critical": "bold red",
    "failed": "bold red",
    "cancelled": "bold red",
    "inconclusive": "yellow",
    words.UNDECIDED: "yellow",
    "warn": "yellow",
    "warning": "yellow",
    "improvement": "green",
    "pass": "green",
}


def renderable(result: RunResult) -> RenderableType:
    """Return what `rich` prints."""
    figures = {candidate.name: Figures(candidate) for candidate in result.candidates}
    parts: list[RenderableType] = [_title(result), _candidates(figures)]
    parts += [line for candidate in result.candidates for line in _why(candidate)]
    parts += [_alert(alert, more) for alert, more in words.worst_of_each_rule(result.alerts)]
    return Group(*parts, _headline(result))


def coloured(word: str) -> Text:
    """Return a verdict, status or severity in its colour."""
    return Text(word, style=COLOURS.get(word, ""))


def plain(text: str) -> Text:
    """Return text that is neither markup for rich nor control codes for the terminal."""
    return Text(printable(text))


def _title(result: RunResult) -> Text:
    tokens = f"{plural(result.num_tokens, 'token')} in {plural(result.num_prompts, 'prompt')}"
    reference = words.model_words(result.reference)
    cached = words.cache_words(result)
    lines = [
        f"{result.check}  run {result.run_id}",
        f"reference {reference}; {result.suite_name}, {tokens}",
        *([] if cached is None else [f"reference {cached}"]),
        f"baseline: {words.baseline_words(result)}",
    ]
    return plain("\n".join(lines))


def _candidates(figures: dict[str, Figures]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("candidate", "verdict", "KL mean ± se", "KL p99", "top-1", "ppl ratio"):
        table.add_column(name, justify="left" if name in ("candidate", "verdict") else "right")
    table.add_column("bits/weight", justify="right")
    table.add_column("culprit", overflow="fold")
    for name, chosen in figures.items():
        table.add_row(*_row(name, chosen))
    return table


def _row(name: str, figures: Figures) -> list[Text]:
    candidate = figures.candidate
    cells = [
        words.mean_words(figures),
        figures.number(figures.kl_metric, name="p99").text(),
        figures.number("top1_agreement").text(4),
        figures.perplexities[2].text(6),
        figures.bits,
        words.culprit(candidate),
    ]
    return [plain(name), coloured(str(candidate.verdict or "failed")), *map(plain, cells)]


def _why(candidate: CandidateResult) -> list[Text]:
    said, could = words.explanation(candidate), detection_words(candidate)
    noted = [f"note: {note}" for note in words.notes(candidate)]
    more = [*(() if could is None else (could,)), *noted]
    return [plain(f"{candidate.name}: {said}"), *(plain(f"  {line}") for line in more)]


def _alert(alert: Alert, more: str) -> Text:
    said = f" {alert.candidate}, rule {words.rule_name(alert)}: {alert.words}{more}"
    return coloured(words.severity_word(alert)) + plain(said)


def _headline(result: RunResult) -> Text:
    return coloured(words.outcome(result)) + plain(f" – {words.headline(result)}")
