"""Alerts that fire again and again: shown as such, and told less often."""

from collections.abc import Mapping
from datetime import timedelta

MOST = 4
"""Firings within WITHIN; with more, an alert flaps."""
WITHIN = timedelta(days=7)
PATIENCE = 2
"""How many times as many runs a flapping alert has to stay away before it is resolved."""


def flapping(num_fired: Mapping[int, int]) -> frozenset[int]:
    """Return which alerts flap, given how often each has fired within WITHIN."""
    return frozenset(alert for alert, count in num_fired.items() if count > MOST)
