"""The file in use: planned, applied in one transaction, edited while the service runs."""

import logging
import os
from pathlib import Path

import pytest
from sqlalchemy import func, select

from quantwatch.config.load import load_config
from quantwatch.config.service import TEMPLATE_SETTINGS, EndpointConfig
from quantwatch.errors import ConfigError, StoreError
from quantwatch.observability import meters
from quantwatch.service import configuration
from quantwatch.service.configuration import Current, FileWatch, apply, load, plan_changes
from quantwatch.service.housekeeping import House, look_at_file
from quantwatch.store import applied
from quantwatch.store.applied import applied_checks, applied_endpoints
from quantwatch.store.components import list_components
from quantwatch.store.outbox import Event, publish
from quantwatch.store.session import Database
from quantwatch.store.tables import AuditRow, CheckRow, EndpointRow, EventRow, ScheduleRow

CONFIG = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = { model = "org/reference" }
candidates = [{ name = "int8", model = "org/reference", recipe = "int8-channel" }]
schedule = { cron = "0 2 * * *", zone = "Europe/Berlin" }

[checks.manual]
suite = "core-v1:demo"
reference = { model = "org/reference" }
candidates = [{ name = "int4", model = "org/reference", recipe = "int4-g64" }]

[endpoints.ops]
url_env = "OPS_URL"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a scheduled check, one on request, and an endpoint."""
    monkeypatch.setenv("OPS_URL", "https://hooks.example/services/T0/parakeet-4711")
    path = tmp_path / "conf" / "quantwatch.toml"
    path.parent.mkdir()
    path.write_text(CONFIG)
    return path


def told(db: Database, path: Path) -> list[str]:
    return [str(change) for change in plan_changes(db, load(path))]


def test_first_everything_is_added_then_nothing_changes(db: Database, file: Path) -> None:
    """Catches a plan that forgets something, and an apply that is never done."""
    assert told(db, file) == [
        "added check manual",
        "added check nightly",
        "added schedule nightly",
        "added endpoint ops",
    ]
    apply(db, load(file), "test")
    assert told(db, file) == []
    with db.reader() as session:
        rows = session.scalars(select(CheckRow).order_by(CheckRow.name)).all()
        assert [row.name for row in rows] == ["manual", "nightly"]
        assert rows[1].config is not None
        assert rows[1].config["schedule"]["cron"] == "0 2 * * *"
        assert rows[1].base_dir == str(file.parent)
        assert session.scalar(select(func.count()).select_from(ScheduleRow)) == 1


def test_a_plan_writes_nothing(db: Database, file: Path) -> None:
    """Catches a look that changes what it looks at."""
    plan_changes(db, load(file))
    with db.reader() as session:
        assert applied_checks(session) == {}


EDITS: dict[str, tuple[str, str]] = {
    "url": ('url = "https://hooks.example/other"', "its address or secrets"),
    "url_env": ('url_env = "OTHER_URL"', 'url_env: "OPS_URL" → "OTHER_URL"'),
    "url_file": ('url_file = "url.txt"', 'url_file: null → "url.txt"'),
    "secret_env": ('secret_env = "OTHER"', 'secret_env: "SECRET" → "OTHER"'),
    "secret_file": ('secret_file = "secret.txt"', 'secret_file: null → "secret.txt"'),
    "format": ('format = "slack"', 'format: "quantwatch" → "slack"'),
    "severities": ('severities = ["critical"]', 'severities: ["warning", "critical"] →'),
    "rate_per_minute": ("rate_per_minute = 60", "rate_per_minute: 20 → 60"),
    "allow_http": ("allow_http = true", "allow_http: false → true"),
    "allow_networks": ('allow_networks = ["10.1.0.0/16"]', 'allow_networks: [] → ["10.1.0.0/16"]'),
    "body": ('body = "2"', 'body: "1" → "2"'),
    "body_file": ('body_file = "body.json"', 'body_file: null → "body.json"'),
    "content_type": (
        'content_type = "text/plain"', 'content_type: "application/json" → "text/plain"',
    ),
    "headers": ('headers = { x-a = "2" }', 'headers: null → {"x-a": "2"}'),
    "headers_env": ('headers_env = { x-b = "KEY" }', 'headers_env: null → {"x-b": "KEY"}'),
    "headers_file": ('headers_file = { x-c = "key.txt" }', 'headers_file: null → {"x-c": "key.txt"}'),
}  # fmt: skip
TEMPLATE = {"format": 'format = "template"', "body": 'body = "1"'}


@pytest.mark.parametrize("field", EndpointConfig.model_fields)
def test_every_setting_of_an_endpoint_is_planned(
    db: Database, file: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Catches an edited rate that no plan lists, and one that is listed for ever."""
    monkeypatch.setenv("SECRET", f"whsec_{'QUJD' * 8}")
    monkeypatch.setenv("OTHER", f"whsec_{'REVG' * 8}")
    monkeypatch.setenv("OTHER_URL", "https://hooks.example/services/T0/parakeet-4711")
    (file.parent / "url.txt").write_text("https://hooks.example/services/T0/parakeet-4711")
    (file.parent / "secret.txt").write_text(f"whsec_{'QUJD' * 8}")
    monkeypatch.setenv("KEY", "parakeet-header")
    (file.parent / "key.txt").write_text("parakeet-header")
    (file.parent / "body.json").write_text("{}")
    lines = {"url": 'url_env = "OPS_URL"', "secret": 'secret_env = "SECRET"'}
    if field in TEMPLATE_SETTINGS:
        lines |= TEMPLATE
    file.write_text(CONFIG.replace(lines["url"], "\n".join(lines.values())))
    apply(db, load(file), "test")
    edit, words = EDITS[field]
    # What excludes the line that it replaces has the same beginning.
    lines[field if field.startswith("headers") else field.partition("_")[0]] = edit
    file.write_text(CONFIG.replace('url_env = "OPS_URL"', "\n".join(lines.values())))
    (change,) = told(db, file)
    assert change.startswith("changed endpoint ops ")
    assert words in change
    assert "parakeet" not in change
    assert "whsec" not in change
    apply(db, load(file), "test")
    assert told(db, file) == []


