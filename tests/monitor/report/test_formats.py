"""Markdown, HTML, JUnit and the terminal table: structure, size, escaping, the words that matter."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from rich.console import Console

from quantwatch.domain import Culprit, RunResult, RunStatus, Scope, Severity, Verdict
from quantwatch.report import html, junit, markdown, table
from quantwatch.report.repeat import repeat_command

NASTY = "a<b>&\"'|`*_\n# c\x00\x1b[31m\ud800"


def printed(result: RunResult) -> str:
    console = Console(width=160, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(table.renderable(result))
    return captured.get()


def big_run(make: Any, num_layers: int = 128, num_candidates: int = 14) -> RunResult:
    """A model of 128 layers, 14 candidates, an alert for every layer of each."""
    names = [f"candidate-{index}" for index in range(num_candidates)]
    rows = make.rows(num_layers=num_layers, hot=5)
    culprit = Culprit(Scope("layers.5"), 0.1, None, "word " * 300)
    candidates = [
        make.candidate(n, measurements=rows, verdict=Verdict.REGRESSION, culprit=culprit)
        for n in names
    ]
    alerts = tuple(
        make.alert(name, scope=Scope(f"layers.{index}"))
        for name in names
        for index in range(num_layers)
    )
    result: RunResult = make.run(*candidates, alerts=alerts)
    return result


class Elements(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is closed but not open."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    elements.close()
    assert elements.open == []
    return elements


# Notes

NOTES = (
    "warning: calibrated on 3 prompts",
    "prompts in chunks: isolated errors of the first chunk",
    NASTY,
    "word " * 200,
    *(f"note {n}" for n in range(4)),
)


@pytest.fixture
def noted(make: Any) -> RunResult:
    run: RunResult = make.run(make.candidate(NASTY, variant=make.variant(notes=NOTES)))
    return run


@pytest.mark.parametrize("show", [printed, markdown.render, html.render, junit.render])
def test_notes_of_a_candidate(noted: RunResult, make: Any, show: Any) -> None:
    """Catches what a candidate was measured without, known to the JSON and the run page only."""
    text = " ".join(show(noted).replace("<br>", " ").split())
    assert text.count("prompts in chunks: isolated errors of the first chunk") == 1
    assert text.count("calibrated on 3 prompts") >= 1
    assert text.count("word ") == 60
    assert "note 1" in text
    assert "note 2" not in text
    assert "… and 2 more notes in the JSON" in text
    assert not re.search(r"[Nn]otes?(:| of)", show(make.run(make.candidate("quiet"))))


def test_notes_are_no_markup(noted: RunResult, make: Any) -> None:
    """Catches a note that ends a table, a heading or an element."""
    text = markdown.render(noted)
    assert "\n# c" not in text
    assert "<b>" not in re.sub("`` .* ``", "", text)
    quiet = replace(noted, candidates=(replace(noted.candidates[0], variant=make.variant()),))
    tags = [parsed(html.render(run).replace("<br>", "")).tags for run in (noted, quiet)]
    assert tags[0] == tags[1]
    properties = Xml.fromstring(junit.render(noted)).iter("property")
    (value,) = [p.get("value") for p in properties if str(p.get("name")).startswith("notes of")]
    assert "a<b>&" in str(value)
    assert "\x1b" not in printed(noted)


# Markdown


def test_markdown_begins_with_the_verdict(fault_run: RunResult) -> None:
    """Who reads only the first line of a comment must see the verdict."""
    lines = markdown.render(fault_run).splitlines()
    assert lines[0] == "# REGRESSION – nightly"
    assert lines[2] == "int8-fault: a critical rule is breached."


def test_markdown_says_what_matters(fault_run: RunResult) -> None:
    """Culprit, both models, tokens, numbers with error, value and limit, and how to repeat it."""
    text = markdown.render(fault_run)
    for words in (
        "layers.2.mlp.down\\_proj",
        "models/reference",
        "3,900 tokens in 16 prompts",
        "0.01 ± 0.001",
        "baseline: none",
        "= 0.048, limit 0.012, 95 % interval",
        "quantwatch check run nightly",
    ):
        assert words in text
    assert "| layers.2 | 0.048 | 0.02 | 0.01 |" in text


def test_markdown_stays_below_60_lines(make: Any) -> None:
    """A comment of thousands of lines is refused by the host and read by nobody."""
    text = markdown.render(big_run(make))
    assert len(text.splitlines()) < 60
    assert "… and 4 more candidates" in text
    assert "; 127 more scopes" in text
    assert "… and 6 more breached rules" in text


def test_markdown_escapes_names(make: Any) -> None:
    """A pipe in a name breaks the table, a newline forges a heading, < injects HTML."""
    run = make.run(make.candidate(NASTY), suite_name=NASTY, check=NASTY)
    text = markdown.render(run)
    assert "\n# c" not in text
    assert "<b>" not in re.sub("`` .* ``", "", text)
    row = next(line for line in text.splitlines() if line.startswith("| a"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 8


# HTML


def test_html_first_screen(fault_run: RunResult) -> None:
    """Verdict, culprit, both models and the token count come before any drawing of layers."""
    page = html.render(fault_run)
    first = parsed(page.split("<h2>")[0] + "</body></html>").text
    for words in ("REGRESSION", "layers.2.mlp.down_proj", "models/reference", "3,900 tokens"):
        assert words in first
    assert "models/int8-fault" in first


def test_html_is_self_contained(make: Any, fault_run: RunResult) -> None:
    """A report that is opened offline or from an e-mail must not fetch anything."""
    for run in (fault_run, big_run(make)):
        page = html.render(run)
        elements = parsed(page)
        assert not {"script", "link", "img", "iframe", "object", "embed"} & set(elements.tags)
        assert not {"src", "href", "onclick", "style"} & {name for name, _ in elements.attributes}
        assert not re.search(r"https?:|url\(|@import|//[a-z]", page)


def test_html_is_small_whatever_the_model(make: Any) -> None:
    """Below 500 kB with 128 layers, 14 candidates and an alert on every layer of each."""
    page = html.render(big_run(make))
    assert len(page.encode()) < 500_000
    assert "more alerts" in page
    assert "more candidates without drawings" in page


def test_html_draws_a_bar_per_layer_and_marks_the_culprit(fault_run: RunResult) -> None:
    """Two charts of four layers for two candidates; one marked bar in each chart of the fault."""
    page = html.render(fault_run)
    bars = re.findall(r"<rect[^>]*><title>layers\.\d", page)
    assert len(bars) == 2 * 2 * 4
    assert len(re.findall(r'<rect class="hot"[^>]*><title>layers\.2: ', page)) == 2


def test_html_escapes_everything(make: Any) -> None:
    """A candidate named like a script element must stay text."""
    culprit = Culprit(None, None, None, "<script>alert(1)</script>")
    run = make.run(
        make.candidate(NASTY, culprit=culprit),
        make.candidate("f", verdict=None, measurements=(), variant=None, failure="<img src=x>"),
        alerts=(make.alert(NASTY, rule="<i>"),), suite_name=NASTY, check=NASTY,
    )  # fmt: skip
    elements = parsed(html.render(run))
    assert not {"script", "img", "b", "i"} - {"b"} & set(elements.tags)
    assert "<script>alert(1)</script>" in elements.text


def test_html_of_nan_shows_nan_and_a_full_bar(make: Any) -> None:
    """A layer of NaN must stand out, not disappear from the chart."""
    page = html.render(make.run(make.nan()))
    assert re.search(r'<rect class="bad"[^>]*><title>layers\.3: NaN', page)


# JUnit


def suite_of(result: RunResult) -> Xml.Element:
    suite = Xml.fromstring(junit.render(result).encode()).find("testsuite")
    assert suite is not None
    return suite


def test_junit_failure_has_value_limit_and_interval(fault_run: RunResult) -> None:
    """A failure without its number sends the reader away from the CI page."""
    suite = suite_of(fault_run)
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors")}
    assert counts == {"tests": "2", "failures": "1", "errors": "0"}
    failure = suite.find("testcase/failure")
    assert failure is not None
    # 0.048 ± 1.96 · 0.0048
    said = "isolated_error.mean at layers.2 = 0.048, limit 0.012, 95 % interval 0.03859 … 0.05741"
    assert failure.get("message") == f"layers.2 stands out; {said}"
    assert "layers.2.mlp.down_proj" in (failure.text or "")


def test_junit_interval_of_a_perplexity_ratio_is_of_the_ratio(make: Any) -> None:
    """The error of the ratio is that of the log difference, put through exp."""
    alert = make.alert("int8", rule="ppl", metric="ppl_ratio", scope=Scope("model"), value=1.05)
    failure = suite_of(make.run(make.candidate(), alerts=(alert,))).find("testcase/failure")
    assert failure is not None
    assert "95 % interval 1.04 … 1.06" in (failure.get("message") or "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"statistic": "p99"}, "no interval for p99"),
        ({"scope": Scope("layers.99")}, "no interval: fewer than two prompts"),
        ({"value": None, "value_kind": "nan"}, "= NaN, limit 0.012, no interval"),
    ],
    ids=["quantile", "one prompt", "nan"],
)
def test_junit_says_when_there_is_no_interval(make: Any, changes: Any, words: str) -> None:
    """An interval of width 0 would claim certainty."""
    alert = make.alert(**changes)
    failure = suite_of(make.run(make.faulty(), alerts=(alert,))).find("testcase/failure")
    assert failure is not None
    assert words in (failure.get("message") or "")


def test_junit_warning_passes_and_is_heard(make: Any) -> None:
    """`warn` exits with 0: a red test beside a green exit code confuses everybody."""
    alert = make.alert("int8", severity=Severity.WARNING)
    suite = suite_of(make.run(make.candidate(verdict=Verdict.WARN), alerts=(alert,)))
    assert suite.get("failures") == "0"
    out = suite.findtext("testcase/system-out") or ""
    assert "isolated_error.mean at layers.2 = 0.048" in out


@pytest.mark.parametrize("why", ["failed candidate", "failed run", "inconclusive"])
def test_junit_errors(make: Any, why: str) -> None:
    """What was not measured is an error: neither passed nor failed."""
    failed = make.candidate("f", verdict=None, variant=None, measurements=(), failure="corrupt")
    runs = {
        "failed candidate": make.run(failed),
        "failed run": make.run(status=RunStatus.FAILED, reason="disk full"),
        "inconclusive": make.run(make.candidate(verdict=Verdict.INCONCLUSIVE)),
    }
    suite = suite_of(runs[why])
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


def test_junit_of_an_alert_that_could_not_decide(make: Any) -> None:
    """A critical rule without a measurement is inconclusive: no regression was seen."""
    alert = make.alert("int8", value=None, value_kind="missing", words="was not measured")
    run = make.run(make.candidate(verdict=Verdict.INCONCLUSIVE), alerts=(alert,))
    suite = suite_of(run)
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


def test_junit_strips_what_xml_forbids(make: Any) -> None:
    """A control character or surrogate in a message makes the whole file unreadable."""
    failed = make.candidate(NASTY, verdict=None, variant=None, measurements=(), failure=NASTY)
    suite = suite_of(make.run(failed, check=NASTY, alerts=(make.alert(NASTY, rule=NASTY),)))
    error = suite.find("testcase/error")
    assert error is not None
    assert "\x1b" not in (error.get("message") or "")
    assert "a<b>&" in (error.get("message") or "")


# Terminal


def test_table_shows_candidates_alerts_and_headline(fault_run: RunResult) -> None:
    """One row per candidate with figures, then why, then alerts, then the verdict last on screen."""
    text = printed(fault_run)
    assert re.search(
        r"int8-fault +regression +0\.01 ± 0\.001 +0\.01 +0\.98 +1\.05 +8\.02 +layers", text
    )
    assert "critical int8-fault, rule isolated-error-outlier: layers.2 stands out" in text
    assert text.rstrip().endswith("regression – int8-fault: a critical rule is breached.")


def test_table_explains_equality_and_failure(make: Any) -> None:
    """`bit-equal` is said in words; a failed candidate shows its reason, not zeros."""
    equal = make.candidate("copy", bit_equal=True)
    failed = make.candidate(
        "f", verdict=None, variant=None, measurements=(), failure="no tokenizer"
    )
    text = printed(make.run(equal, failed))
    assert "copy: bit-equal to the reference: every difference is exactly 0" in text
    assert "f: could not be measured: no tokenizer" in text
    assert "Not measured: f." in text


def test_table_shows_each_breached_rule_once(make: Any) -> None:
    """Thirty layers beyond one limit are one line with the worst of them, not thirty lines."""
    alerts = tuple(
        make.alert(scope=Scope(f"layers.{i}"), words=f"is {i}", value=i) for i in range(9)
    )
    text = printed(make.run(make.faulty(), alerts=alerts))
    assert text.count("rule isolated-error-outlier") == 1
    assert "is 8; 8 more scopes" in text


def test_table_does_not_interpret_markup(make: Any) -> None:
    """`[red]` in a name is text for rich, not a colour."""
    text = printed(make.run(make.candidate("[red]x[/red]", culprit=None)))
    assert "[red]x[/red]" in text


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED], ids=str)
def test_every_format_of_a_run_without_result(make: Any, status: RunStatus) -> None:
    """A failed run has no candidates and no verdict; its report must say why and not crash."""
    run = make.run(status=status, verdict=None, reference=None, reason="disk full")
    for text in (markdown.render(run), html.render(run), junit.render(run), printed(run)):
        assert "disk full" in text
        assert status.value in text.lower()


# How to repeat


def test_repeat_command_of_a_comparison_is_quoted(make: Any) -> None:
    """A path with a space must survive the shell."""
    config = {
        "reference": {"model": "my models/a", "dtype": "float32"},
        "candidates": [
            {"model": "b", "dtype": "float32", "recipe": "int4-g64", "execution": "aten"}
        ],
        "suite": {"files": ["t.txt"], "window": 512, "limit": None, "score_start": 0},
    }
    command = repeat_command(make.run(check="compare", config=config))
    assert command == (
        "quantwatch compare 'my models/a' b --text t.txt --window 512 --recipe int4-g64 "
        "--execution aten --dtype float32 --candidate-dtype float32"
    )


def test_repeat_command_says_every_option_of_a_comparison(make: Any) -> None:
    """Catches a command that measures other tokens, in another way, or refuses the text."""
    words = (
        "compare a b --text t.txt --window 64 --limit 3 --score-start 8 --recipe int8-channel "
        "--execution aten --dtype bfloat16 --candidate-dtype float16 --threads 2 "
        "--prefill-chunk 16 --lens-products bfloat16 --allow-beyond-context"
    )
    config = {
        "reference": {"model": "a", "dtype": "bfloat16"},
        "candidates": [
            {"model": "b", "dtype": "float16", "recipe": "int8-channel", "execution": "aten"}
        ],
        "suite": {"files": ["t.txt"], "window": 64, "limit": 3, "score_start": 8},
        "threads": 2,
        "prefill_chunk": 16,
        "lens_products": "bfloat16",
        "allow_beyond_context": True,
    }
    assert repeat_command(make.run(check="compare", config=config)) == f"quantwatch {words}"


def test_no_repeat_command_for_modules_in_memory(make: Any) -> None:
    """quantwatch.compare(module, module, ids) can't be typed: better none than a wrong one."""
    run = replace(make.run(make.candidate()), check="compare", config={})
    assert repeat_command(run) is None
    assert "Repeat" not in markdown.render(run)


def test_what_cannot_be_decided_is_not_called_critical(make: Any) -> None:
    """Catches "critical" beside an inconclusive verdict: it reads like a breach."""
    alert = make.alert("int8", value=None, value_kind="inconclusive", words="can't decide")
    result = make.run(make.candidate(verdict=Verdict.INCONCLUSIVE), alerts=(alert,))
    said = "undecided int8, rule isolated-error-outlier (critical): can't decide"
    assert said in printed(result)
    assert said in markdown.render(result).replace("**", "").replace("\\", "")
    assert 'class="badge critical"' not in html.render(result)


def test_a_failed_candidate_has_no_error_of_its_mean(make: Any) -> None:
    """Catches "– ± –"."""
    failed = make.candidate(verdict=None, failure="no such file", measurements=(), variant=None)
    result = make.run(failed, status=RunStatus.FAILED, verdict=None)
    assert "– ±" not in printed(result)
    assert "– ±" not in markdown.render(result)
