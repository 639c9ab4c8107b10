"""What people look at: each check's schedule, how it stands, and its next three instants."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from quantwatch.config.load import parse
from quantwatch.config.plans import Plan, plan_of
from quantwatch.config.watching import ScheduleConfig
from quantwatch.errors import ConfigError
from quantwatch.schedules import next_three
from quantwatch.store.checks import Pause
from quantwatch.store.schedules import ScheduleState


@dataclass(frozen=True, slots=True)
class Stored:
    """What the database knows; nothing before the service has ever started."""

    now: datetime
    states: Mapping[str, ScheduleState]
    pauses: Mapping[str, Pause]


def upcoming(sections: Mapping[str, ScheduleConfig], stored: Stored) -> list[dict[str, Any]]:
    """Return a row per check with a schedule in the file (`sections`) or in the database."""
    names = sorted({*sections, *stored.states})
    return [_row(name, sections.get(name), stored) for name in names]


def _row(name: str, section: ScheduleConfig | None, stored: Stored) -> dict[str, Any]:
    state = stored.states.get(name)
    pause = stored.pauses.get(name)
    plan, trouble = _plan(name, section, state, stored)
    return {
        "check": name,
        "schedule": _text(section, state),
        "zone": plan.schedule.zone if plan else None,
        "state": _word(section, state, pause),
        "reason": trouble or (f"{pause.by}: {pause.reason}" if pause else None),
        "jitter_s": int(plan.jitter.total_seconds()) if plan else None,
        "grace_s": int(plan.grace.total_seconds()) if plan else None,
        "catch_up": ("latest" if plan.catch_up else "none") if plan else None,
        "last_slot": _utc(state.last_slot_at) if state and state.last_slot_at else None,
        "next": _next(plan, state, stored.now) if plan else [],
    }


def _plan(
    name: str, section: ScheduleConfig | None, state: ScheduleState | None, stored: Stored
) -> tuple[Plan | None, str | None]:
    """Return the plan, of the file before that of the database, and what is wrong with either."""
    trouble = state.trouble if state else None
    try:
        if section is None and state is not None:
            section = parse(ScheduleConfig, state.settings, f"check {name}")
    except ConfigError as error:
        return None, trouble or str(error)
    assert section is not None
    return plan_of(name, section, state.anchor_at if state else stored.now), trouble


def _text(section: ScheduleConfig | None, state: ScheduleState | None) -> str:
    settings = section.model_dump() if section else dict(state.settings) if state else {}
    return str(settings.get("cron") or f"every {settings.get('every')}")


def _word(section: ScheduleConfig | None, state: ScheduleState | None, pause: Pause | None) -> str:
    if pause is not None:
        return "paused"
    if state is None:
        return "not applied"
    if state.quarantined_at is not None:
        return "quarantined"
    if state.trouble is not None:
        return "in trouble"
    if section is None:
        return "not in the file"
    same = section.model_dump(mode="json") == state.settings
    return "scheduled" if same else "changed, not applied"


def _next(plan: Plan, state: ScheduleState | None, now: datetime) -> list[dict[str, str]]:
    """Return the next instants; one whose jitter has not passed is still to come."""
    after = max(now - plan.jitter, state.dealt_with) if state else now
    zone = ZoneInfo(plan.schedule.zone)
    found = next_three(plan.schedule, after)
    return [
        {"local": f"{at.astimezone(zone):%a %Y-%m-%d %H:%M %Z}", "utc": _utc(at)} for at in found
    ]


def _utc(instant: datetime) -> str:
    return f"{instant:%Y-%m-%dT%H:%M:%SZ}"