def test_an_edited_template_file_is_planned(
    db: Database, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches other words for a receiver, or a rotated header, that no plan lists."""
    monkeypatch.setenv("KEY", "parakeet-header")
    (file.parent / "body.json").write_text('{"text": {{ title }}}')
    more = 'format = "template"\nbody_file = "body.json"\nheaders_env = { x-key = "KEY" }\n'
    file.write_text(CONFIG + more)
    apply(db, load(file), "test")
    assert told(db, file) == []
    (file.parent / "body.json").write_text('{"text": {{ check }}}')
    (change,) = told(db, file)
    assert change.startswith("changed endpoint ops body_file_sha: ")
    apply(db, load(file), "test")
    monkeypatch.setenv("KEY", "parakeet-another")
    assert told(db, file) == ["changed endpoint ops its address or secrets"]


@pytest.mark.parametrize("name", ["OPS_URL", "SECRET"])
def test_what_a_variable_holds_is_planned(
    db: Database, file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches a rotated secret, or a moved receiver, that no plan lists."""
    monkeypatch.setenv("SECRET", f"whsec_{'QUJD' * 8}")
    file.write_text(CONFIG + 'secret_env = "SECRET"\n')
    apply(db, load(file), "test")
    other = {"OPS_URL": "https://hooks.example/else", "SECRET": f"whsec_{'REVG' * 8}"}
    monkeypatch.setenv(name, other[name])
    assert told(db, file) == ["changed endpoint ops its address or secrets"]
    apply(db, load(file), "test")
    assert told(db, file) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            "[service]\nmetrics_port = 9000",
            "changed settings service [from the next start on] metrics_port: 9464 → 9000",
        ),
        ('[retention]\nruns = "99d"', 'changed settings retention runs: "1830d" → "99d"'),
    ],
    ids=["service", "retention"],
)
def test_other_sections_are_planned(db: Database, file: Path, section: str, words: str) -> None:
    """Catches results that are deleted earlier than before, which no plan said."""
    apply(db, load(file), "test")
    file.write_text(f"{CONFIG}\n{section}\n")
    assert told(db, file) == [words]
    apply(db, load(file), "ada")
    assert told(db, file) == []
    with db.reader() as session:
        row = session.scalars(select(AuditRow).order_by(AuditRow.id.desc())).first()
        assert row is not None
        assert row.subject == f"settings:{section[1:].partition(']')[0]}"
        assert row.before != row.after
    file.write_text(CONFIG)
    assert len(told(db, file)) == 1, "back to the default is a change, too"


def test_a_moved_file_is_planned(db: Database, file: Path, tmp_path: Path) -> None:
    """Catches relative paths that start elsewhere, while nothing seems to change."""
    apply(db, load(file), "test")
    moved = tmp_path / "elsewhere" / "quantwatch.toml"
    moved.parent.mkdir()
    moved.write_text(CONFIG)
    found = plan_changes(db, load(moved))
    assert [change.name for change in found] == ["manual", "nightly"]
    for change in found:
        assert str(change).startswith(f"changed check {change.name} folder: ")
    apply(db, load(moved), "test")
    assert told(db, moved) == []


