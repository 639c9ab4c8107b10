"""Requests of timers, as Streamlit's queue takes them."""

from collections.abc import Callable
from typing import Any

import pytest
from streamlit.runtime.scriptrunner_utils import script_requests
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests

from quantwatch_dashboard import late_timers

Queue = Callable[..., ScriptRequests]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Return a queue that was asked for these pages; undone in the end."""
    monkeypatch.setattr(ScriptRequests, "request_rerun", ScriptRequests.request_rerun)
    late_timers.ignore()

    def asked(*pages: str, is_drawing: bool = True) -> ScriptRequests:
        requests = ScriptRequests()
        for page in pages:
            assert requests.request_rerun(RerunData(page_script_hash=page))
        if is_drawing:
            requests.on_scriptrunner_ready()
        return requests

    return asked


def timer(page: str, **how: Any) -> RerunData:
    return RerunData(page_script_hash=page, **{"fragment_id": "f", "is_auto_rerun": True, **how})


def next_page(requests: ScriptRequests) -> str | None:
    request = requests.on_scriptrunner_ready()
    is_rerun = request.type == script_requests.ScriptRequestType.RERUN
    return request.rerun_data.page_script_hash if is_rerun else None


@pytest.mark.parametrize("is_drawing", [True, False], ids=["drawing", "waiting"])
def test_a_late_timer_changes_nothing(queue: Queue, is_drawing: bool) -> None:
    """Catches a page that is cleared when it is drawn, and a way that ends where it began."""
    requests = queue("check", "run", is_drawing=is_drawing)
    assert requests.request_rerun(timer("check"))
    assert next_page(requests) == (None if is_drawing else "run")


KEPT = {
    "a timer of the page itself": (("check", "run"), timer("run")),
    "a widget of the page before": (("check", "run"), timer("check", is_auto_rerun=False)),
    "a timer where no page was named": (("",), timer("check")),
    "a way back": (("check", "run"), RerunData(page_script_hash="check")),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept(queue: Queue, case: str) -> None:
    """Catches a page that never redraws itself, and a click that is lost."""
    pages, request = KEPT[case]
    requests = queue(*pages)
    assert requests.request_rerun(request)
    assert next_page(requests) == request.page_script_hash


def test_a_way_back_has_its_timers_again(queue: Queue) -> None:
    requests = queue("check", "run", "check")
    requests.request_rerun(timer("run"))
    assert next_page(requests) is None
    requests = queue("check", "run", "check")
    requests.request_rerun(timer("check"))
    assert next_page(requests) == "check"


def test_a_queue_that_has_stopped_takes_nothing(queue: Queue) -> None:
    requests = queue("check")
    requests.request_stop()
    assert not requests.request_rerun(timer("check"))
