"""Minimum detectable effects in words and as JSON: how small a change would have been found."""

from typing import Any

from quantwatch.domain import NO_BASELINE, CandidateResult, Detectable
from quantwatch.report.numbers import Number, as_fields


def detection_words(candidate: CandidateResult) -> str | None:
    """Return whole sentences on the rules of a candidate, None when nothing is known of them.

    Rules on a baseline are left out where there is none: a report says so in another place.
    """
    known = [each for each in candidate.detectable if each.reason != NO_BASELINE]
    if not known:
        return None
    power = known[0].power
    told = [_rule(each) for each in known if each.value is not None]
    never = [f"{each.rule} ({each.reason})" for each in known if each.value is None]
    said = [f"Smallest change found in {power:.0%} of nights: {'; '.join(told)}."] if told else []
    said += [f"Found by no night: {'; '.join(never)}."] if never else []
    return " ".join(said)


def documents(candidate: CandidateResult) -> list[dict[str, Any]]:
    """Return one JSON object per rule; null where no change is found, with the reason."""
    return [_document(each) for each in candidate.detectable]


def _rule(each: Detectable) -> str:
    where = "" if each.scope in (None, "model") else f" at {each.scope}"
    return f"{each.rule} a change of {each.value:.3g}{where}"


def _document(each: Detectable) -> dict[str, Any]:
    numbers = {
        "expected": Number.of(each.expected),
        "limit": Number.of(each.limit),
        "change": Number.of(each.value),
    }
    return {
        "rule": each.rule,
        "metric": each.metric,
        "statistic": each.statistic,
        "scope": each.scope,
        "num_scopes": each.num_scopes,
        "power": each.power,
        "reason": each.reason or None,
        **as_fields(numbers),
    }