def test_every_change_is_audited_with_before_and_after(db: Database, file: Path) -> None:
    """Catches a night that moved and nobody knows who did it."""
    apply(db, load(file), "test")
    file.write_text(CONFIG.replace("0 2 * * *", "0 3 * * *"))
    apply(db, load(file), "ada")
    with db.reader() as session:
        row = session.scalars(select(AuditRow).order_by(AuditRow.id.desc())).first()
        assert row is not None
        assert (row.actor, row.action, row.subject) == ("ada", "config.changed", "schedule:nightly")
        nights = [document["schedule"]["cron"] for document in (row.before, row.after) if document]
        assert nights == ["0 2 * * *", "0 3 * * *"]


def test_what_was_told_of_an_endpoint_ends_with_it(db: Database, file: Path) -> None:
    """Catches a notice on an endpoint that stays open for ever once the endpoint is taken out."""
    chat = '[endpoints.chat]\nurl = "https://chat.example/hook"\n'
    file.write_text(CONFIG + chat)
    apply(db, load(file), "test")
    with db.writer() as session:
        body = {"data": {"title": "Endpoint ops has failed 4 times in a row"}}
        publish(session, Event("endpoint.failing", "endpoint:ops", body), ["chat"])
    file.write_text(CONFIG[: CONFIG.index("[endpoints.ops]")] + chat)
    apply(db, load(file), "test")
    with db.reader() as session:
        types = session.scalars(select(EventRow.type).order_by(EventRow.seq)).all()
    assert types == ["endpoint.failing", "endpoint.recovered"]


def test_what_vanished_is_marked_and_comes_back_with_its_history(db: Database, file: Path) -> None:
    """Catches a deploy with a half-empty file that deletes checks (B07: 268 schedules lost)."""
    apply(db, load(file), "test")
    with db.reader() as session:
        before = session.scalar(select(CheckRow.id).where(CheckRow.name == "nightly"))
    file.write_text("schema_version = 1\n")
    apply(db, load(file), "test")
    with db.reader() as session:
        assert applied_checks(session) == {}
        assert applied_endpoints(session) == {}
        removed = session.scalars(select(CheckRow.removed_at)).all()
        assert len(removed) == 2
        assert all(removed)
        assert session.scalar(select(EndpointRow.state)) == "removed"
    file.write_text(CONFIG)
    assert "added check nightly" in told(db, file)
    apply(db, load(file), "test")
    with db.reader() as session:
        row = session.scalars(select(CheckRow).where(CheckRow.name == "nightly")).one()
        assert (row.id, row.removed_at) == (before, None)
        assert session.scalar(select(EndpointRow.state)) == "enabled"


def test_a_pause_outlives_a_changed_file(db: Database, file: Path) -> None:
    """Catches a file that undoes what somebody decided (F8)."""
    apply(db, load(file), "test")
    with db.writer() as session:
        row = session.scalars(select(CheckRow).where(CheckRow.name == "nightly")).one()
        row.paused_at, row.paused_by = row.applied_at, "ada"
    file.write_text(CONFIG.replace("0 2 * * *", "0 3 * * *"))
    apply(db, load(file), "test")
    with db.reader() as session:
        assert session.scalar(select(CheckRow.paused_by).where(CheckRow.name == "nightly")) == "ada"


def test_a_check_that_only_a_person_ran_is_not_touched(db: Database, file: Path) -> None:
    """Catches `check run` on a laptop that makes the service remove something."""
    with db.writer() as session:
        session.add(CheckRow(name="by-hand"))
    apply(db, load(file), "test")
    with db.reader() as session:
        row = session.scalars(select(CheckRow).where(CheckRow.name == "by-hand")).one()
        assert row.removed_at is None


