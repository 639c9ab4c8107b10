"""An alert that comes and goes: when it is said to flap, and what that changes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from quantwatch.config.load import parse
from quantwatch.config.watching import AlertingConfig
from quantwatch.domain import RuleOutcome
from quantwatch.errors import ConfigError

Say = Callable[..., RuleOutcome]
Service = Any
ONCE = {"leave_runs": 1}


def configured(service: Service, **flapping: Any) -> None:
    service.alerting = {"confirm": False, "flapping": flapping}
    service.apply()


def come_and_go(service: Service, say: Say, times: int = 1) -> None:
    for _ in range(times):
        service.run(say("breach"))
        service.run(say("clear", **ONCE))


def flags(service: Service) -> list[bool]:
    return [body["data"]["alerts"][0]["flapping"] for body in service.bodies()]


def test_how_often_is_too_often(service: Service, say: Say) -> None:
    """Catches a threshold that is read nowhere, or one firing too late."""
    configured(service, firings=1, leave_factor=3)
    come_and_go(service, say)
    service.run(say("breach"))
    assert flags(service) == [False, False, True]
    assert [service.run(say("clear", **ONCE)) and service.state() for _ in range(3)] == [
        "recovering",
        "recovering",
        "inactive",
    ]
    assert flags(service) == [False, False, True, True]


def test_what_flaps_is_told_less_often(service: Service, say: Say) -> None:
    """Catches damping that only shows: the same nights are half the messages (X22)."""
    configured(service, firings=1)
    come_and_go(service, say, 5)
    assert service.heard().count(("alert.firing", "first")) == 2
    assert service.state() == "recovering"


def test_a_factor_of_one_only_shows_it(service: Service, say: Say) -> None:
    """Catches a damping that nobody can switch off."""
    configured(service, firings=1, leave_factor=1)
    come_and_go(service, say, 3)
    assert service.heard().count(("alert.firing", "first")) == 3
    assert flags(service) == [False, False, True, True, True, True]


def test_old_firings_do_not_count(service: Service, say: Say) -> None:
    """Catches an alert that flaps for ever because it once did."""
    configured(service, firings=1, within="2d")
    come_and_go(service, say, 2)
    service.db.clock_shift += timedelta(days=3)
    service.run(say("clear"))
    service.run(say("breach"))
    assert flags(service)[-1] is False


def test_what_people_end_is_no_flapping(service: Service, say: Say) -> None:
    """Catches an alert that flaps because its rule was edited a few times in one afternoon."""
    configured(service, firings=1)
    for version in ("v1", "v2", "v3"):
        service.run(say("breach", rule_sha=version))
    assert flags(service) == [False] * 5
    come_and_go(service, say)
    assert service.state() == "inactive"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no firing at all": ({"firings": 0}, "flapping.firings: 0 is not allowed; allowed: 1 or more"),
    "more than anybody counts": (
        {"firings": 101}, "flapping.firings: 101 is not allowed; allowed: at most 100",
    ),
    "no whole number": (
        {"firings": 2.5}, "flapping.firings: 2.5 is not allowed; allowed: a whole number",
    ),
    "a window without a unit": ({"within": "7"}, "flapping.within: '7' is no length of time"),
    "no window": ({"within": "0d"}, "must be longer than nothing"),
    "a window of years": (
        {"within": "91d"}, "flapping: within = '91d' is too long; allowed: 90d or less",
    ),
    "leaving faster": (
        {"leave_factor": 0}, "flapping.leave_factor: 0 is not allowed; allowed: 1 or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("flapping", "words"), WRONG.values(), ids=WRONG)
def test_what_is_not_allowed_is_named(flapping: dict[str, Any], words: str) -> None:
    """Catches a setting that is taken and never holds."""
    with pytest.raises(ConfigError) as caught:
        parse(AlertingConfig, {"flapping": flapping}, "file")
    assert words in str(caught.value)
