"""The part that delivers goes on with other endpoints when the file has others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantwatch.config.endpoints import Endpoint
from quantwatch.config.receiver_urls import parse_url
from quantwatch.config.schema import Config
from quantwatch.service import delivering
from quantwatch.service.configuration import Current, Loaded
from quantwatch.service.delivering import Delivering
from quantwatch.store.session import Database


class FakeDeliverer:
    """Notes which endpoints it was made for, and whether it works."""

    made: list["FakeDeliverer"]

    def __init__(self, db: Database, endpoints: dict[str, Endpoint]) -> None:
        self.endpoints, self.is_alive = sorted(endpoints), False
        self.failure: BaseException | None = None
        type(self).made.append(self)

    def start(self) -> None:
        self.is_alive = True

    def stop(self, within_s: float) -> bool:
        self.is_alive = False
        self.at_stop()
        return True

    def at_stop(self) -> None:
        """Look at the world while this one has ended and the next has not begun."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeDeliverer]:
    FakeDeliverer.made = []
    monkeypatch.setattr(delivering, "Deliverer", FakeDeliverer)
    return FakeDeliverer.made


def loaded(*names: str, **fields: Any) -> Loaded:
    url = parse_url("test", "https://hooks.example/x")
    endpoints = {name: Endpoint(name, url, **fields) for name in names}
    return Loaded(Config(schema_version=1), Path("quantwatch.toml"), "", endpoints)


def test_other_endpoints_replace_the_deliverer(db: Database, made: list[FakeDeliverer]) -> None:
    """Catches a new receiver that is told nothing until the next restart."""
    current = Current(loaded("ops"))
    part = Delivering(db, current)
    assert not part.is_alive
    part.start()
    current.replace(loaded("ops", "chat"))
    part.refresh()
    assert [(one.endpoints, one.is_alive) for one in made] == [
        (["ops"], False),
        (["chat", "ops"], True),
    ]
    assert part.is_alive
    part.stop(1)
    assert not part.is_alive


def test_it_counts_as_alive_while_it_is_replaced(
    db: Database, made: list[FakeDeliverer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a service that ends because somebody added a receiver."""
    current, seen = Current(loaded("ops")), []
    part = Delivering(db, current)
    part.start()
    monkeypatch.setattr(FakeDeliverer, "at_stop", lambda _: seen.append(part.is_alive))
    current.replace(loaded("ops", "chat"))
    part.refresh()
    part.stop(1)
    assert seen == [True, False]


def test_the_same_endpoints_are_left_alone(db: Database, made: list[FakeDeliverer]) -> None:
    """Catches messages that are interrupted because a schedule was edited."""
    current = Current(loaded("ops"))
    part = Delivering(db, current)
    part.start()
    current.replace(replace(loaded("ops"), digest="other"))
    part.refresh()
    assert len(made) == 1
    assert part.is_alive


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"rate_per_minute": 3}, id="rate"),
        pytest.param({"severities": ("critical",)}, id="severities"),
    ],
)
def test_what_the_digest_leaves_out_counts(
    db: Database, made: list[FakeDeliverer], fields: dict[str, Any]
) -> None:
    """Catches an edited rate that nobody keeps until the next restart."""
    current = Current(loaded("ops"))
    part = Delivering(db, current)
    part.start()
    current.replace(loaded("ops", **fields))
    part.refresh()
    assert [one.is_alive for one in made] == [False, True]


def test_what_it_died_of_is_told(db: Database, made: list[FakeDeliverer]) -> None:
    """Catches a lane that is dead in a service that looks alive."""
    part = Delivering(db, Current(loaded("ops")))
    assert part.failure is None
    part.start()
    made[0].failure = ValueError("boom")
    assert part.failure is made[0].failure
