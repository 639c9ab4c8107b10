"""The page Kernels: what it says of operators, and what it never says."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.dashboard.invented_kernels import CASE, EVIL, FAILS, SPEED, batch, fill_kernels
from tests.dashboard.pages import html, open_page

from quantwatch.capture.events import event_words
from quantwatch.domain import WARNING
from quantwatch.store import kernels
from quantwatch.store.kernel_groups import KernelGroup
from quantwatch.store.session import open_database
from quantwatch_dashboard.charts.kernels import share_trend, speed_by_shape
from quantwatch_dashboard.components.kernel_batches import changed
from quantwatch_dashboard.components.kernels import repeat, share_words, used_by
from quantwatch_dashboard.logic import kernel_matrix, kernel_uses
from quantwatch_dashboard.queries import kernels as kernel_queries

GROUP = KernelGroup("int4_linear", "aten", 3, 0, 1, 0.5)


@pytest.fixture
def tested(demo_url: str) -> str:
    """Two checks and three batches of kernels."""
    fill_kernels(demo_url)
    return demo_url


def test_failures_come_with_the_command_that_repeats_them(tested: str) -> None:
    """Catches a failure that nobody can look at again, and markup from a message."""
    shown = html(open_page("kernels"))

    assert "<h1>1 operator fails</h1>" in shown
    assert "--op int4_linear --case int4-g64/triton/16x64x576/bfloat16/contiguous" in shown
    assert "15.0 ×" in shown
    assert "∞ ×" in shown
    assert "3 fallbacks" in shown
    assert "<script>" not in shown
    assert "<b>off" not in shown
    assert "&lt;script&gt;" in shown


def test_each_operator_is_of_the_newest_batch_that_has_it(tested: str) -> None:
    """Catches a batch of one operator that hides all others, or is hidden by an older one."""
    shown = html(open_page("kernels", op="paged_attention", backend="aten"))
    before = html(open_page("kernels", batch="01A"))

    assert "20 % of tolerance" in shown
    assert "20 % of tolerance" not in before
    assert "<h1>1 operator fails</h1>" in before


def test_speeds_and_who_runs_it(tested: str) -> None:
    """Catches a speed without its spread, and an operator said to run where nobody knows."""
    shown = html(open_page("kernels"))

    assert "0.800 … 1.30 by shape" in shown
    assert "2 checks measure with it" in shown
    assert "unknown" in shown


@pytest.mark.parametrize(
    "query",
    [
        {"op": "no_such_operator"},
        {"backend": "nowhere", "op": "int4_linear"},
        {"batch": "01ZZ"},
        {"device": "tpu", "status": "odd"},
        {"status": "not applicable"},
        {"op": "tap_statistics", "status": "failed"},
        {"batch": "01C"},
    ],
    ids=lambda query: " ".join(query.values()),
)
def test_any_address_is_a_page(tested: str, query: dict[str, str]) -> None:
    """Catches a traceback for a link to what is no longer there."""
    assert "<h1>" in html(open_page("kernels", **query))


def test_nothing_matches_is_said(tested: str) -> None:
    """Catches an empty table."""
    shown = html(open_page("kernels", op="tap_statistics", status="failed"))
    assert "Nothing matches" in shown


def test_speeds_alone(empty_url: str) -> None:
    """Catches a page that needs tests to show speeds."""
    database = open_database(empty_url)
    kernels.insert_speeds(database, batch("01C", "bench"), [SPEED])
    database.close()
    shown = html(open_page("kernels"))

    assert "Kernels were only timed" in shown
    assert "95 %: 1.20 … 1.40" in shown


def test_shares_of_the_tolerance() -> None:
    """Catches 100 % where it is not, and a division by zero."""
    found = [kernel_matrix.share(*each) for each in ((None, 1), (1, 2), (0, 0), (1, 0))]
    assert found == [None, 0.5, 0.0, math.inf]
    assert kernel_matrix.share(math.nan, 1.0) == math.inf
    said = [share_words(value) for value in (None, 0, 0.123, 0.9961, 1.0, 15, math.inf)]
    assert said == ["–", "0 %", "12 %", "99.6 %", "100 %", "15.0 ×", "∞ ×"]


def test_trend_has_a_place_for_each_batch() -> None:
    """Catches a line that joins batches between which an operator was not tested."""
    batches = [(batch("3", day=3), [GROUP]), (batch("2", day=2), []), (batch("1", day=1), [GROUP])]
    [cell] = kernel_matrix.matrix(batches, [])

    assert cell.trend == (0.5, None, 0.5)
    assert cell.batch is not None
    assert cell.batch.id == "3"


def test_layouts_of_a_place_are_put_together() -> None:
    """Catches a failing layout that a passing one hides."""
    found = kernel_matrix.places([CASE, replace(FAILS, layout="strided"), replace(CASE, dtype="x")])
    place = found["int4-g64", (16, 64, 576)]["bfloat16"]

    assert (place.num_passed, place.num_failed) == (1, 1)
    assert place.worst_share == pytest.approx(15)
    assert place.message == EVIL


CONFIG: dict[str, Any] = {
    "lens_positions": 0,
    "reference": {"model": "m", "execution": "dequantized"},
    "candidates": [
        {"name": "weights", "recipe": "int4-g64", "execution": "dequantized"},
        {"name": "served", "recipe": "int4-g64", "execution": "aten"},
        {
            "name": "w8a8", "execution": "aten",
            "recipe": {"weights": "int8", "granularity": "channel",
                       "activations": {"format": "int8", "granularity": "token"},
                       "embedding": {"weights": "uint5"},
                       "layers": [{"match": "x", "weights": None}]},
        },
        {"name": "filed", "recipe": "mine.toml", "execution": "reference"},
        {"name": "later", "serve": {"attention": ["paged_attention"]}},
    ],
}  # fmt: skip


def test_each_back_end_that_fails_is_shown(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one back end's failures that leave no place for another one's."""
    many = [replace(FAILS, backend="aten", shape=(i, 64, 64)) for i in range(1, 300)]
    few = [replace(FAILS, backend="triton", shape=(i, 32, 32)) for i in range(1, 4)]
    database = open_database(empty_url)
    kernels.insert_cases(database, batch("01A"), [*many, *few])
    database.close()
    cells = kernel_queries.cells(empty_url, batch("01A").device, None)
    found = Counter(case.backend for case in kernel_queries.failures(empty_url, cells))
    monkeypatch.setattr(kernel_queries, "MOST_CASES", 100)
    shown = html(open_page("kernels"))

    assert found == {"aten": 100, "triton": 3}
    assert "The first 103 of 302 are shown." in shown
    assert "Of the first 100 of 299 cases." in shown


