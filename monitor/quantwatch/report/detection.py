"""Minimum detectable effects in words and as JSON: how small a change would have been found."""

from typing import Any

from quantwatch.domain import NO_BASELINE, CandidateResult, Detectable
from quantwatch.report.numbers import Number

NEVER = "never"


def change_words(each: Detectable) -> str:
    """Return the smallest change of a rule's metric that is found, or that none is."""
    return NEVER if each.value is None else f"{each.value:.3g}"


def detection_words(candidate: CandidateResult) -> str | None:
    """Return one sentence on the rules of a candidate, None when nothing is known of them.

    Rules on a baseline are left out where there is none: a report says so in another place.
    """
    known = [each for each in candidate.detectable if each.reason != NO_BASELINE]
    if not known:
        return None
    power = known[0].power
    told = [_rule(each) for each in known if each.value is not None]
    never = [f"{each.rule} ({each.reason})" for each in known if each.value is None]
    said = [f"found in {power:.0%} of nights: {'; '.join(told)}"] if told else []
    return ". ".join([*said, *([f"Found by no night: {'; '.join(never)}"] if never else [])])


def documents(candidate: CandidateResult) -> list[dict[str, Any]]:
    """Return one JSON object per rule; null where no change is found, with the reason."""
    return [_document(each) for each in candidate.detectable]


def _rule(each: Detectable) -> str:
    where = "" if each.scope in (None, "model") else f" at {each.scope}"
    return f"{each.rule} a change of {change_words(each)}{where}"


def _document(each: Detectable) -> dict[str, Any]:
    numbers = {
        "expected": Number.of(each.expected),
        "limit": Number.of(each.limit),
        "change": Number.of(each.value),
    }
    found: dict[str, Any] = {
        "rule": each.rule,
        "metric": each.metric,
        "statistic": each.statistic,
        "scope": each.scope,
        "num_scopes": each.num_scopes,
        "power": each.power,
        "reason": each.reason or None,
    }
    for name, number in numbers.items():
        found[name] = number.value
        if number.value is None:
            found[f"{name}_kind"] = number.kind
    return found
