"""compare and check run: what reaches the pipeline, what is printed where, and every exit code."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from tests.monitor.tiny_models import save_word_model

from quantwatch.cli.compare import candidate_name
from quantwatch.domain import RunStatus, Verdict
from quantwatch.errors import (
    BaselineMismatchError,
    CaptureError,
    ConfigError,
    IncompatibleError,
    ModelError,
    PromptError,
    ResourceError,
    StoreError,
)
from quantwatch.pipeline import Estimate

Run = Callable[..., Any]
COMPARE = ("compare", "smollm2-135m", "models/cand", "--text", "text.txt")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("pass", 0), ("warn", 0), ("improvement", 0), ("regression", 1), ("inconclusive", 4)],
)
def test_exit_code_of_a_verdict(run: Run, fake: Any, make: Any, verdict: str, code: int) -> None:
    """CI reads nothing but the exit code: each verdict has its own."""
    fake.candidates = (make.candidate(verdict=Verdict(verdict)),)
    assert run("check", "run", "nightly").code == code
    assert run(*COMPARE).code == code


def test_exit_code_with_a_failed_candidate(run: Run, fake: Any, make: Any) -> None:
    """A candidate that was not measured is the monitor's trouble, unless another regresses."""
    failed = make.candidate("f", verdict=None, variant=None, measurements=(), failure="corrupt")
    fake.candidates = (make.candidate(), failed)
    assert run("check", "run", "nightly").code == 3
    fake.candidates = (make.faulty(), failed)
    assert run("check", "run", "nightly").code == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad key"), 2, "error: bad key"),
        (ModelError("corrupt file"), 2, "error: corrupt file"),
        (PromptError("empty"), 2, "error: empty"),
        (IncompatibleError("ids 5 and 6"), 2, "error: ids 5 and 6"),
        (ModelError("no file 'a\nb\0\udcff'"), 2, "error: no file 'a\\nb\\x00\\udcff'"),
        (BaselineMismatchError("suite hash"), 4, "error: suite hash"),
        (CaptureError("a tap fired twice"), 3, "error: a tap fired twice"),
        (StoreError("locked"), 3, "error: locked"),
        (ResourceError("no memory"), 3, "error: no memory"),
        (MemoryError(), 3, "error: out of memory: the run needs more than is free"),
        (OSError(errno.ENOSPC, "No space left"), 3, "error: disk full: [Errno 28] No space left"),
        (OSError(errno.EFBIG, "Too large"), 3, "error: disk full: [Errno 27] Too large"),
        (
            RuntimeError("two\nlines"),
            3,
            "error: internal: RuntimeError: two lines (run with --debug for the traceback)",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_are_one_line(run: Run, fake: Any, error: Exception, code: int, line: str) -> None:
    """A traceback of 200 lines for a misspelt path: never. Each class has its exit code."""
    fake.error = error
    outcome = run("check", "run", "nightly")
    assert outcome.code == code
    assert outcome.err.splitlines()[-1] == line
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_debug_shows_the_traceback(run: Run, fake: Any) -> None:
    """With --debug the place of our bug is shown, and the line still comes last."""
    fake.error = RuntimeError("boom")
    outcome = run("--debug", "check", "run", "nightly")
    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: internal: RuntimeError: boom")


@pytest.mark.parametrize("words", [("check", "run", "nightly"), COMPARE], ids=["check", "compare"])
def test_json_is_one_document_on_stdout(run: Run, fake: Any, words: tuple[str, ...]) -> None:
    """Estimate and progress on stdout would make the document unreadable."""
    outcome = run(*words, "--json")
    data = json.loads(outcome.out)
    assert data["status"] == "succeeded"
    assert "estimate:" in outcome.err
    assert "measure:" in outcome.err


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (StoreError("locked"), "failed", "locked"),
        (KeyboardInterrupt(), "cancelled", "interrupted"),
    ],
    ids=["failed", "interrupted"],
)
def test_json_of_an_error_is_a_document_too(
    run: Run, fake: Any, error: BaseException, status: str, reason: str
) -> None:
    """A script that parses stdout must not crash on top of our failure."""
    fake.error = error
    data = json.loads(run("check", "run", "nightly", "--json").out)
    assert (data["status"], data["verdict"], data["reason"]) == (status, None, reason)


def test_usage_error_with_json(run: Run) -> None:
    """Even a missing option answers with a document when --json is there."""
    outcome = run("compare", "a", "b", "--json")
    assert outcome.code == 2
    assert "Missing option '--text'" in json.loads(outcome.out)["reason"]


def test_the_table_is_the_default(run: Run, fake: Any, make: Any) -> None:
    """People get a table on stdout, progress on stderr."""
    fake.candidates = (make.faulty(),)
    outcome = run("check", "run", "nightly")
    assert "layers.2.mlp.down_proj" in outcome.out
    assert "estimate: 1.0 GB of memory (8.0 GB free), 3,900 tokens, about 2 min" in outcome.err
    assert "measure: done in" in outcome.err


