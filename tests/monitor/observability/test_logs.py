"""Logs: one strict JSON object per line, facts of the run, never a secret."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quantwatch.errors import UserError
from quantwatch.observability import logs, redaction

CANARY = "canary-7f3a9c/+&ü"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take our handlers off again and forget the secrets of a test."""
    root, ours = logging.getLogger(), logging.getLogger("quantwatch")
    before = list(root.handlers), list(ours.handlers), ours.level
    yield
    root.handlers[:], ours.handlers[:] = before[0], before[1]
    ours.setLevel(before[2])
    redaction.forget()


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Lines:
    logs.configure("json", everything=True)
    return lambda: [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_a_record_is_one_object_with_its_facts(lines: Lines) -> None:
    """Catches logs that only people can read."""
    logs.get("quantwatch.worker").info("run claimed", run="01J", attempt=2, gpu=None)
    (record,) = lines()
    assert record.pop("at").endswith("Z")
    assert record == {
        "level": "info",
        "logger": "quantwatch.worker",
        "text": "run claimed",
        "run": "01J",
        "attempt": 2,
    }


def test_run_and_trace_are_in_every_record_of_the_body(lines: Lines) -> None:
    """Catches records that nobody can put to their run, and a run that sticks to the next one."""
    log = logs.get("quantwatch.worker")
    with logs.bound(run="01J", trace="ab"):
        with logs.bound(attempt=1):
            log.info("inside")
        log.info("between")
    log.info("outside")
    inside, between, outside = lines()
    assert (inside["run"], inside["trace"], inside["attempt"]) == ("01J", "ab", 1)
    assert (between["run"], "attempt" in between) == ("01J", False)
    assert "run" not in outside


def test_another_thread_has_facts_of_its_own(lines: Lines) -> None:
    """Catches the run of one worker in the records of another."""
    with logs.bound(run="01J"):
        thread = threading.Thread(target=lambda: logs.get("quantwatch.x").info("other"))
        thread.start()
        thread.join()
    assert "run" not in lines()[0]


@pytest.mark.parametrize(
    "text",
    ["50 % done", "line\nend", "\ud800 half a letter", '"quoted"', "{}", "数"],
    ids=["percent", "line-end", "half-a-letter", "quotes", "braces", "wide"],
)
@pytest.mark.parametrize("form", ["json", "text"])
def test_any_text_is_one_record(
    text: str, form: logs.Form, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a % that is taken for a format, and a line end that forges a record."""
    logs.configure(form, everything=False)
    logs.get("quantwatch.x").info(text, fact=text)
    err = capfd.readouterr().err
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Logging error" not in err


def test_numbers_that_json_has_not_stay_readable(lines: Lines) -> None:
    """Catches NaN in a JSON document (B14)."""
    logs.get("quantwatch.x").info(
        "kl", value=float("nan"), more={"max": float("inf")}, exact=1e-300
    )
    (record,) = lines()
    assert (record["value"], record["more"], record["exact"]) == ("nan", {"max": "inf"}, 1e-300)


@pytest.mark.parametrize(
    "leaky",
    [
        CANARY,
        f"https://hooks.example/services/{CANARY}",
        f"postgresql://user:{CANARY}@host/db",
        f"Authorization: Bearer {CANARY}",
        "whsec_Y2FuYXJ5LTdmM2E5Yy/+canary-7f3a9c",
        "https://user:canary-7f3a9c@host/path",
        "https://hooks.example/services/T00/canary-7f3a9c?token=canary-7f3a9c",
        "{'Authorization': 'Bearer canary-7f3a9c'}",
        "connection to user=u password=canary-7f3a9c failed",
        repr(CANARY),
        json.dumps({"a": CANARY}),
    ],
    ids=lambda text: re.sub(r"\W+", "-", ascii(text)).strip("-"),
)
@pytest.mark.parametrize("form", ["json", "text"])
def test_no_secret_reaches_a_log(
    leaky: str, form: logs.Form, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a webhook token in text, facts, nested facts or exception (B29)."""
    redaction.register(CANARY)
    logs.configure(form, everything=True)
    log = logs.get("quantwatch.delivery")
    try:
        raise ConnectionError(f"cannot reach {leaky}") from ValueError(leaky)
    except ConnectionError as error:
        log.error(f"failed: {leaky}", error, where=leaky, deep={leaky: [leaky]})
        with logs.bound(endpoint=leaky):
            log.info("again", what=error)
        logging.getLogger("another.library").warning("lost %s", leaky, exc_info=True)
    shown = capfd.readouterr().err
    assert "canary" not in shown
    assert "another.library" in shown
    assert redaction.HIDDEN in shown
    ours = [r for r in caplog.records if r.name.startswith("quantwatch")]
    assert "canary" not in str([vars(record) for record in ours])


def test_harmless_text_stays_as_it_is() -> None:
    """Catches a redaction that eats what people need: hosts, files, run ids, figures."""
    text = (
        "run 01JDXYZ: layers.3 KL 0.2 > 0.15 at /models/smol, a@b, https://hooks.example failed, "
    )
    text += "basic understanding, password; correct it, 3 tokens: 5, authorization missing"
    redaction.register("abc")
    assert redaction.scrub(text) == text


def test_host_of_a_url_stays() -> None:
    """Catches a log from which nobody can tell which receiver was meant."""
    said = redaction.scrub("POST https://hooks.example:8443/services/T0/B0 refused")
    assert said == f"POST https://hooks.example:8443/{redaction.HIDDEN} refused"


def test_the_longer_of_two_secrets_goes_first() -> None:
    """Catches the rest of a secret that begins with another one."""
    redaction.register("canary-1")
    redaction.register("canary-1234")
    assert redaction.scrub("x canary-1234 y") == f"x {redaction.HIDDEN} y"


def test_both_secrets_of_a_rotation_are_hidden() -> None:
    """Catches the old secret in a log while two are valid."""
    redaction.register("old-secret-a new-secret-b")
    assert redaction.scrub("old-secret-a / new-secret-b").count(redaction.HIDDEN) == 2


@pytest.mark.parametrize(("value", "form"), [("json", "json"), ("text", "text"), (None, "text")])
def test_the_variable_chooses_the_form(value: str | None, form: str) -> None:
    """Catches a variable that does nothing."""
    env = {} if value is None else {logs.VARIABLE: value}
    assert logs.wanted_form("text", env) == form


def test_an_unknown_form_is_refused() -> None:
    """Catches a misspelt form that is taken for the default."""
    with pytest.raises(
        UserError, match="QUANTWATCH_LOG: 'jsn' is not allowed; allowed: json, text"
    ):
        logs.wanted_form("json", {logs.VARIABLE: "jsn"})


def test_configuring_twice_writes_once(lines: Lines) -> None:
    """Catches a record per call of `configure`."""
    logs.configure("json", everything=True)
    logs.get("quantwatch.x").info("once")
    assert len(lines()) == 1


def test_other_libraries_speak_only_in_the_service(capfd: pytest.CaptureFixture[str]) -> None:
    """Catches words of a library among the results of a command, and httpx's URLs in the service."""
    logs.configure("text", everything=False)
    logs.get("quantwatch.x").info("ours")
    logging.getLogger("httpx").info("HTTP Request: POST https://x")
    err = capfd.readouterr().err
    assert "ours" in err
    assert "HTTP Request" not in err
