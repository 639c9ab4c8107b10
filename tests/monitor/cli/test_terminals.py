"""Whatever the terminal does, the exit code is the command's own: 1 always means a regression."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantwatch import pipeline
from quantwatch.cli.signals import stoppable

Run = Callable[..., Any]
STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Once stopped, a process ignores signals to its end; this one lives on."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in STOPPING}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)


@pytest.mark.parametrize(
    ("words", "redirection", "code", "said"),
    [
        ("--help", ">/dev/full", 3, "No space left"),
        ("--help", ">&-", 0, ""),
        ("check list", ">/dev/full", 3, "can't write to stdout: No space left"),
        ("check list --json", ">/dev/full", 3, "can't write to stdout: No space left"),
        ("check list", ">&-", 0, ""),
        ("check list", ">&- 2>&-", 0, ""),
        ("check nothing", ">/dev/full", 2, "No such command"),
        ("check nothing --json", ">&-", 2, "No such command"),
        ("check validate --zork", "2>&-", 2, ""),
        ("check validate --zork", "2>/dev/full", 2, ""),
        ("check validate --zork --json", ">/dev/full 2>&-", 2, ""),
    ],
)
def test_a_stream_that_can_not_be_written_to(
    place: Path, words: str, redirection: str, code: int, said: str
) -> None:
    """Catches exit code 1 (a regression, for CI) or 120, and tracebacks, for a full or closed one."""
    script = f"exec {sys.executable} -m quantwatch.cli {words} {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == (1 if said else 0)


@pytest.mark.parametrize(
    "words", [("runs", "show", "a\udcff"), ("compare", "\udcff", "b", "--text", "text.txt"), ("\udcff",)],
    ids=["run", "model", "command"],
)  # fmt: skip
def test_words_in_another_encoding_are_refused_at_the_door(
    run: Run, fake: Any, words: tuple[str, ...]
) -> None:
    """Catches an encoding error from whichever library meets the word first."""
    outcome = run(*words)
    assert outcome.code == 2
    assert outcome.err.startswith("error: not UTF-8 text: '")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("name", STOPPING)
def test_every_stop_signal_is_a_clean_interruption(
    run: Run, fake: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches a cancelled CI job that leaves its run unfinished: SIGTERM used to kill at once."""

    number = getattr(signal, name)

    def stopped(request: Any, **_: Any) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(pipeline, "run_check", stopped)
    # A parent that ignores a signal (nohup, some CI runners) passes that on.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        outcome = run("check", "run", "nightly")
    finally:
        signal.signal(number, before)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "interrupted"


def test_a_second_interrupt_does_not_tear_the_cleaning_up() -> None:
    """Catches a run that stays "running" for ever because Ctrl-C was pressed twice."""
    cleaned = []

    def run_and_clean() -> None:
        with stoppable():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_and_clean()
    assert cleaned == [True]


def test_handlers_are_given_back_and_ignored_signals_stay_ignored() -> None:
    """Catches nohup undone, and a library user whose Ctrl-C no longer works."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGINT)
    with stoppable():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_letters_that_the_terminal_lacks_are_escaped(place: Path) -> None:
    """Catches UnicodeEncodeError in a C locale."""
    config = place / "quantwatch.toml"
    config.write_text(config.read_text().replace("a check", "Prüfung ☃"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "quantwatch.cli", "check", "list"],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0
    assert b"Pr\\xfcfung \\u2603" in done.stdout


def test_output_into_a_pipe_or_device_leaves_it_there(run: Run, fake: Any, place: Path) -> None:
    """Catches `--output /dev/null` that replaces the device by a file, as root."""
    pipe = place / "report.md"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run("check", "run", "nightly", "--output", str(pipe)).code == 0
        assert os.read(reader, 10_000).startswith(b"#")
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    finally:
        os.close(reader)


@pytest.mark.parametrize("name", ["folder.md", "file.txt/report.md", "dangling.md"])
def test_an_output_that_can_not_be_written_costs_no_run(
    run: Run, fake: Any, place: Path, name: str
) -> None:
    """Catches a typing error that is found after an hour of measuring."""
    (place / "folder.md").mkdir()
    (place / "file.txt").write_text("")
    (place / "dangling.md").symlink_to(place / "nowhere" / "report.md")
    outcome = run("check", "run", "nightly", "--output", name)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert name in outcome.err
    assert fake.requests == []