def test_who_asks_for_an_operator() -> None:
    """Catches a kernel said to run for weights that are only dequantized."""
    names = ("int4_linear", "w8a8_linear", "int8_linear", "lowbit_linear", "lens_statistics",
             "tap_statistics", "paged_attention", "hadamard")  # fmt: skip
    found = kernel_uses.uses(names, {"nightly": CONFIG, "empty": {}})

    def who(name: str) -> list[tuple[str, str | None]]:
        return [(use.variant, use.backend) for use in found[name].uses]

    assert who("int4_linear") == [("served", "aten")]
    assert found["int4_linear"].doubtful == ("nightly",)
    assert who("w8a8_linear") == [("w8a8", "aten")]
    assert who("int8_linear") == []
    assert found["int8_linear"].known
    assert who("lowbit_linear") == [("w8a8", "aten")]
    assert (found["lens_statistics"].measures, found["tap_statistics"].measures) == (1, 2)
    checks = {name: {"lens_products": name} for name in ("float32", "bfloat16", "int16")}
    lenses = ("lens_statistics", "lens_bfloat16", "lens_int16")
    measured = kernel_uses.uses(lenses, {**checks, "another": {"lens_products": "int16"}})
    assert [measured[name].measures for name in lenses] == [1, 1, 2]
    assert who("paged_attention") == [("later", None)]
    assert not found["hadamard"].known


