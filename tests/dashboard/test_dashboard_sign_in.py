"""Signing in with a real browser at a real provider, and who may do what then."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from itsdangerous import URLSafeTimedSerializer
from playwright.sync_api import Page, expect
from tests.dashboard.adding_proxy import adding_proxy
from tests.dashboard.browsing import MARKS, WAIT_MS, Browse, watched
from tests.dashboard.invented_actions import RUN, furnish
from tests.dashboard.oidc_provider import CLIENT_ID, CLIENT_SECRET, Provider, provider

from quantwatch.store import audit
from quantwatch.store.session import open_database
from quantwatch_dashboard import launch

PEOPLE = {
    "vera": {"email": "Vera@example.com", "email_verified": True},
    "olga": {"email": "olga@ops.example.com", "email_verified": True},
    "mallory": {"email": "mallory@evil.test", "email_verified": True},
    "unverified": {"email": "olga@ops.example.com", "email_verified": False},
    "grouped": {"email": "greta@evil.test", "email_verified": True, "groups": ["ml-platform"]},
}
ROLES = """
schema_version = 1
[dashboard]
groups_claim = "groups"
[dashboard.roles]
operator = ["*@ops.example.com"]
viewer = ["*@example.com"]
[dashboard.groups]
operator = ["ml-*"]
"""
pytestmark = MARKS


@dataclass(frozen=True)
class Service:
    """A dashboard with a sign-in, its provider, and an alert to act on."""

    url: str
    provider: Provider
    database: str
    alert: int


def write_secrets(folder: Path, port: int, discovery: str) -> None:
    """Write Streamlit's secrets.toml for a dashboard on a port."""
    values = {"client_id": CLIENT_ID, "client_secret": CLIENT_SECRET}
    values["server_metadata_url"] = f"{discovery}/.well-known/openid-configuration"
    (folder / ".streamlit").mkdir()
    lines = [
        "[auth]",
        f'redirect_uri = "http://127.0.0.1:{port}/oauth2callback"',
        f'cookie_secret = "{"0123456789abcdef" * 4}"',
        "[auth.example]",
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    (folder / ".streamlit" / "secrets.toml").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def service(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The dashboard with a sign-in, and an alert that fires."""
    folder = tmp_path_factory.mktemp("signed")
    shutil.copy(filled, folder / "quantwatch.db")
    database = f"sqlite:///{folder}/quantwatch.db"
    alert = furnish(database)
    (folder / "quantwatch.toml").write_text(ROLES)
    port = launch.free_port()
    with pytest.MonkeyPatch.context() as patch, provider(PEOPLE) as found:
        patch.setenv("QUANTWATCH_CONFIG", str(folder / "quantwatch.toml"))
        write_secrets(folder, port, found.url)
        with launch.serving(database, WAIT_MS / 1000, port=port, folder=folder) as url:
            yield Service(url, found, database, alert)


@pytest.fixture
def page(browse: Browse, service: Service) -> Page:
    """A page of a browser without cookies."""
    service.provider.fault, service.provider.lasts_s = "", 3600
    return browse("about:blank")[0]


def sign_in(page: Page, service: Service, person: str) -> None:
    """Go to the dashboard, to the provider, and back."""
    page.goto(service.url)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name=person, exact=True).click()
    page.wait_for_url(f"{service.url}/**")


def test_a_viewer_reads_and_signs_out(page: Page, service: Service) -> None:
    """Catches a button that works for a viewer, and a sign-out that isn't one."""
    errors = watched(page)
    sign_in(page, service, "vera")
    expect(page.locator(".qw-person summary")).to_contain_text("viewervera@example.com")
    page.goto(f"{service.url}/alerts?alert={service.alert}")
    expect(page.get_by_role("button", name="Acknowledge")).to_be_disabled()
    before = service.provider.num_sign_outs
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator(".qw-state")).to_contain_text("Sign in to quantwatch")
    page.goto(service.url)
    expect(page.locator(".qw-state")).to_contain_text("Sign in to quantwatch")

    assert service.provider.num_sign_outs == before + 1
    assert page.get_by_role("button", name="Acknowledge").count() == 0
    assert errors == []


def test_what_a_reader_may_download(page: Page, service: Service) -> None:
    """Catches a file that nobody gets: it is made where Streamlit does not know who asks."""
    sign_in(page, service, "vera")
    page.goto(f"{service.url}/run?run={RUN}")
    button = page.get_by_role("button", name="All measurements, CSV")
    with page.expect_download() as given:
        button.evaluate("button => button.click()")
    assert given.value.path().read_text().startswith('"run","candidate"')


@pytest.mark.parametrize(
    ("person", "name"),
    [("olga", "olga@ops.example.com"), ("grouped", "greta@evil.test")],
    ids=["by address", "by group"],
)
def test_an_operator_acknowledges(page: Page, service: Service, person: str, name: str) -> None:
    """Catches an action that fails in the browser, or is written down under another name."""
    sign_in(page, service, person)
    page.goto(f"{service.url}/alerts?alert={service.alert}")
    page.get_by_role("button", name="Acknowledge …").click()
    page.get_by_label("What is being done").fill("rolled back")
    page.get_by_label("What is being done").press("Enter")
    page.get_by_role("button", name="Acknowledge", exact=True).click()
    expect(page.locator(".qw-said")).to_have_text("Acknowledged.")
    expect(page.locator(".qw-knows")).to_contain_text(f"acknowledged by {name}")
    expect(page.locator(".qw-story")).to_contain_text(f"Acknowledged by {name}")

    database = open_database(service.database, read_only=True)
    newest = audit.list_entries(database, 1)[0]
    database.close()
    assert (newest.actor, newest.action) == (name, "acknowledge")
    assert newest.after == {"by": name, "comment": "rolled back"}


@pytest.mark.parametrize(
    ("person", "words"),
    [
        ("mallory", "You are signed in as mallory@evil.test, to whom no role was given."),
        ("unverified", "Your provider vouches for no e-mail address"),
    ],
    ids=["unknown", "not verified"],
)
def test_without_a_role_one_is_told_what_to_ask_for(
    page: Page, service: Service, person: str, words: str
) -> None:
    """Catches anybody of that provider who may look."""
    sign_in(page, service, person)

    expect(page.locator(".qw-state")).to_contain_text("You have no role here yet")
    expect(page.locator(".qw-state")).to_contain_text(words)
    assert page.get_by_role("link", name="Alerts").count() == 0
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("button", name="Sign in")).to_be_visible()


