"""B29: a canary token in URL and secret is searched for wherever somebody could read it."""

import json
import logging
import pickle
from pathlib import Path

import pytest
from tests.monitor.delivery.loopback import Receiver, Reply, lane_to, tell, to_next

from quantwatch.cli import main
from quantwatch.config.endpoints import Endpoint, resolve_endpoint
from quantwatch.config.secrets import Secret
from quantwatch.config.service import EndpointConfig
from quantwatch.observability import logs
from quantwatch.store.session import Database

CANARY = "canary0T0KEN9secret"
SIGNING = "whsec_Y2FuYXJ5U0lHTklOR3NlY3JldDEyMzQ1Njc4OTA="


def guarded(receiver: Receiver, tmp_path: Path, **fields: object) -> Endpoint:
    known = {"url_env": "HOOK", "secret_env": "KEY", "allow_http": True}
    config = EndpointConfig.model_validate(
        known | {"allow_networks": ["127.0.0.0/8"], "rate_per_minute": 600} | fields
    )
    url = f"http://127.0.0.1:{receiver.port}/services/{CANARY}?token={CANARY}"
    return resolve_endpoint("hook", config, tmp_path, {"HOOK": url, "KEY": SIGNING})


def test_canary_is_nowhere(
    sqlite_db: Database,
    receiver: Receiver,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a token in logs, error columns, notices or messages to others."""
    logs.configure("json", everything=True, level=logging.DEBUG)
    endpoint = guarded(receiver, tmp_path)
    echo = f"no hook at /services/{CANARY}, key {SIGNING}".encode()
    receiver.answer = lambda _request: Reply(404, body=echo)
    lane = lane_to(sqlite_db, endpoint)
    tell(sqlite_db)
    for _ in range(4):
        lane.drain(5)
        to_next(sqlite_db)
    assert len(receiver.requests) == 3
    assert CANARY in receiver.requests[0].path
    logging.getLogger("httpcore").warning("trouble with %s", endpoint.url)
    said = capsys.readouterr()
    everything = said.out + said.err + repr(endpoint) + str(endpoint.secrets)
    everything += "".join(str(one.body) for one in receiver.requests)
    assert "message not delivered" in everything
    sqlite_db.close()
    for path in tmp_path.glob("one.db*"):
        everything += path.read_bytes().decode("latin-1")
    for word in (CANARY, SIGNING, SIGNING.removeprefix("whsec_")):
        assert word not in everything
    logging.getLogger("quantwatch").setLevel(logging.NOTSET)
    for logger in (logging.getLogger(), logging.getLogger("quantwatch")):
        for handler in [one for one in logger.handlers if type(one).__name__ == "_Stderr"]:
            logger.removeHandler(handler)


def test_secret_is_never_shown() -> None:
    """Catches a secret in an f-string, a traceback's locals or a pickle."""
    secret = Secret(CANARY)
    for text in (str(secret), repr(secret), f"{secret}", f"{secret!r:>40}", str([secret])):
        assert CANARY not in text
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert secret.reveal() == CANARY


CONFIG = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = {{ model = "smollm2-135m" }}
candidates = [{{ name = "int8", model = "smollm2-135m", recipe = "int8-channel" }}]
[endpoints.hook]
url_env = "HOOK"
secret_env = "KEY"
allow_http = true
allow_networks = ["127.0.0.0/8"]
rate_per_minute = {rate}
"""


@pytest.fixture
def place(
    sqlite_db: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{receiver.port}/services/{CANARY}")
    monkeypatch.setenv("KEY", SIGNING)
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", sqlite_db.url)
    (tmp_path / "quantwatch.toml").write_text(CONFIG.format(rate=3))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


@pytest.mark.usefixtures("place")
def test_endpoint_commands(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches X24: a test button that takes another way, has no rate, or shows the answer."""
    receiver.answer = lambda _request: Reply(200, body=b"the receiver's own page")
    assert run(capsys, "endpoints", "list")[1].count("never used") == 1
    code, out, _ = run(capsys, "endpoints", "test", "hook")
    assert (code, out.startswith("hook: delivered: status 200")) == (0, True)
    assert "own page" not in out
    assert receiver.requests[0].document["type"] == "test"
    receiver.statuses(500)
    code, _, err = run(capsys, "endpoints", "test", "hook")
    assert (code, "http_500" in err) == (3, True)
    code, _, err = run(capsys, "endpoints", "test", "hook")
    assert (code, "wait a little" in err) == (3, True)
    assert len(receiver.requests) == 2
    [row] = json.loads(run(capsys, "endpoints", "list", "--json")[1])
    assert (row["host"], row["state"], row["failures"]) == ("127.0.0.1", "enabled", 1)
    assert run(capsys, "endpoints", "test", "nope")[0] == 2
    assert "enabled (was enabled)" in run(capsys, "endpoints", "enable", "hook")[1]
    assert run(capsys, "endpoints", "secret")[1].startswith("whsec_")


@pytest.mark.usefixtures("place")
def test_delivery_commands(sqlite_db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches dead letters that can't be found or told again from the command line."""
    event_id = tell(sqlite_db, endpoints=("hook",))
    sqlite_db.clock_shift *= 0
    [row] = json.loads(run(capsys, "deliveries", "list", "--json")[1])
    assert (row["event"], row["state"], row["attempt"]) == (event_id, "pending", 0)
    assert event_id in run(capsys, "deliveries", "list")[1]
    assert json.loads(run(capsys, "deliveries", "list", "--state", "dead", "--json")[1]) == []
    assert run(capsys, "deliveries", "list", "--state", "ded")[0] == 2
    assert run(capsys, "deliveries", "replay", event_id)[0] == 2
    assert run(capsys, "deliveries", "replay")[0] == 2
    assert run(capsys, "deliveries", "replay", "--dead")[0] == 2
    assert run(capsys, "deliveries", "replay", "--dead", "--since", "yesterday")[0] == 2
    code, out, _ = run(capsys, "deliveries", "replay", "--dead", "--since", "24h")
    assert (code, out) == (0, "0 deliveries wait again\n")
    assert run(capsys, "deliveries", "failed", "--by", "error")[0] == 0
