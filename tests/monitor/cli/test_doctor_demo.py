"""doctor, demo, dashboard and progress."""

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantwatch.cli import probes
from quantwatch.cli.demo import differences
from quantwatch.cli.progress import Lines
from quantwatch.domain import Culprit, RunResult, Scope, Verdict
from quantwatch_kernels.compare import lens_native, lens_words_native

Run = Callable[..., Any]
NAMES = [
    "versions", "devices", "NVML", "threads", "compiled code", "memory", "configuration",
    "database", "cache", "disk", "demo model", "dashboard",
]  # fmt: skip


def findings(outcome: Any) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(outcome.out)}


def test_doctor_on_a_working_machine(run: Run) -> None:
    """Everything essential is in place here; a database that isn't there yet is no failure."""
    outcome = run("doctor", "--json")
    found = findings(outcome)
    assert list(found) == NAMES
    assert outcome.code == 0
    assert found["database"]["state"] == "warn"
    assert found["database"]["fix"] == "run: quantwatch db upgrade"
    assert "torch 2." in found["versions"]["text"]
    run("db", "upgrade")
    assert findings(run("doctor", "--json"))["database"]["state"] == "ok"


def test_doctor_names_the_fix_of_what_is_broken(run: Run, place: Path) -> None:
    """A broken configuration and a cache that can't be written to: exit 3 and two fixes."""
    (place / "quantwatch.toml").write_text("schema_version = 2")
    (place / "XDG_CACHE_HOME").write_text("a file where a folder should be")
    outcome = run("doctor")
    assert outcome.code == 3
    assert "quantwatch.toml: schema_version" in outcome.out
    assert "fix: set XDG_CACHE_HOME" in outcome.out


