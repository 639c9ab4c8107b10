"""Alerts that fire again and again: shown as such, and told less often.

A firing is never held back. What flaps has to stay away for longer before it is resolved, so that
the next firing falls into the same episode and is no message.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from quantwatch.config.durations import seconds
from quantwatch.config.watching import FlappingConfig
from quantwatch.domain import RuleOutcome


def window(config: FlappingConfig) -> timedelta:
    """Return how far back firings count."""
    return timedelta(seconds=seconds(config.within))


def flapping(num_fired: Mapping[int, int], config: FlappingConfig) -> frozenset[int]:
    """Return which alerts flap, given how often each has fired within the window."""
    return frozenset(alert for alert, count in num_fired.items() if count > config.firings)


def damped(outcome: RuleOutcome, config: FlappingConfig) -> RuleOutcome:
    """Return the outcome of a rule whose alert flaps: it takes more clear runs to end it."""
    return replace(outcome, leave_runs=config.leave_factor * outcome.leave_runs)
