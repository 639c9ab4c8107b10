"""The sentences that every report format says the same way."""

import math
from collections.abc import Iterator, Sequence

from quantwatch.domain import (
    WARNING,
    Alert,
    CandidateResult,
    Json,
    RunResult,
    RunStatus,
    Severity,
    Variant,
    Verdict,
)
from quantwatch.domain.drift import changed
from quantwatch.domain.drift import headline as drift_words
from quantwatch.report.figures import Figures, Interval
from quantwatch.report.numbers import Number, plural

UNDECIDED = "undecided"
_MOST_NOTES, _LONGEST_NOTE = 5, 300
"""Notes of a candidate that are shown, and letters of each."""
_MEANING = {
    Verdict.REGRESSION: "a critical rule is breached",
    Verdict.INCONCLUSIVE: "the evidence does not suffice to say pass or regression",
    Verdict.WARN: "a warning rule is breached, no critical one",
    Verdict.IMPROVEMENT: "better than the baseline beyond the noise",
    Verdict.PASS: "no rule is breached",
}


def outcome(result: RunResult) -> str:
    """Return the run's verdict, or its status when it has none: `regression`, `failed`, …"""
    succeeded = result.status == RunStatus.SUCCEEDED and result.verdict is not None
    return str(result.verdict if succeeded else result.status)


def headline(result: RunResult) -> str:
    """Return one sentence on how the run ended and because of whom."""
    if result.status != RunStatus.SUCCEEDED or result.verdict is None:
        return f"The run is {result.status}: {result.reason or 'no reason was recorded'}."
    worst = [c.name for c in result.candidates if c.verdict == result.verdict]
    failed = [c.name for c in result.candidates if c.failure is not None]
    also = f" Not measured: {', '.join(failed)}." if failed else ""
    return f"{', '.join(worst)}: {_MEANING[result.verdict]}.{also}"


def worst_candidate(result: RunResult) -> CandidateResult | None:
    """Return the measured candidate with the worst verdict, the first of several."""
    measured = [c for c in result.candidates if c.verdict is not None and c.measurements]
    order = list(Verdict)
    return min(measured, key=lambda c: order.index(c.verdict or Verdict.PASS), default=None)


def explanation(candidate: CandidateResult) -> str:
    """Return why a candidate has its verdict, and what its figures must not be read without."""
    variant = candidate.variant
    return " ".join([_reason(candidate), *(() if variant is None else variant.warnings)])


def notes(candidate: CandidateResult) -> list[str]:
    """Return what a candidate was measured without, or otherwise than asked; few and short.

    Warnings are part of its explanation; the JSON has all of it.
    """
    said = () if candidate.variant is None else candidate.variant.notes
    plain = [each for each in said if not each.startswith(WARNING)]
    shown = [n if len(n) <= _LONGEST_NOTE else f"{n[:_LONGEST_NOTE]}…" for n in plain[:_MOST_NOTES]]
    hidden = len(plain) - len(shown)
    return [*shown, f"… and {plural(hidden, 'more note')} in the JSON"] if hidden else shown


def _reason(candidate: CandidateResult) -> str:
    """Failure, equality, culprit, or nothing."""
    if candidate.failure is not None:
        return f"could not be measured: {candidate.failure}"
    if candidate.bit_equal:
        return f"bit-equal to the reference: every difference is exactly 0.{_leaked(candidate)}"
    if candidate.culprit is not None:
        return f"{candidate.culprit.words}{_leaked(candidate)}"
    found = candidate.first_nonfinite
    if found is None:
        return "no culprit was looked for"
    return f"first non-finite: {found.scope}, prompt {found.prompt}, position {found.position}"


def _leaked(candidate: CandidateResult) -> str:
    """A wider vocabulary takes probability away from the shared ids: said, never an alert."""
    row = candidate.find("leaked_mass")
    mass = None if row is None else row.mean
    return f" Leaked mass {mass:.3g} outside the shared vocabulary." if mass else ""


def culprit(candidate: CandidateResult) -> str:
    """Return the culprit's scope, – when there is none."""
    found = candidate.culprit
    return found.scope if found is not None and found.scope is not None else "–"


def model_words(variant: Variant | None) -> str:
    """Return a variant for people: its source, execution and size."""
    if variant is None:
        return "not loaded"
    source = variant.source.get("model") or variant.source.get("factory") or variant.name
    return f"{source} ({', '.join([variant.execution, *_size(variant)])})"


def _size(variant: Variant) -> Iterator[str]:
    if variant.size_bytes is not None:
        yield f"{variant.size_bytes / 1e6:.0f} MB"
    if variant.bits_per_weight is not None:
        yield f"{variant.bits_per_weight:.2f} bits per weight"


def cache_words(result: RunResult) -> str | None:
    """Return where the reference's numbers came from; None when no cache was wanted."""
    used = result.capture.get("reference_cache") or {}
    if not used.get("is_wanted"):
        return None
    words = _ORIGINS[used["origin"]].format(**used)
    if used["num_bytes"]:
        each = used["num_bytes"] / used["num_tokens"]
        words = f"{words}, {used['num_bytes'] / 1e6:,.0f} MB ({each / 1e3:,.0f} kB per token)"
    audit = used["audit"]
    audited = [] if audit is None else [_audit_words(audit)]
    return "; ".join([words, *audited, *used["notes"], *used["warnings"]])