def test_what_else_the_estimate_knows(run: Run, fake: Any) -> None:
    """Catches gigabytes of disk that nobody was told of, and memory that looks like all of it."""
    fake.expected = replace(fake.expected, recorded_bytes=1_700_000_000, more_caches=True)
    outcome = run("check", "run", "nightly")
    assert "estimate: 1.0 GB of memory and KV caches (8.0 GB free), 3,900 tokens" in outcome.err
    assert "; 1.7 GB of disk for the reference, or less time where it is recorded" in outcome.err


def test_too_little_memory_is_refused_before_loading(run: Run, fake: Any) -> None:
    """Being killed by the kernel after ten minutes is worse than a line now; --yes overrides."""
    fake.expected = Estimate(9_000_000_000, 8_000_000_000, None, None)
    outcome = run("check", "run", "nightly")
    assert outcome.code == 3
    assert "error: the run needs 9.0 GB of memory (8.0 GB free)" in outcome.err
    assert fake.requests == []
    assert run("check", "run", "nightly", "--yes").code == 0


def test_compare_builds_the_check(run: Run, fake: Any, place: Path) -> None:
    """Options that never reach the pipeline are the quietest bug of a command line."""
    outcome = run(
        *COMPARE, "--recipe", "int4-g64", "--window", "256", "--limit", "3", "--score-start", "128",
        "--dtype", "bfloat16", "--candidate-dtype", "float16", "--execution", "aten",
        "--threads", "1", "--allow-beyond-context", "--no-store",
    )  # fmt: skip
    assert outcome.code == 0
    (request,) = fake.requests
    check, (candidate,) = request.check, request.check.candidates
    assert (request.name, request.base_dir, fake.databases) == ("compare", place, [None])
    assert (check.reference.model, check.reference.dtype) == ("smollm2-135m", "bfloat16")
    assert check.reference.recipe is None
    assert (candidate.model, candidate.dtype) == ("models/cand", "float16")
    assert (candidate.name, candidate.execution) == ("cand-int4-g64", "aten")
    assert candidate.recipe == "int4-g64"
    assert check.suite.model_dump(exclude_none=True) == {
        "files": ("text.txt",), "window": 256, "limit": 3, "score_start": 128,
    }  # fmt: skip
    assert (check.threads, check.allow_beyond_context) == (1, True)


def test_compare_takes_the_reference_dtype_for_both(run: Run, fake: Any) -> None:
    """Comparing bfloat16 against a float32 candidate by accident measures the wrong thing."""
    run(*COMPARE, "--dtype", "bfloat16")
    check = fake.requests[0].check
    assert check.candidates[0].dtype == check.reference.dtype == "bfloat16"


