"""What redraws itself while the reader goes to another page, in a real browser."""

from playwright.sync_api import BrowserContext, WebSocketRoute
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from tests.dashboard.browsing import MARKS, Browse, settled
from tests.dashboard.conftest import Site
from tests.dashboard.invented_actions import RUN
from tests.dashboard.test_dashboard_journeys import HEATMAP, POINTS, click_point

pytestmark = MARKS


class _LateTimer:
    """Stands between a page and its server, and lets a timer fire when it is too late.

    The last redrawing that a timer asked for is sent once more as soon as the server tells of
    another page: a browser that hasn't heard of it yet asks just so.
    """

    def __init__(self, context: BrowserContext) -> None:
        self.has_fired = False
        self._asked: BackMsg | None = None
        context.route_web_socket("**/_stcore/stream", self._connect)

    def _connect(self, page: WebSocketRoute) -> None:
        server = page.connect_to_server()
        page.on_message(lambda message: self._ask(server, message))
        server.on_message(lambda message: self._answer(server, page, message))

    def _ask(self, server: WebSocketRoute, message: str | bytes) -> None:
        assert isinstance(message, bytes)
        asked = BackMsg.FromString(message)
        if asked.rerun_script.is_auto_rerun:
            self._asked = asked
        server.send(message)

    def _answer(self, server: WebSocketRoute, page: WebSocketRoute, message: str | bytes) -> None:
        assert isinstance(message, bytes)
        told = ForwardMsg.FromString(message)
        if self._asked and told.WhichOneof("type") == "new_session" and not self.has_fired:
            here = self._asked.rerun_script.page_script_hash
            self.has_fired = told.new_session.page_script_hash != here
            if self.has_fired:
                server.send(self._asked.SerializeToString())
        page.send(message)

    @property
    def was_set(self) -> bool:
        """Whether a timer fired on the page that is left."""
        return self._asked is not None


def test_a_timer_of_the_page_before(site: Site, browse: Browse, chromium: BrowserContext) -> None:
    """Catches an empty page: Streamlit takes a fragment of the page before, whose timer fires while
    the next one is drawn, for a way back to it."""
    timer = _LateTimer(chromium)
    page, errors = browse(f"{site.address}/check?check=demo")
    settled(page, POINTS)
    while not timer.was_set:
        page.wait_for_timeout(100)
    click_point(page, 6)

    page.wait_for_url(f"**/run?run={RUN}*")
    settled(page, HEATMAP)
    page.wait_for_timeout(1000)
    assert timer.has_fired
    assert page.inner_text("h1") == "demo"
    assert errors == []
