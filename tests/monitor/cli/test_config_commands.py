"""`quantwatch config`, `doctor --preflight` and the mark of checks that run their own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantwatch.cli import preflight

Run = Callable[..., Any]
OWN = """
[checks.own]
suite = "core-v1:demo"
reference = { model = "smollm2-135m" }
candidates = [{ name = "fused", factory = "ours.serve:build", allow_code = true }]
schedule = { cron = "0 2 * * *" }
"""


def add(place: Path, text: str) -> None:
    file = place / "quantwatch.toml"
    file.write_text(file.read_text() + text)


def test_plan_then_apply_then_nothing_changes(run: Run, place: Path) -> None:
    """Catches a plan that applies, an apply that doesn't, and one that is never finished."""
    run("db", "upgrade")
    add(place, OWN)
    planned = run("config", "plan")
    assert planned.code == 0
    assert "+ added check nightly\n" in planned.out
    assert "+ added check own [runs its own code: fused]\n" in planned.out
    assert "+ added schedule own\n" in planned.out
    assert run("config", "plan").out == planned.out
    assert run("config", "apply").out == planned.out
    assert run("config", "plan").out == "nothing changes\n"


def test_a_plan_can_be_read_by_a_program(run: Run, place: Path) -> None:
    """Catches a CI job that has to parse words."""
    run("db", "upgrade")
    (change,) = json.loads(run("config", "plan", "--json").out)
    assert change == {
        "action": "added", "kind": "check", "name": "nightly", "details": [], "marks": [],
    }  # fmt: skip


def test_validate_names_a_secret_that_is_missing(run: Run, place: Path) -> None:
    """Catches a file that is valid on the laptop and breaks the service."""
    add(place, '[endpoints.ops]\nurl_env = "NOT_SET_ANYWHERE"\n')
    outcome = run("config", "validate")
    assert outcome.code == 2
    assert "endpoints.ops.url_env: environment variable NOT_SET_ANYWHERE is not set" in outcome.err


def test_validate_refuses_a_path_that_leads_out(run: Run, place: Path, tmp_path: Path) -> None:
    """Catches a check of the service that reads anything on the host."""
    add(place, OWN.replace('"smollm2-135m"', '"/"'))
    outcome = run("config", "validate")
    assert outcome.code == 2
    assert "checks.own.reference.model: / lies outside" in outcome.err


def test_validate_says_what_runs_its_own_code(run: Run, place: Path) -> None:
    """Catches an opt-in that nobody sees."""
    add(place, OWN)
    assert "note: check own runs its own code: fused" in run("config", "validate").out
    listed = {row["name"]: row["marks"] for row in json.loads(run("check", "list", "--json").out)}
    assert listed == {"nightly": "", "own": "runs its own code: fused"}


def test_preflight_looks_at_what_deployments_forget(run: Run) -> None:
    """Catches a probe that fails on a working machine, or that nobody runs."""
    run("db", "upgrade")
    found = {row["name"]: row for row in json.loads(run("doctor", "--preflight", "--json").out)}
    assert {"clock", "database rights", "time zones", "file descriptors"} <= set(found)
    assert {"disk: database", "mount: cache", "shared memory", "processes"} <= set(found)
    assert found["clock"]["state"] == found["database rights"]["state"] == "ok"
    assert "disk: database" not in run("doctor").out


def test_preflight_without_a_database_names_the_next_step(run: Run) -> None:
    """Catches "broken" on a machine where only the first step is missing."""
    found = {row["name"]: row for row in json.loads(run("doctor", "--preflight", "--json").out)}
    assert found["database rights"]["state"] == "warn"
    assert found["database rights"]["fix"] == "run: quantwatch db upgrade"


def test_preflight_finds_a_zone_that_the_system_lacks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a slim image without time zone data, where every schedule breaks."""
    monkeypatch.setattr(preflight, "_is_zone", lambda name: name == "UTC")
    found = {row["name"]: row for row in json.loads(run("doctor", "--preflight", "--json").out)}
    assert found["time zones"]["state"] == "broken"
    assert "missing: Europe/Berlin" in found["time zones"]["text"]


def test_preflight_finds_a_database_that_may_not_be_written(run: Run, place: Path) -> None:
    """Catches rights that are missed at two in the night."""
    url = f"sqlite:///file:{place}/x.db?uri=true"
    run("--database", url, "db", "upgrade")
    outcome = run("--database", f"{url}&mode=ro", "doctor", "--preflight", "--json")
    found = {row["name"]: row for row in json.loads(outcome.out)}
    assert outcome.code == 3
    assert found["database rights"]["state"] == "broken"
    assert "read-only" in found["database rights"]["text"]