def test_nothing_is_applied_when_one_part_fails(
    db: Database, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches checks of the new file with schedules of the old one."""

    def broken(*_: object) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr(applied, "apply_endpoints", broken)
    with pytest.raises(StoreError, match="disk full"):
        apply(db, load(file), "test")
    with db.reader() as session:
        assert applied_checks(session) == {}


def test_no_secret_gets_into_plan_audit_or_database(
    db: Database, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches the token of a webhook in the rows that say what changed (B29)."""
    with caplog.at_level(logging.DEBUG):
        apply(db, load(file), "test")
        assert "parakeet" not in str(told(db, file))
    with db.reader() as session:
        rows = [*session.scalars(select(AuditRow)), *session.scalars(select(EndpointRow))]
        assert rows
        assert "parakeet" not in str([vars(row) for row in rows])
    assert "parakeet" not in caplog.text


# edited while the service runs


@pytest.fixture
def house(db: Database, file: Path) -> House:
    loaded = load(file)
    apply(db, loaded, "test")
    return House(db, Current(loaded), frozenset({"scheduler"}))


def look(house: House, watch: FileWatch) -> None:
    """Look twice, like two rounds of the chore: the file has to hold still in between."""
    look_at_file(house, watch)
    look_at_file(house, watch)


def watch_of(house: House) -> FileWatch:
    return FileWatch(house.current.loaded.path, house.current.loaded.digest)


def test_a_changed_file_is_taken_over(db: Database, house: House, file: Path) -> None:
    """Catches a service that has to be restarted for each change."""
    watch = watch_of(house)
    file.write_text(CONFIG.replace("checks.manual", "checks.weekly"))
    look(house, watch)
    with db.reader() as session:
        assert sorted(applied_checks(session)) == ["nightly", "weekly"]
    assert house.trouble is None
    assert "weekly" in house.current.loaded.config.checks


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("schema_version = ", "not valid TOML"),
        ("", "schema_version: required"),
        (CONFIG.replace("0 2 * * *", "0 2 31 2 *"), "cron"),
        (CONFIG.replace("Europe/Berlin", "Europe/Atlantis"), "Atlantis"),
        (CONFIG.replace("OPS_URL", "NOT_SET"), "NOT_SET is not set"),
        (CONFIG.replace("org/reference", "/etc"), "lies outside"),
        (None, "cannot be read"),
    ],
    ids=["torn", "empty", "never-fires", "unknown-zone", "no-secret", "outside", "gone"],
)
def test_a_broken_file_keeps_the_configuration_before_it(
    content: str | None, words: str, db: Database, house: House, file: Path
) -> None:
    """Catches a night without checks because of a typing error at five."""
    watch = watch_of(house)
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    look(house, watch)
    assert house.trouble is not None
    assert words in house.trouble
    with db.reader() as session:
        assert sorted(applied_checks(session)) == ["manual", "nightly"]
        (seen,) = list_components(session)
        assert words in str(seen.details["config_trouble"])
    assert meters.CONFIG_BROKEN._value.get() == 1
    file.write_text(CONFIG + "\n# mended\n")
    look(house, watch)
    assert house.trouble is None
    assert meters.CONFIG_BROKEN._value.get() == 0


def test_a_file_that_is_being_written_is_waited_for(house: House, file: Path) -> None:
    """Catches the first half of a file, which is valid TOML, taken for a file with fewer checks."""
    watch = watch_of(house)
    file.write_text(CONFIG.partition("[checks.manual]")[0])
    look_at_file(house, watch)
    file.write_text(CONFIG.replace("checks.manual", "checks.weekly"))
    look_at_file(house, watch)
    assert sorted(house.current.loaded.config.checks) == ["manual", "nightly"]
    look_at_file(house, watch)
    assert sorted(house.current.loaded.config.checks) == ["nightly", "weekly"]


def test_a_link_that_is_turned_is_a_change(house: House, file: Path, tmp_path: Path) -> None:
    """Catches Kubernetes' way of changing a mounted file."""
    watch = watch_of(house)
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("checks.manual", "checks.weekly"))
    file.unlink()
    os.symlink(other, file)
    look(house, watch)
    assert "weekly" in house.current.loaded.config.checks


def test_a_database_that_was_away_gets_the_change_later(
    house: House, file: Path, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a change that is lost because PostgreSQL was restarted at that moment."""
    watch = watch_of(house)
    file.write_text(CONFIG.replace("checks.manual", "checks.weekly"))

    def away(*_: object) -> None:
        raise StoreError("away")

    look_at_file(house, watch)
    with monkeypatch.context() as patched:
        patched.setattr(configuration, "apply", away)
        with pytest.raises(StoreError):
            look_at_file(house, watch)
    look_at_file(house, watch)
    with db.reader() as session:
        assert sorted(applied_checks(session)) == ["nightly", "weekly"]


def test_a_process_that_does_not_schedule_writes_nothing(house: House, file: Path) -> None:
    """Catches two hosts with two files that undo each other."""
    house.parts = frozenset({"delivery"})
    watch = watch_of(house)
    file.write_text(CONFIG.replace("checks.manual", "checks.weekly"))
    look(house, watch)
    assert "weekly" in house.current.loaded.config.checks
    with house.db.reader() as session:
        assert "weekly" not in applied_checks(session)


def test_code_of_its_own_is_marked_in_the_log(
    db: Database, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an opt-in that nobody sees."""
    own = '{ name = "own", factory = "ours.serve:build", allow_code = true }'
    text = CONFIG.replace('{ name = "int4", model = "org/reference", recipe = "int4-g64" }', own)
    file.write_text(text)
    apply(db, load(file), "test")
    assert "a check may run code of its own" in caplog.text
    assert "added check manual [runs its own code: own]" not in told(db, file)


def test_the_example_is_valid_for_the_service_where_its_files_are(tmp_path: Path) -> None:
    """Catches an example that nobody can start from."""
    example = Path(configuration.__file__).parents[1] / "config" / "example.toml"
    config = load_config(example)
    assert config.endpoints
    assert any(check.schedule for check in config.checks.values())
    with pytest.raises(ConfigError, match=r"prompts\.txt does not exist"):
        load(example)
