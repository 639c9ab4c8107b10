"""URLs of receivers: whatever two parsers could read differently never becomes an endpoint."""

from pathlib import Path

import pytest

from quantwatch.config.endpoints import resolve_endpoint
from quantwatch.config.receiver_urls import parse_url
from quantwatch.config.service import EndpointConfig
from quantwatch.delivery.signing import new_signing_secret
from quantwatch.errors import ConfigError

REFUSED = {
    "userinfo": ("http://ok.example:80@169.254.169.254/", "@"),
    "backslash": ("http://example.com\\@evil.com/", "backslash"),
    "short-ipv4": ("http://127.1/", "dotted quad"),
    "hex-ipv4": ("http://0x7f.1/", "dotted quad"),
    "decimal-ipv4": ("http://2130706433/", "dotted quad"),
    "octal-ipv4": ("http://0177.0.0.1/", "can't be read"),
    "port-too-large": ("http://a.example:99999/", "port 99999"),
    "port-zero": ("http://a.example:0/", "port 0"),
    "port-of-ssh": ("https://a.example:22/", "port 22"),
    "port-of-redis": ("https://a.example:6379/", "port 6379"),
    "blank": ("http://ex ample.com/", "blank"),
    "line-end": ("http://exa\nmple.com/", "control"),
    "tab": ("http://a.example/\tx", "control"),
    "ideographic-blank": ("http://a.example/\u3000x", "blank"),
    "fragment": ("https://a.example/#x", "fragment"),
    "zone": ("http://[fe80::1%25eth0]/", "IPv6"),
    "percent-in-host": ("https://127.0.0.1%00.example/", "host"),
    "local": ("https://printer.local/", ".local"),
    "internal": ("https://metadata.google.internal/", ".internal"),
    "localhost": ("https://localhost/", ".localhost"),
    "under-localhost": ("https://a.localhost/", ".localhost"),
    "empty-host": ("https:///x", "host"),
    "trailing-dot": ("https://a.example./", "host"),
    "long-host": (f"https://{'a.' * 127}example/", "host"),
    "ftp": ("ftp://a.example/", "https"),
    "file": ("file:///etc/passwd", "https"),
    "no-scheme": ("a.example/hook", "https"),
    "circled-digits": ("https://①②⑦.0.0.1/", "can't be read"),
    "empty": ("", "https"),
    "endless": ("https://a.example/" + "a" * 2048, "longer"),
}


@pytest.mark.parametrize(("text", "word"), REFUSED.values(), ids=REFUSED)
def test_refused(text: str, word: str) -> None:
    """Catches B28: guard and client that disagree on the host. The message never quotes the URL."""
    with pytest.raises(ConfigError, match=r"endpoints\.hook\.url: the URL") as caught:
        parse_url("endpoints.hook.url", text, allow_http=True)
    assert word in str(caught.value)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", "hooks.slack.com", None),
        ("https://192.168.1.5:8443/x", "192.168.1.5", 8443),
        ("https://[2606:4700::1111]:8443/", "2606:4700::1111", 8443),
        ("https://receiver/x", "receiver", None),
        ("https://exämple.com/", "exämple.com", None),
        ("https://a_b.example/x?y=%20z", "a_b.example", None),
    ],
)
def test_allowed(text: str, host: str, port: int | None) -> None:
    """Catches a guard that refuses real receivers."""
    url = parse_url("k", text)
    assert (url.host, url.port) == (host, port)


def test_http_needs_a_setting() -> None:
    """Catches a message, with its evidence, that crosses a network in clear text."""
    with pytest.raises(ConfigError, match="allow_http = true"):
        parse_url("k", "http://a.example/")
    assert parse_url("k", "http://a.example/", allow_http=True).scheme == "http"


def endpoint(tmp_path: Path, env: dict[str, str], **fields: object) -> object:
    config = EndpointConfig.model_validate(fields)
    return resolve_endpoint("hook", config, tmp_path, env)


URL = "https://a.example/hook"


@pytest.mark.parametrize(
    ("fields", "env", "said"),
    [
        pytest.param({"url_env": "HOOK"}, {}, "variable HOOK is not set", id="missing"),
        pytest.param({"url_env": "HOOK"}, {"HOOK": " "}, "variable HOOK is empty", id="empty"),
        pytest.param({"url_file": "no.txt"}, {}, "No such file", id="no-file"),
        pytest.param(
            {"url": URL, "secret_env": "S"}, {"S": "hunter2"}, "no signing secret", id="no-whsec"
        ),
        pytest.param(
            {"url": URL, "secret_env": "S"}, {"S": "whsec_c2hvcnQ="}, "24 to 64", id="short-secret"
        ),
        pytest.param(
            {"url": URL, "secret_env": "S"},
            {"S": " ".join(new_signing_secret() for _ in range(3))},
            "3 secrets",
            id="three-secrets",
        ),
        pytest.param(
            {"url": URL, "allow_networks": ["10.0.0.1/8"]}, {}, "host bits", id="network-host-bits"
        ),
        pytest.param({"url": URL, "format": "pagerduty"}, {}, "routing key", id="no-routing-key"),
        pytest.param({"url": URL, "format": "apprise"}, {}, "url_env", id="apprise-url-in-file"),
    ],
)
def test_bad_settings(
    tmp_path: Path, fields: dict[str, object], env: dict[str, str], said: str
) -> None:
    """Catches a bad endpoint that is found out when the first alert is lost."""
    with pytest.raises(ConfigError, match=r"endpoints\.hook") as caught:
        endpoint(tmp_path, env, **fields)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_secret_files(tmp_path: Path) -> None:
    """Catches a mounted secret that keeps its line end, or is looked for in another folder."""
    secrets = [new_signing_secret(), new_signing_secret()]
    (tmp_path / "secret").write_text(" ".join(secrets) + "\n")
    (tmp_path / "url").write_text(f"{URL}\n")
    found = resolve_endpoint(
        "hook", EndpointConfig(url_file="url", secret_file="secret"), tmp_path, {}
    )
    assert str(found.url) == URL
    assert [secret.reveal() for secret in found.secrets] == secrets


def test_binary_secret_file(tmp_path: Path) -> None:
    """Catches the bytes of a secret in the decoder's own error message."""
    (tmp_path / "secret").write_bytes(b"\xff\xfe canary")
    config = EndpointConfig(url=URL, secret_file="secret")
    with pytest.raises(ConfigError, match="no UTF-8") as caught:
        resolve_endpoint("hook", config, tmp_path, {})
    assert caught.value.__cause__ is None


def test_settings_digest_changes_with_the_secret_url(tmp_path: Path) -> None:
    """Catches an endpoint that stays disabled after its token was replaced."""
    config = EndpointConfig(url_env="HOOK")
    one = resolve_endpoint("hook", config, tmp_path, {"HOOK": f"{URL}/1"})
    two = resolve_endpoint("hook", config, tmp_path, {"HOOK": f"{URL}/2"})
    assert one.settings_sha != two.settings_sha
