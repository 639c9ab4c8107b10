"""JUnit XML: a test suite per run; per candidate a case per breached rule, or one that passed."""

from itertools import groupby
from xml.etree import ElementTree as Xml

from quantwatch.domain import Alert, CandidateResult, RunResult, RunStatus, Severity, Verdict
from quantwatch.report import words
from quantwatch.report.figures import Figures
from quantwatch.report.numbers import printable


def render(result: RunResult) -> str:
    """Return the XML text. A warning passes with its words in system-out, as it exits with 0."""
    suite = Xml.Element("testsuite", name=printable(f"quantwatch.{result.check}"))
    suite.set("timestamp", result.started_at.isoformat(timespec="seconds"))
    suite.set("time", f"{sum(result.timings_s.values()):.3f}")
    _properties(suite, result)
    if result.status != RunStatus.SUCCEEDED:
        _case(suite, result.check, "run", error=words.headline(result))
    for candidate in result.candidates:
        _candidate(suite, result, candidate)
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    root = Xml.Element("testsuites")
    root.append(suite)
    Xml.indent(root)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"
    )


def _properties(suite: Xml.Element, result: RunResult) -> None:
    properties = Xml.SubElement(suite, "properties")
    values = {
        "run_id": result.run_id,
        "verdict": words.outcome(result),
        "reference": words.model_words(result.reference),
        "suite": f"{result.suite_name} {result.suite_hash}",
        "num_tokens": str(result.num_tokens),
        "baseline": words.baseline_words(result),
    }
    for candidate in result.candidates:
        if noted := words.notes(candidate):
            values[f"notes of {candidate.name}"] = "; ".join(noted)
    for name, value in values.items():
        Xml.SubElement(properties, "property", name=printable(name), value=printable(value))


def _candidate(suite: Xml.Element, result: RunResult, candidate: CandidateResult) -> None:
    figures, where = Figures(candidate), f"{result.check}.{candidate.name}"
    kl, metric = figures.number(figures.kl_metric), figures.kl_metric
    said = f"{words.explanation(candidate)}\n{metric}.mean = {kl.text(4)}"
    alerts = [alert for alert in result.alerts if alert.candidate == candidate.name]
    if candidate.failure is not None:
        _case(suite, where, "measured", error=words.explanation(candidate))
    elif candidate.verdict == Verdict.INCONCLUSIVE:
        _case(suite, where, "conclusive", error=f"inconclusive: {said}")
    elif not alerts:
        _case(suite, where, "no rule is breached", out=said)
    for rule, group in groupby(sorted(alerts, key=_rule), key=_rule):
        _breach(suite, where, rule, figures, list(group))


def _rule(alert: Alert) -> str:
    return alert.rule


def _breach(
    suite: Xml.Element, where: str, rule: str, figures: Figures, alerts: list[Alert]
) -> None:
    lines = [words.alert_words(alert, figures) for alert in words.worst_first(alerts)]
    critical = any(a.severity == Severity.CRITICAL and a.is_decided for a in alerts)
    if critical:
        case = _case(suite, where, rule)
        message = printable(lines[0] + words.more_scopes(len(lines) - 1))
        failure = Xml.SubElement(case, "failure", type="regression", message=message)
        failure.text = printable("\n".join([words.explanation(figures.candidate), *lines]))
    else:
        _case(suite, where, rule, out="\n".join(lines))


def _case(
    suite: Xml.Element, where: str, name: str, *, out: str | None = None, error: str | None = None
) -> Xml.Element:
    case = Xml.SubElement(suite, "testcase", classname=printable(where), name=printable(name))
    if out is not None:
        Xml.SubElement(case, "system-out").text = printable(out)
    if error is not None:
        Xml.SubElement(case, "error", type="not measured", message=printable(error))
    return case