def test_what_falls_back_is_said() -> None:
    """Catches a check said to run a kernel that its newest run could not use."""
    note = f"{kernel_uses.FALLBACK}odd widths: L3"
    notes = {("nightly", "served"): ("has no tokenizer", note)}
    [use] = kernel_uses.uses(["int4_linear"], {"nightly": CONFIG}, notes)["int4_linear"].uses
    shown = used_by(kernel_uses.Uses(known=True, uses=(use,)))

    assert use.fallbacks == (note,)
    assert "odd widths: L3" in shown
    assert "tokenizer" not in shown


@dataclass(frozen=True)
class Asked:
    """A call that another back end did, as the registry counts it."""

    op: str = "hadamard"
    wanted: str = "triton"
    used: str = "aten"
    reason: str = "no GPU"


def test_what_a_run_noted_of_an_operator_is_said() -> None:
    """Catches `unknown` beside a run that counted the operator's calls, and others' events."""
    watch = SimpleNamespace(
        slow=Counter(), fallbacks=Counter({Asked(): 3, Asked("int4_linear"): 1})
    )
    events = tuple(f"{WARNING}{words}" for words in event_words(watch, {}))  # type: ignore[arg-type]
    notes = {
        ("nightly", "served"): events,
        ("other", "int8"): events[:1],
        ("quiet", "int8"): ("x",),
    }
    found = kernel_uses.uses(["int4_linear", "hadamard", "topk"], {"nightly": CONFIG}, notes)

    assert [(use.check, use.fallbacks) for use in found["hadamard"].uses] == [
        ("nightly", ("hadamard (aten instead of triton), 3 times: no GPU",)),
        ("other", ("hadamard (aten instead of triton), 3 times: no GPU",)),
    ]
    assert found["hadamard"].known
    assert [(use.backend, len(use.fallbacks)) for use in found["int4_linear"].uses] == [("aten", 1)]
    assert not found["topk"].known
    assert "3 times: no GPU" in used_by(found["hadamard"])


def test_the_note_begins_as_the_loader_writes_it() -> None:
    """Catches words that were changed at one end."""
    from quantwatch.models.recipes import fallback_notes

    class Report:
        fallbacks = (("layers.3", "odd widths"),)

    [note] = fallback_notes(Report())  # type: ignore[arg-type]
    assert note.startswith(kernel_uses.FALLBACK)


def test_what_changed_around_a_batch() -> None:
    """Catches a new library that nobody sees beside the step that it made."""
    before = replace(batch("1"), environment={"libraries": {"torch": "2.11"}, "git_commit": "a"})
    after = replace(before, git_sha="b" * 40, environment={"libraries": {"torch": "<i>"}})

    assert "Nothing changed" in changed(before, before)
    shown = changed(before, after)
    assert "commit: 51a9e00c12 → bbbbbbbbbb" in shown
    assert "&lt;i&gt;" in shown
    assert "git_commit" not in shown


def test_operators_it_knows_of_exist() -> None:
    """Catches an operator that was renamed: the page would say `no check` for ever."""
    from quantwatch_kernels.conformance.cases import all_cases

    known = {*kernel_uses._MEASURING, *kernel_uses._COMPUTED}
    assert known <= {case.op.name for case in all_cases()}


def test_the_command_is_safe_to_paste() -> None:
    """Catches a variant with a space that ends the word."""
    said = repeat(replace(CASE, variant="int4-g64, exact; rm -rf"), "quantwatch", "cuda:0")
    assert "--case 'int4-g64, exact; rm -rf/aten/16x64x576/bfloat16/contiguous'" in said


def test_pictures() -> None:
    """Catches text that Plotly would take for markup, and a figure without its tolerance."""
    figure = share_trend([batch("1").started_at] * 2, [("<b>x</b>", [0.5, None]), ("y", [15, 0])])
    drawn = speed_by_shape([SPEED, replace(SPEED, backend="<i>z</i>", shape=())])

    assert figure.data[0].name == "&lt;b&gt;x&lt;/b&gt;"
    assert figure.layout.yaxis.type == "log"
    assert "&lt;i&gt;z&lt;/i&gt;" in drawn.data[1].name
    assert drawn.layout.yaxis.ticktext == ("16 × 64 × 576", "scalar")
    with pytest.raises(ValueError, match="at least one"):
        share_trend([], [])
    with pytest.raises(ValueError, match="at least one"):
        speed_by_shape([])
