"""The canary alert: a planted fault that the monitor did not see, or saw in another place.

It is about the monitor and no regression: what it says tonight of any candidate may be wrong. A
canary that could not be measured says nothing either way, and moves nothing.
"""

from quantwatch.domain import Canary, RuleOutcome, Severity

CANARY = "canary"
"""Name of the rule; its candidate is empty, because it is about the check itself."""
_SHA = "canary 1"


def blindness(canary: Canary, run_id: str) -> RuleOutcome:
    """Return the outcome of the rule on the newest canary that could be measured."""
    return RuleOutcome(
        rule=CANARY,
        candidate="",
        rule_sha=_SHA,
        severity=Severity.CRITICAL,
        outcome="breach" if canary.is_blind else "clear",
        enter_runs=1,
        leave_runs=1,
        scope=canary.place,
        value=canary.size,
        value_kind="finite",
        threshold=None,
        words=f"{canary_words(canary)} (run {run_id})",
    )


def canary_words(canary: Canary) -> str:
    """Return in a sentence what became of a canary."""
    what = f"a planted fault of {canary.size:.3g} ({fault_words(canary)})"
    if canary.state != "measured":
        return f"{what} could not be measured: {canary.reason}"
    if not canary.found:
        why = f" ({canary.reason})" if canary.reason else ""
        return f"{what} was not found by any rule{why}: the monitor is blind there"
    if not canary.located:
        where = "nowhere" if canary.named is None else f"at {canary.named}"
        return f"{what} was found by rule {canary.rule}, and located {where}"
    return f"{what} was found by rule {canary.rule} and located at {canary.named}"


def fault_words(canary: Canary) -> str:
    """Return what was planted where, and in what."""
    place = canary.place or "no place"
    which = "" if canary.channel is None else f" {canary.channel}"
    source = canary.candidate if canary.of == "candidate" else "the reference"
    return f"{canary.fault}{which} at {place} in a copy of {source}"
