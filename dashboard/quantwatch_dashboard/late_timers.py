"""A timer of the page before is no way back to it.

What redraws itself every few seconds (`st.fragment(run_every=…)`) asks for it in the name of the
page that the browser knows. A timer that fires while the reader's next page is on its way still
names the one before. Streamlit 1.67 keeps such a request until the next page is drawn, takes it for
a change of pages, has the browser clear what it shows, and then finds no such part: the reader sees
an empty page, or, where the request meets one that waits, is led back. So requests of timers that
name another page than the reader asked for last are dropped: what is worth redrawing on the new
page has timers of its own.
"""

from typing import Any

from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests

_ASKED_FOR = "_quantwatch_page"
_original = ScriptRequests.request_rerun


def ignore() -> None:
    """Drop late requests of timers, in this process from now on."""
    ScriptRequests.request_rerun = _request_rerun  # type: ignore[method-assign]


def is_late(request: RerunData, page: str) -> bool:
    """Say whether a timer asks in the name of another page; without a page nobody can."""
    is_part = bool(request.fragment_id or request.fragment_id_queue)
    return request.is_auto_rerun and is_part and bool(page) and request.page_script_hash != page


def _request_rerun(self: Any, new_data: RerunData) -> bool:
    if is_late(new_data, getattr(self, _ASKED_FOR, "")):
        return True  # it was heard
    if not (new_data.fragment_id or new_data.fragment_id_queue):
        setattr(self, _ASKED_FOR, new_data.page_script_hash)
    return _original(self, new_data)
