"""Templates and headers of one's own: what is wrong is said before the first message."""

from pathlib import Path
from typing import Any

import pytest

from quantwatch.config.endpoints import Endpoint, resolve_endpoint, resolve_endpoints
from quantwatch.config.load import load_config, parse
from quantwatch.config.secrets import Secret
from quantwatch.config.service import EndpointConfig
from quantwatch.config.template_variables import VARIABLES, WHOLE
from quantwatch.errors import ConfigError
from quantwatch.observability import redaction

URL = "https://a.example/hook"
CANARY = "canary0T0KEN9secret"


@pytest.fixture(autouse=True)
def _no_secrets_left() -> Any:
    yield
    redaction.forget()


def resolved(folder: Path, env: dict[str, str] | None = None, **fields: Any) -> Endpoint:
    config = parse(EndpointConfig, {"url": URL, "format": "template"} | fields, "hook")
    return resolve_endpoint("hook", config, folder, env or {}, (folder,))


BAD_BODIES = {
    "unknown-name": ("{{ chekc }}", "unknown: 'chekc'; did you mean check? known: version, event.id"),
    "two-unknown": ("[{{ a.b }}, {{ zz }}]", "unknown: 'a.b', 'zz'"),
    "upper-case": ("{{ Title }}", "line 1: {{ Title }} is no placeholder"),
    "expression": ('{"a":\n {{ title.upper() }}}', "line 2: {{ title.upper() }} is no placeholder"),
    "filter": ("{{ title | upper }}", "no loops, conditions or filters"),
    "loop": ("{{#each alerts}}", "no loops, conditions or filters"),
    "raw": ("{{{ title }}}", "is no placeholder"),
    "over-lines": ("{{ title\n}}", "is no placeholder"),
    "no-name": ("{{ }}", "is no placeholder"),
    "unclosed": ('{"a": 1,\n"b": {{ title', "line 2: {{ without }}"),
    "empty": ("  \n", "the template is empty"),
    "endless": ('"' + "x" * 20_000 + '"', "longer than 20000 bytes"),
    "many": ("[{}1]".format("{{ title }}," * 101), "101 placeholders; allowed: at most 100"),
    "twice-whole": ("[{{ document }}, {{ document }}]", "document is there 2 times; allowed: once"),
    "not-json": ('{"a": {{ title }}', "no valid JSON"),
    "no-comma": ('{"a": {{ title }} "b": 1}', "no valid JSON once every variable is null"),
    "as-key": ("{ {{ title }}: 1 }", "no valid JSON once every variable is null"),
    "two-glued": ("{{ title }}{{ check }}", "no valid JSON"),
    "glued-to-digits": ("1{{ alert.value }}", "no valid JSON"),
    "glued-to-a-sign": ("-{{ alert.value }}", "no valid JSON"),
    "glued-exponent": ("{{ alert.value }}e5", "no valid JSON"),
    "half-an-escape": ('"\\{{ title }}"', "line 1: a placeholder after a \\"),
    "half-a-code": ('"\\u00{{ title }}41"', "no valid JSON"),
    "nan": ('{"a": NaN, "b": {{ title }}}', "NaN is no JSON"),
    "deep": ("[" * 15_000, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "said"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_bodies(tmp_path: Path, body: str, said: str) -> None:
    """Catches a template that fails at night, with the first alert."""
    with pytest.raises(ConfigError, match=r"^endpoints\.hook\.body: ") as caught:
        resolved(tmp_path, body=body)
    assert said in str(caught.value)
    (tmp_path / "body.json").write_text(body)
    with pytest.raises(ConfigError, match=r"^endpoints\.hook\.body_file: ") as caught:
        resolved(tmp_path, body_file="body.json")
    assert said in str(caught.value)


def test_every_known_name_is_told(tmp_path: Path) -> None:
    """Catches a list that leaves out what somebody looks for."""
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, body="{{ nothing_like_it }}")
    assert str(caught.value).endswith(f"known: {', '.join(VARIABLES)}")


def test_the_largest_template_is_allowed(tmp_path: Path) -> None:
    """Catches a limit that refuses what it allows."""
    whole = ", ".join(f"{{{{ {name} }}}}" for name in WHOLE)
    named = f"[{whole}, {'{{ title }}, ' * (99 - len(WHOLE))}{{{{ title }}}}]"
    found = resolved(tmp_path, body=named + " " * (20_000 - len(named)))
    assert found.template is not None
    assert found.template.names == {*WHOLE, "title"}


def test_plain_text_may_hold_any_json(tmp_path: Path) -> None:
    """Catches JSON's rules applied where there are none."""
    found = resolved(tmp_path, body='"{{ title }}{{ check }}\\', content_type="text/plain")
    assert found.template is not None
    assert found.template.content_type == "text/plain; charset=utf-8"


BAD_FILES = {
    "missing": ("no.json", "cannot be read: No such file"),
    "folder": (".", "is no file"),
    "outside": ("../outside.json", "lies outside of what the service may read; allowed: "),
    "absolute": ("/etc/hostname", "lies outside of what the service may read"),
    "link-outside": ("link.json", "outside.json lies outside of what the service may read"),
    "binary": ("binary.json", "is no UTF-8 text"),
    "long-binary": ("long.json", "longer than 20000 bytes"),
}


@pytest.mark.parametrize(("named", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_body_files(tmp_path: Path, named: str, said: str) -> None:
    """Catches a template that reads any file of the machine, or a pipe that is waited for."""
    folder = tmp_path / "conf"
    folder.mkdir()
    (tmp_path / "outside.json").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    (folder / "binary.json").write_bytes(b'"\xff"')
    (folder / "long.json").write_text('"' + "é" * 15_000 + '"')
    with pytest.raises(ConfigError, match=r"^endpoints\.hook\.body_file: ") as caught:
        resolved(folder, body_file=named)
    assert said in str(caught.value)


def test_the_service_s_roots_count(tmp_path: Path) -> None:
    """Catches a template beside the file that other roots forbid, and one in them that is refused."""
    (tmp_path / "in").mkdir()
    for name in ("in/body.json", "body.json"):
        (tmp_path / name).write_text('{"a": {{ title }}}')
    for name, allowed in (("in/body.json", True), ("body.json", False)):
        (tmp_path / "quantwatch.toml").write_text(
            f'schema_version = 1\nservice.allowed_roots = ["in"]\n[endpoints.hook]\nurl = "{URL}"\n'
            f'format = "template"\nbody_file = "{name}"\n'
        )
        config = load_config(tmp_path / "quantwatch.toml")
        if allowed:
            assert resolve_endpoints(config, tmp_path)["hook"].template is not None
        else:
            with pytest.raises(ConfigError, match="outside of what the service may read"):
                resolve_endpoints(config, tmp_path)


BAD_SETTINGS = {
    "neither": ({}, "needs exactly one of body and body_file"),
    "both": ({"body": "1", "body_file": "x"}, "needs exactly one of body and body_file"),
    "other-format": ({"format": "slack", "body": "1"}, 'body is only for format = "template", not slack'),
    "headers-elsewhere": ({"format": "quantwatch", "headers": {"x-a": "1"}}, "headers is only for"),
    "html": ({"body": "1", "content_type": "text/html"}, "'text/html' is not allowed; allowed: app"),
    "latin-1": ({"body": "1", "content_type": "text/plain; charset=latin-1"}, "is not allowed"),
    "line-end": ({"body": "1", "content_type": "text/plain\n"}, "is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "said"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    """Catches settings that would be ignored, or that nothing could be escaped for."""
    with pytest.raises(ConfigError, match=r"^hook: ") as caught:
        resolved(tmp_path, **fields)
    assert said in str(caught.value)


OURS = "decides this header itself"
BAD_VALUE = "the value is empty, longer than 4096 letters, or has a line end"
BAD_HEADERS = {
    "host": ({"Host": "x"}, OURS),
    "length": ({"content-length": "1"}, OURS),
    "type": ({"Content-Type": "x"}, f"{OURS}; use content_type"),
    "encoding": ({"Content-Encoding": "gzip"}, OURS),
    "hop-by-hop": ({"Connection": "x"}, OURS),
    "chunked": ({"Transfer-Encoding": "chunked"}, OURS),
    "proxy": ({"Proxy-Anything": "x"}, OURS),
    "cookie": ({"Cookie": "a=b"}, OURS),
    "id": ({"webhook-id": "x"}, OURS),
    "signature": ({"Webhook-Signature": "x"}, OURS),
    "name-blank": ({"x a": "1"}, "is no name of a header"),
    "name-line-end": ({"x-a\r\nhost": "1"}, "is no name of a header"),
    "name-colon": ({"x-a:": "1"}, "is no name of a header"),
    "name-letters": ({"x-ä": "1"}, "is no name of a header"),
    "name-empty": ({"": "1"}, "is no name of a header"),
    "twice": ({"x-a": "1", "X-A": "2"}, "is named twice"),
    "many": ({f"x-{n}": "1" for n in range(33)}, "33 headers; allowed: at most 32"),
    "cr-lf": ({"x-a": "1\r\nhost: evil"}, BAD_VALUE),
    "line-end-last": ({"x-a": "1\n"}, BAD_VALUE),
    "nul": ({"x-a": "1\x002"}, BAD_VALUE),
    "letters": ({"x-a": "é"}, BAD_VALUE),
    "blank-last": ({"x-a": "1 "}, BAD_VALUE),
    "empty-value": ({"x-a": ""}, BAD_VALUE),
    "endless": ({"x-a": "a" * 4097}, BAD_VALUE),
    "placeholder": ({"x-a": "{{ title }}"}, "the value of a header is fixed"),
    "written-secret": ({"Authorization": f"Bearer {CANARY}"}, "use headers_env or headers_file"),
    "written-key": ({"X-Api-Key": CANARY}, "use headers_env or headers_file"),
}


@pytest.mark.parametrize(("headers", "said"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers(tmp_path: Path, headers: dict[str, str], said: str) -> None:
    """Catches a request that is split in two, or a header that takes the place of ours."""
    with pytest.raises(ConfigError, match=r"^endpoints\.hook") as caught:
        resolved(tmp_path, body="1", headers=headers)
    assert said in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "variable KEY is not set"),
        ("", "is empty"),
        ("a\nb", BAD_VALUE),
        ("ä" * 9, BAD_VALUE),
    ],
    ids=["missing", "empty", "line-end", "letters"],
)
def test_bad_secret_headers(tmp_path: Path, value: str | None, said: str) -> None:
    """Catches a secret with a line end in it, and one that a message quotes."""
    env = {} if value is None else {"KEY": value}
    with pytest.raises(ConfigError, match=r"^endpoints\.hook\.headers_env\.x-key: ") as caught:
        resolved(tmp_path, env, body="1", headers_env={"x-key": "KEY"})
    assert said in str(caught.value)
    assert not value or repr(value)[1:-1] not in str(caught.value)


def test_secret_headers_are_kept_out_of_every_text(tmp_path: Path) -> None:
    """Catches a token in a log, and words like Bearer that vanish from all of them."""
    (tmp_path / "key").write_text(f"{CANARY}-file\n")
    found = resolved(
        tmp_path,
        {"AUTH": f"Bearer {CANARY}"},
        body="1",
        headers={"X-Team": "ml"},
        headers_env={"Authorization": "AUTH"},
        headers_file={"x-key": "key"},
    )
    assert found.headers == (
        ("authorization", Secret(f"Bearer {CANARY}")),
        ("x-key", Secret(f"{CANARY}-file")),
        ("x-team", "ml"),
    )
    assert CANARY not in f"{found!r} {found.headers}"
    assert CANARY not in redaction.scrub(f"the receiver said {CANARY}, {CANARY}-file")
    assert redaction.scrub("a Bearer of good news") == "a Bearer of good news"


CHANGES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "body": ({"body": "2"}, {}),
    "type": ({"content_type": "text/plain"}, {}),
    "header": ({"headers": {"x-team": "other"}}, {}),
    "secret": ({}, {"KEY": "another"}),
}


@pytest.mark.parametrize(("fields", "env"), CHANGES.values(), ids=CHANGES)
def test_a_change_enables_the_endpoint_again(
    tmp_path: Path, fields: dict[str, Any], env: dict[str, str]
) -> None:
    """Catches an endpoint that stays disabled after its template or its token was mended."""
    known: dict[str, Any] = {
        "body": "1",
        "headers": {"x-team": "ml"},
        "headers_env": {"x-k": "KEY"},
    }
    one = resolved(tmp_path, {"KEY": "first"}, **known)
    same = resolved(tmp_path, {"KEY": "first"}, **known)
    other = resolved(tmp_path, {"KEY": "first"} | env, **(known | fields))
    assert one.settings_sha == same.settings_sha != other.settings_sha
