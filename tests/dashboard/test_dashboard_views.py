"""Every page in every state, run by Streamlit's own test runner on a real database."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from tests.dashboard.invented import Candidate, Spec
from tests.dashboard.pages import TIMEOUT_S, fresh_page, html, menu, open_page

from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch_dashboard import launch


@pytest.mark.parametrize("status", [RunStatus.CANCELLED, RunStatus.FAILED], ids=str)
def test_check_without_any_result_is_on_the_overview(
    end_run: Callable[..., None], save_run: Callable[[Spec], RunResult], status: RunStatus
) -> None:
    """Catches a check that is absent, and a headline by which all is well, when it never ran through."""
    end_run(Spec(check="interrupted", run_id="01JX"), status, "stopped by hand")
    alone = html(open_page("overview"))
    save_run(Spec(candidates=(Candidate("bf16", 2e-3),)))
    beside = html(fresh_page("overview"))

    assert "No check has a verdict yet" in alone
    for shown in (alone, beside):
        assert "run?run=01JX" in shown
        assert "never succeeded" in shown
        assert f"ewest run {status.value} " in shown
        assert ": stopped by hand" in shown
        assert "1 with no result lately" in shown
    assert "<h1>No regression</h1>" in beside
    assert ("No result: newest run" in alone) == (status is RunStatus.FAILED)


def test_overview_leads_with_the_regression(demo_url: str) -> None:
    """Catches a verdict without its word, a lost trend, and a failed run that looks like a verdict."""
    shown = html(open_page("overview"))

    assert "1 regression" in shown
    assert "int8-fault: layers.14.mlp.down_proj" in shown
    assert shown.index(">demo<") < shown.index(">chat-int8<")
    assert "No result: newest run failed" in shown
    assert "not enough memory" in shown
    assert shown.count("data:image/svg+xml") == 2
    assert "run?run=01JD0000000000000000000006" in shown


def test_run_page_leads_to_the_fault(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a page that hides whose fault it is: layer, candidate and numbers come first."""
    save_run(Spec())
    page = open_page("run")
    shown = html(page)

    assert shown.index("layers.14.mlp.down_proj") < shown.index("Candidates side by side")
    assert "17 × the median of the same place in the other layers" in shown
    assert "int8-fault" in shown
    assert len(page.get("plotly_chart")) == 5
    assert "isolated-error-outlier" in shown
    assert re.search(r"quantwatch --database \S+ check run demo", shown)
    assert re.findall(r'qw-marked">(layers[^<]+)<', shown) == ["layers.14"]
    assert all(f">layers.{i}<" in shown for i in range(30))
    assert "layers.14.mlp.down_proj = " in shown[: shown.index("Candidates side by side")]
    assert "The prompt goes on with" in shown


def test_address_restores_what_was_shown(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a link in a message that opens something else."""
    run = save_run(Spec())
    wanted = {
        "candidate": "int4-g64", "prompt": "3", "metric": "lens_kl", "tokens": "every", "token": "17",
        "part": "attention", "statistic": "p99", "k": "topk_logit_deviation_k3", "normalised": "1", "fit": "1",
        "sort": "max_kl",
    }  # fmt: skip
    page = open_page("run", run=run.run_id, **wanted)

    boxes = {box.label: box.value for box in page.selectbox}
    assert boxes["Candidate"] == "int4-g64"
    assert boxes["Prompt"] == "3"
    assert boxes["Metric"] == "lens_kl"
    assert page.number_input[0].value == 17
    assert boxes["Part of the layer"] == "attention"
    assert all(toggle.value for toggle in page.toggle)
    assert {key: page.query_params[key] for key in wanted} == wanted


def test_unknown_parameters_show_the_default(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches an exception for an address that was cut or mistyped."""
    save_run(Spec())
    page = open_page(
        "run", candidate="nobody", prompt="x", metric="../../etc", token="-1", part="<b>"
    )

    boxes = {box.label: box.value for box in page.selectbox}
    assert (boxes["Candidate"], boxes["Metric"]) == ("int8-fault", "rel_error")


def test_choosing_changes_the_address(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches a picker whose choice is lost when the page's address is copied."""
    save_run(Spec())
    page = open_page("run")
    page.selectbox(key="pick-candidate").select("bf16").run()

    assert not page.exception
    assert page.query_params["candidate"] == "bf16"


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED], ids=str)
def test_failed_run_is_not_a_regression(end_run: Callable[..., None], status: RunStatus) -> None:
    """Catches a monitor's own failure that is shown as the model's fault."""
    end_run(Spec(), status, "disk full: 12 MB free")
    shown = html(open_page("run", run=Spec().run_id))

    assert f"Run {status.value}" in shown
    assert "disk full: 12 MB free" in shown
    assert "qw-tone-regression" not in shown


def test_nan_run_says_where_it_starts(save_run: Callable[[Spec], RunResult]) -> None:
    """Catches NaN that is drawn as nothing, averaged away, or breaks the page."""
    bad = Candidate("nan", 8e-3, Verdict.REGRESSION, nan_layer=9)
    run = save_run(Spec(candidates=(Candidate("bf16", 2e-3), bad)))
    shown = html(open_page("run", run=run.run_id))

    assert "Not finite from layers.9 on" in shown
    assert "NaN" in shown


def test_alerts_page_filters_by_check(demo_url: str) -> None:
    """Catches alerts of another check, and a check without alerts that shows an empty box."""
    assert "isolated-error-outlier" in html(open_page("alerts", check="demo"))

    quiet = html(open_page("alerts", check="chat-int8"))
    assert "No open alert" in quiet
    assert "isolated-error-outlier" not in quiet


def test_many_alerts_of_one_rule_are_one_row(demo_url: str) -> None:
    """Catches a list of thirty layers that hides the one critical alert, or loses scopes."""
    shown = html(open_page("alerts", check="demo"))

    assert shown.count("<tr>") == 3
    assert "and at 1 more place<" in shown
    assert "layers.29" in shown


def test_app_shows_the_overview(demo_url: str) -> None:
    """Catches a broken router: the script itself must open the first page."""
    app = AppTest.from_file(str(launch.app_path()), default_timeout=TIMEOUT_S).run()

    assert not app.exception
    assert "1 regression" in html(app)


def test_screenshots_script_is_importable() -> None:
    """Catches a script of `make screenshots` that no test would notice to be broken."""
    path = Path(__file__).parents[2] / "docs" / "make_screenshots.py"
    found = importlib.util.spec_from_file_location("make_screenshots", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    shown = {
        picture.address.partition("?")[0] or "overview" for picture in module.PICTURES.values()
    }
    assert shown == set(menu())