def test_doctor_finds_a_missing_package(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-installed environment is named, not met as a traceback later."""
    monkeypatch.setattr(probes, "_PACKAGES", ("torch", "not-there-at-all"))
    outcome = run("doctor", "--json")
    assert outcome.code == 3
    assert "missing: not-there-at-all" in findings(outcome)["versions"]["text"]


def test_doctor_says_what_a_compiler_would_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lens of three times the time is no failure, and nobody would know why."""
    assert findings(run("doctor", "--json"))["compiled code"]["state"] == "ok"
    reason = "lens.cpp can't be built: there is no C++ compiler 'g++'"
    monkeypatch.setattr(lens_native, "why_not_native", lambda: reason)
    outcome = run("doctor", "--json")
    found = findings(outcome)["compiled code"]
    assert outcome.code == 0
    assert found["state"] == "warn"
    assert found["fix"].startswith("install g++, or name another C++ compiler in CXX")
    assert found["text"].startswith(reason)


def test_doctor_names_instructions_that_are_not_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing mends a processor: it is said, and all is well. What can't be built is a warning."""
    reasons = {"bfloat16": "this CPU has no avx512_bf16"}
    monkeypatch.setattr(lens_words_native, "why_not_words", reasons.get)
    monkeypatch.setattr(lens_words_native, "suits_cpu", lambda factors: factors != "bfloat16")
    found = findings(run("doctor", "--json"))["compiled code"]
    assert found["state"] == "ok"
    said = "products of the lens in float32, int16; this CPU has no avx512_bf16"
    assert found["text"].startswith(said)
    reasons["float32"] = "lens_float32.cpp can't be built: an error"
    found = findings(run("doctor", "--json"))["compiled code"]
    assert found["state"] == "warn"
    assert found["text"].startswith("lens_float32.cpp can't be built: an error")


def test_doctor_survives_a_package_that_cannot_be_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """doctor is called when things are broken: it must not break, too."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    outcome = run("doctor", "--json")
    found = findings(outcome)
    assert outcome.code == 3
    assert [name for name in NAMES if found[name]["state"] == "broken"] == ["threads", "memory"]


def test_doctor_finds_a_foreign_database(run: Run, place: Path) -> None:
    """A file that is no database at all is broken, with the way out."""
    (place / "text.db").write_text("This is a text, long enough not to be an empty file. " * 40)
    outcome = run("--database", f"sqlite:///{place}/text.db", "doctor", "--json")
    assert outcome.code == 3
    assert findings(outcome)["database"]["state"] == "broken"


# demo


def planted(make: Any) -> RunResult:
    """A demo run that found exactly what was planted."""
    scope = Scope("layers.14.mlp.down_proj")
    candidates = (
        make.candidate("bf16"),
        make.candidate("int8"),
        make.candidate("int4-g64", verdict=Verdict.WARN),
        make.candidate(
            "int8-fault", verdict=Verdict.REGRESSION, culprit=Culprit(scope, 0.04, None, "it is it")
        ),
    )
    alert = make.alert(scope=Scope("layers.14"))
    result: RunResult = make.run(*candidates, check="demo", alerts=(alert,))
    return result


def test_demo_that_found_what_it_planted(make: Any) -> None:
    """No difference, no complaint."""
    assert differences(planted(make)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("int8 warns", "int8 is warn, planted: pass"),
        ("fault passes", "int8-fault is pass, planted: regression"),
        ("bf16 failed", "bf16 is failed (no memory), planted: pass"),
        ("int4 absent", "int4-g64 is not measured, planted: warn"),
        ("other culprit", "int8-fault's culprit is layers.13.mlp, planted"),
        ("no culprit", "int8-fault's culprit is None, planted"),
        ("no alert", "names nothing, planted: layers.14 of int8-fault"),
        ("second layer", "names layers.14 of int8-fault, layers.3 of int8-fault"),
        ("another candidate", "names layers.14 of bf16, layers.14 of int8-fault"),
    ],
)
def test_demo_says_what_differs(make: Any, change: str, said: str) -> None:
    """Each way to miss the fault, or to cry wolf, fails the demo with a sentence."""
    run = planted(make)
    bf16, int8, int4, fault = run.candidates
    other = Culprit(Scope("layers.13.mlp"), 0.04, None, "wrong")
    wrong_alerts = {
        "no alert": (),
        "second layer": (*run.alerts, make.alert(scope=Scope("layers.3"))),
        "another candidate": (*run.alerts, make.alert("bf16", scope=Scope("layers.14"))),
    }
    candidates = {
        "int8 warns": (bf16, replace(int8, verdict=Verdict.WARN), int4, fault),
        "fault passes": (bf16, int8, int4, replace(fault, verdict=Verdict.PASS)),
        "bf16 failed": (replace(bf16, verdict=None, failure="no memory"), int8, int4, fault),
        "int4 absent": (bf16, int8, fault),
        "other culprit": (bf16, int8, int4, replace(fault, culprit=other)),
        "no culprit": (bf16, int8, int4, replace(fault, culprit=None)),
    }.get(change, run.candidates)
    wrong = replace(run, candidates=candidates, alerts=wrong_alerts.get(change, run.alerts))
    (line,) = differences(wrong)
    assert said in line


@pytest.mark.parametrize("found", [True, False], ids=["found", "missed"])
def test_demo_exit_code(run: Run, fake: Any, make: Any, found: bool) -> None:
    """CI runs the demo: 0 only when the fault was found, though the run itself is a regression."""
    good = planted(make)
    fake.candidates = good.candidates
    fake.changes = {"alerts": good.alerts if found else ()}
    outcome = run("demo", "--no-dashboard")
    assert outcome.code == (0 if found else 1)
    last = outcome.err.splitlines()[-1]
    assert last == ("demo: found what was planted" if found else "demo: not what was planted")
    assert "int8-fault" in outcome.out
    assert fake.requests[0].check.suite.name == "core-v1:demo"
    assert run("runs", "show", "demo").code == 0


# dashboard


def test_dashboard_starts_streamlit_on_the_chosen_database(
    run: Run, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """Catches pages of another database, and a server that outlives the command that started it."""
    calls: list[Any] = []

    def start(path: str, command: list[str], env: dict[str, str]) -> Any:
        calls.append((command, env))
        raise SystemExit(0)  # execve never returns

    monkeypatch.setattr(os, "execve", start)
    url = f"sqlite:///{place}/mine.db"
    outcome = run("--database", url, "dashboard", "--port", "18999")
    ((command, env),) = calls
    assert outcome.code == 0
    assert command[:4] == [sys.executable, "-m", "quantwatch_dashboard.server", "run"]
    assert env["QUANTWATCH_DATABASE_URL"] == url
    assert "dashboard: http://localhost:18999" in outcome.err


def test_dashboard_reads_the_chosen_configuration(
    run: Run, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """Catches roles and checks of another file than the one that was named, or of none."""
    known: list[str] = []

    def start(path: str, command: list[str], env: dict[str, str]) -> Any:
        known.append(env["QUANTWATCH_CONFIG"])
        raise SystemExit(0)  # execve never returns

    monkeypatch.setattr(os, "execve", start)
    (place / "mine.toml").write_text("schema_version = 1\n")
    url = f"sqlite:///{place}/mine.db"
    for words in (("--config", "mine.toml"), ("--config", str(place / "mine.toml"))):
        assert run(*words, "--database", url, "dashboard", "--port", "18999").code == 0
    assert known == [str(place / "mine.toml")] * 2


@pytest.mark.parametrize("words", [("dashboard",), ("demo",)], ids=" ".join)
def test_taken_port_is_said_first(run: Run, fake: Any, words: tuple[str, ...]) -> None:
    """A demo that measures for minutes and then can't show anything is a bad demo."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = run(*words, "--port", port)
    assert (outcome.code, fake.requests) == (2, [])
    assert "choose another with --port" in outcome.err


# progress


class Clock:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_lines() -> None:
    """A log gets a line when a stage starts, every five seconds, and when it ends; never per batch."""
    clock, lines = Clock(), list[str]()
    progress = Lines(lines.append, clock)
    progress.start("load", 0)
    clock.now = 2.0
    progress.start("measure", 1000)
    clock.now = 7.0
    progress.advance(0)  # workers are still loading: no speed, and no time that is left
    progress.start("measure", 1000)
    for _ in range(10):
        clock.now += 1.0
        progress.advance(100)
    progress.finish()
    progress.finish()
    assert lines == [
        "load …",
        "load: done in 2.0 s",
        "measure: 1000 tokens",
        "measure: 0 of 1000 tokens",
        "measure: done in 5.0 s",
        "measure: 1000 tokens",
        "measure: 500 of 1000 tokens, 100 tokens/s, 5 s left",
        "measure: 1000 of 1000 tokens, 100 tokens/s, 0 s left",
        "measure: done in 10.0 s",
    ]


def test_progress_bars_on_a_terminal() -> None:
    """In a terminal each stage has a bar with tokens/s; the last one ends full."""
    from rich.console import Console

    from quantwatch.cli.progress import Bars, _bars

    console = Console(force_terminal=True, width=120, no_color=True)
    with console.capture() as captured, _bars(console) as bars:
        progress = Bars(bars)
        progress.start("load", 0)
        progress.start("measure", 1000)
        progress.advance(400)
        progress.advance(600)
        bars.refresh()
    text = captured.get()
    assert "measure" in text
    assert "100%" in text
    assert "tokens/s" in text