@pytest.mark.parametrize(
    "fault", ["nonce", "signature", "issuer", "audience", "expired", "unsigned"]
)
def test_a_forged_identity_is_refused(page: Page, service: Service, fault: str) -> None:
    """Catches a dashboard that believes whatever token it is handed."""
    service.provider.fault = fault
    before = service.provider.num_tokens
    sign_in(page, service, "olga")

    expect(page.locator(".qw-state")).to_contain_text("Sign in to quantwatch")
    assert service.provider.num_tokens == before + 1, "the provider was not asked at all"
    assert not any(c["name"] == "_streamlit_user" for c in page.context.cookies())


def test_a_forged_cookie_is_refused(page: Page, service: Service) -> None:
    """Catches an identity that the browser may write itself."""
    sign_in(page, service, "vera")
    expect(page.locator(".qw-person summary")).to_contain_text("viewer")
    (cookie,) = (c for c in page.context.cookies() if c["name"] == "_streamlit_user")
    known = URLSafeTimedSerializer("", salt=cookie["name"]).loads_unsafe(cookie["value"])[1]
    wanted = json.dumps(json.loads(str(known)) | PEOPLE["olga"])
    forged = URLSafeTimedSerializer("another secret", salt=cookie["name"]).dumps(wanted)
    page.context.add_cookies([{"name": cookie["name"], "value": str(forged), "url": service.url}])
    page.goto(service.url)

    expect(page.locator(".qw-state")).to_contain_text("Sign in to quantwatch")


def test_an_identity_ends_with_its_token(page: Page, service: Service) -> None:
    """Catches an open browser that stays signed in for thirty days."""
    service.provider.lasts_s = 15
    sign_in(page, service, "olga")
    ends = time.time() + service.provider.lasts_s
    expect(page.locator(".qw-person summary")).to_contain_text("operator")
    page.wait_for_timeout(1_000 * max(0.0, ends - time.time()) + 500)
    page.reload()

    expect(page.locator(".qw-state")).to_contain_text("Your sign-in has expired")


def test_only_this_machine_is_operator_without_a_sign_in(
    browse: Browse, filled: Path, tmp_path: Path
) -> None:
    """Catches all the world as operator: by a name that leads here, or through a proxy here."""
    shown = []
    with launch.serving(f"sqlite:///{filled}", WAIT_MS / 1000, folder=tmp_path) as local:
        elsewhere = local.replace("127.0.0.1", "evil.example")
        with adding_proxy(local, "X-Forwarded-For: 127.0.0.1") as proxied:
            for url in (local, elsewhere, proxied):
                page, _ = browse(url)
                page.wait_for_selector(".qw-person summary")
                shown.append(page.text_content(".qw-person") or "")
                page.close()

    here, rebound, forwarded = shown
    assert "You are operator: this page is served on this machine only" in here
    assert "viewer" in rebound
    assert "under the name evil.example" in rebound
    assert "viewer" in forwarded
    assert "came through a proxy" in forwarded