def test_compare_needs_no_configuration(run: Run, fake: Any, place: Path) -> None:
    """The first command of a new user works in an empty folder and creates its database."""
    (place / "quantwatch.toml").unlink()
    outcome = run(*COMPARE)
    assert outcome.code == 0
    assert "note: created the database sqlite:///" in outcome.err
    assert run("runs", "show", "latest").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--window", "1"), "'--window': Input should be greater than or equal to 2"),
        (("--limit", "0"), "'--limit': Input should be greater than or equal to 1"),
        (("--recipe", "int3"), "int3"),
        (("--execution", "aten"), "needs a recipe"),
        (("--threads", "1025"), "threads: 1025 is not allowed; allowed: at most 1024"),
        (("--threads", "9" * 30), "allowed: at most 1024"),
        (("--dtype", "int8"), "'int8' is not one of"),
        (("--score-start", "512"), "score_start = 512 leaves nothing of a window of 512"),
        (("--format", "md", "--json"), "--json and --format md both want stdout"),
        (("--output", "report.pdf"), "can't tell the format"),
        (("--output", "nowhere/report.md"), "there is no folder"),
        (("--text", "nowhere.txt"), "'nowhere.txt' does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_options_of_compare(run: Run, fake: Any, words: tuple[str, ...], said: str) -> None:
    """What the user typed wrongly is exit 2, in one line, before anything is loaded."""
    outcome = run(*COMPARE, *words)
    assert outcome.code == 2
    assert said in outcome.err
    assert outcome.err.startswith("error: ")
    assert fake.requests == []


@pytest.mark.parametrize(
    ("model", "recipe", "name"),
    [
        ("models/Smol.Q4_1.gguf", None, "Smol.Q4_1"),
        ("owner/model", "int8-channel", "model-int8-channel"),
        ("a b/ü!", None, "candidate"),
        ("models/reference", None, "candidate"),
        ("x" * 90, None, "x" * 64),
    ],
    ids=["gguf", "recipe", "odd letters", "the floor's name", "long"],
)
def test_candidate_names(model: str, recipe: str | None, name: str) -> None:
    """A name that the schema refuses would fail a run for a folder's spelling."""
    assert candidate_name(model, recipe) == name


def test_check_run_limits_the_suite(run: Run, fake: Any) -> None:
    """--limit is a quick look; the rest of the suite stays as configured."""
    assert run("check", "run", "nightly", "--limit", "2").code == 0
    suite = fake.requests[0].check.suite
    assert (suite.name, suite.limit) == ("core-v1:demo", 2)


def test_unknown_check_names_those_that_exist(run: Run, fake: Any) -> None:
    """A misspelt name is exit 2 and shows what could have been meant."""
    outcome = run("check", "run", "nigthly")
    assert outcome.code == 2
    assert "'nigthly'" in outcome.err
    assert outcome.err.rstrip().endswith("did you mean nightly? it has: nightly")


def test_no_configuration(run: Run, place: Path) -> None:
    """`check` without a quantwatch.toml says where it looked."""
    (place / "quantwatch.toml").unlink()
    outcome = run("check", "list")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: no quantwatch.toml in {place} or above")


def test_reports_are_written_beside_the_result(run: Run, fake: Any, place: Path) -> None:
    """One run gives CI everything: JSON on stdout, JUnit, Markdown and HTML as files."""
    files = ("--output", "r.md", "--output", "r.xml", "--output", "r.html")
    outcome = run("check", "run", "nightly", "--json", *files)
    assert json.loads(outcome.out)["verdict"] == "pass"
    assert (place / "r.md").read_text().startswith("# PASS – nightly")
    assert Xml.parse(place / "r.xml").getroot().tag == "testsuites"
    assert (place / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert not list(place.glob(".r.*"))


def test_format_goes_to_stdout(run: Run, fake: Any) -> None:
    """--format without --output prints the report instead of the table."""
    assert run("check", "run", "nightly", "--format", "md").out.startswith("# PASS – nightly")


def test_baseline_file_needs_no_database(run: Run, fake: Any, place: Path) -> None:
    """A CI runner has no database: none is opened, none is created."""
    run("check", "run", "nightly")
    assert run("baseline", "export", "latest", "base.json").code == 0
    (database,) = place.rglob("*.db")
    database.unlink()
    outcome = run("check", "run", "nightly", "--baseline", "base.json")
    assert outcome.code == 0
    assert fake.databases[-1] is None
    assert fake.requests[-1].baseline.check == "nightly"
    assert "note: not stored" in outcome.err
    assert not list(place.rglob("*.db"))


@pytest.mark.parametrize("content", [None, "", "{}", "[1"], ids=["absent", "empty", "{}", "cut"])
def test_bad_baseline_file(run: Run, fake: Any, place: Path, content: str | None) -> None:
    """A wrong baseline is found before the models are loaded."""
    if content is not None:
        (place / "base.json").write_text(content)
    outcome = run("check", "run", "nightly", "--baseline", "base.json")
    assert (outcome.code, fake.requests) == (2, [])
    assert "base.json" in outcome.err


def test_incompatible_baseline_is_said(run: Run, fake: Any, make: Any) -> None:
    """An inconclusive run must say which digests keep it from being compared."""
    fake.candidates = (make.candidate(verdict=Verdict.INCONCLUSIVE),)
    fake.changes = {"baseline_mismatch": ("suite hash aaa, baseline bbb: other prompts",)}
    outcome = run("check", "run", "nightly")
    assert outcome.code == 4
    assert "not comparable (suite hash aaa, baseline bbb: other prompts)" in outcome.out


def test_failed_status_never_looks_like_a_verdict(run: Run, fake: Any) -> None:
    """A run that failed inside the pipeline exits 3 and prints no verdict."""
    fake.candidates = ()
    fake.changes = {"status": RunStatus.FAILED, "verdict": None, "reason": "disk full"}
    outcome = run("check", "run", "nightly", "--json", "--no-store")
    assert outcome.code == 3
    assert json.loads(outcome.out)["verdict"] is None


MISTYPED = {
    "reference": (("reff", "ref", "--text", "text.txt"), "did you mean 'ref'?"),
    "candidate": (("ref", "reff", "--text", "text.txt"), "did you mean 'ref'?"),
    "text": (("ref", "hub-model", "--text", "empty.txt"), "empty.txt is empty"),
    "recipe": (("ref", "hub-model", "--text", "text.txt", "--recipe", "r.toml"), "r.toml"),
}


@pytest.mark.parametrize(("words", "said"), MISTYPED.values(), ids=MISTYPED.keys())
def test_a_typo_in_compare_is_no_failed_run(
    run: Run,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    """The word typed here was wrong: the overview must not call the monitor in trouble."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save_word_model(place / "ref", 8)
    (place / "empty.txt").touch()
    outcome = run("compare", *words)
    assert outcome.code == 2
    assert said in outcome.err
    assert not list(place.rglob("*.db"))


@pytest.mark.parametrize(("seconds", "said"), [(0.2, ", a few seconds"), (30.0, ", about 30 s")])
def test_an_estimate_is_no_more_exact_than_it_can_be(
    run: Run, fake: Any, seconds: float, said: str
) -> None:
    """Catches "about 0 s" for what takes ten: loading is not in it."""
    fake.expected = Estimate(1_000_000_000, 8_000_000_000, 100, seconds)
    assert run("check", "run", "nightly").err.splitlines()[0].endswith(said)