_ORIGINS = {
    "live": "run live",
    "recorded": "run live and recorded",
    "cache": "read from the cache (recorded {recorded_at}, use {uses})",
}


def worker_words(result: RunResult) -> str | None:
    """Return who measured the batches and what became of them; None when the run itself did."""
    told = result.capture.get("sharding")
    if not told:
        return None
    processes = plural(told["shards"], "process", "processes")
    words = f"{processes} of {plural(told['threads'], 'thread')} ({told['executor']})"
    again = [f"{plural(told['retried'], 'batch', 'batches')} measured again"]
    replaced = told.get("replaced", 0)  # runs of before have none
    again += [f"{plural(replaced, 'worker')} replaced"] if replaced else []
    return "; ".join([words, *told["notes"], *(again if told["lost"] else []), *told["lost"]])


def _audit_words(audit: Json) -> str:
    count, found = f"{audit['num_values']:,}", audit["num_differing"]
    said = f"{found:,} of {count} numbers differ" if found else f"all {count} numbers are equal"
    return f"audit of {audit['part']}: {said}"


def mean_words(figures: Figures) -> str:
    """Return the output KL with its standard error, "≥" if it is a bound; or that it is none."""
    mean, error = (figures.number(figures.kl_metric, name=name) for name in ("mean", "se"))
    if mean.value is None:
        return mean.text()
    return f"{figures.at_least}{mean.text()} ± {error.text(2)}"


def severity_word(alert: Alert) -> str:
    """Return an alert's severity; of a rule that can't be decided nothing is as bad as that."""
    return str(alert.severity) if alert.is_decided else UNDECIDED


def rule_name(alert: Alert) -> str:
    """Return an alert's rule, with its severity where that doesn't stand in front."""
    return alert.rule if alert.is_decided else f"{alert.rule} ({alert.severity})"


def alert_value(alert: Alert) -> Number:
    """Return the value that breached the rule, finite or with its kind."""
    return Number(None, alert.value_kind) if alert.value is None else Number.of(alert.value)


def alert_words(alert: Alert, figures: Figures | None) -> str:
    """Return one alert: the rule's own words, then value, limit and 95 % interval."""
    if not alert.is_decided:
        return alert.words
    value = f"{alert.metric}.{alert.statistic} at {alert.scope} = {alert_value(alert).text(4)}"
    interval = _interval_words(alert, figures)
    return f"{alert.words}; {value}, limit {alert.threshold:.4g}, {interval}"


def _interval_words(alert: Alert, figures: Figures | None) -> str:
    bounds = alert_interval(alert, figures)
    if bounds is not None:
        return f"95 % interval {bounds[0]:.4g} … {bounds[1]:.4g}"
    if alert.value is None:
        return "no interval for a value that isn't finite"
    if alert.statistic != "mean":
        return f"no interval for {alert.statistic}"
    return "no interval: fewer than two prompts were measured"


def alert_interval(alert: Alert, figures: Figures | None) -> Interval | None:
    """Return the 95 % interval of the value that breached: only finite means have one."""
    if figures is None or alert.value is None or alert.statistic != "mean":
        return None
    return figures.interval(alert.metric, alert.scope)


def worst_first(alerts: Sequence[Alert]) -> list[Alert]:
    """Return critical alerts first, rules in the order given, a rule's worst breach first."""
    names = list(dict.fromkeys(alert.rule for alert in alerts))

    def rank(alert: Alert) -> tuple[bool, int, float]:
        beyond = math.inf if alert.value is None else abs(alert.value - alert.threshold)
        return alert.severity != Severity.CRITICAL, names.index(alert.rule), -beyond

    return sorted(alerts, key=rank)


def worst_of_each_rule(alerts: Sequence[Alert]) -> list[tuple[Alert, str]]:
    """Return each candidate's worst alert of each rule, and how many more scopes breach it."""
    groups: dict[tuple[str, str], list[Alert]] = {}
    for alert in worst_first(alerts):
        groups.setdefault((alert.candidate, alert.rule), []).append(alert)
    return [(group[0], more_scopes(len(group) - 1)) for group in groups.values()]


def more_scopes(count: int) -> str:
    """Return `; 3 more scopes`, nothing for none."""
    return f"; {count} more scope{'s' if count > 1 else ''}" if count else ""


def baseline_words(result: RunResult) -> str:
    """Return which run this one was compared with, or none, and what else changed since then."""
    if result.baseline_mismatch:
        return f"not comparable ({'; '.join(result.baseline_mismatch)})"
    moved = drift_words(_drift(result))
    return "; ".join(filter(None, (result.baseline_run_id or "none", moved)))


def _drift(result: RunResult) -> list[Json]:
    """Return what changed since the baseline, once for all candidates: most of it is common."""
    found: dict[str, Json] = {}
    for candidate in result.candidates:
        for record in changed(candidate.baseline_differences):
            found.setdefault(record["name"], record)
    return list(found.values())
