"""What a changed file would change, told before it is applied."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.config.apply import Applied, differences, documents, plan
from quantwatch.config.endpoints import ADDRESS
from quantwatch.config.load import parse
from quantwatch.config.schema import Config

CHECK: dict[str, Any] = {
    "suite": {"name": "core-v1:demo"},
    "reference": {"model": "m"},
    "candidates": [{"name": "int8", "model": "m", "recipe": "int8-channel"}],
    "schedule": {"cron": "0 2 * * *", "zone": "Europe/Berlin"},
}


def config(**checks: dict[str, Any]) -> Config:
    return parse(Config, {"schema_version": 1, "checks": checks}, "test")


def changes(before: Config, after: Config) -> list[str]:
    return [str(change) for change in plan(after, None, Applied(documents(before)))]


def test_nothing_changed_is_nothing_to_do() -> None:
    """Catches a plan that is never empty, and an audit full of non-events."""
    assert changes(config(nightly=CHECK), config(nightly=CHECK)) == []


def test_added_removed_and_changed_are_told_apart() -> None:
    """Catches a change that nobody sees before it happens."""
    before = config(nightly=CHECK, old=CHECK)
    smaller = CHECK | {"suite": {"name": "core-v1:demo", "limit": 4}, "threads": 2}
    told = changes(before, config(nightly=smaller, new=CHECK))
    assert told == [
        "added check new",
        "changed check nightly suite.limit: null → 4; threads: null → 2",
        "removed check old",
        "added schedule new",
        "removed schedule old",
    ]


def test_a_schedule_is_a_change_of_its_own() -> None:
    """Catches a moved night that hides in a changed check."""
    later = CHECK | {"schedule": CHECK["schedule"] | {"cron": "0 3 * * *"}}
    assert changes(config(nightly=CHECK), config(nightly=later)) == [
        'changed schedule nightly cron: "0 2 * * *" → "0 3 * * *"'
    ]
    without = {key: value for key, value in CHECK.items() if key != "schedule"}
    assert changes(config(nightly=CHECK), config(nightly=without)) == ["removed schedule nightly"]


def test_endpoints_differ_by_digest_and_tell_no_secret() -> None:
    """Catches a rotated secret that is no change, and a secret in a plan."""

    def settings(digest: str, rate: int = 20) -> dict[str, Any]:
        return {"rate_per_minute": rate, ADDRESS: digest}

    applied = Applied(
        {},
        {"ops": settings("a"), "old": settings("b"), "same": settings("s"), "tested": None},
    )
    now = {"ops": settings("c", 60), "new": settings("d"), "same": settings("s")}
    found = plan(config(), now | {"tested": settings("e")}, applied)
    assert [str(change) for change in found] == [
        "added endpoint new",
        "removed endpoint old",
        "changed endpoint ops rate_per_minute: 20 → 60; its address or secrets",
        "changed endpoint tested its settings, which were never applied",
    ]


def test_code_of_its_own_is_marked() -> None:
    """Catches a factory or trust_remote_code that slips in with a long change."""
    own = CHECK | {
        "candidates": [{"name": "fused", "factory": "ours.serve:build", "allow_code": True}]
    }
    told = changes(config(), config(nightly=own))
    assert told[0] == "added check nightly [runs its own code: fused]"


def test_many_differences_are_cut() -> None:
    """Catches a plan that nobody reads."""
    rules = [{"name": f"r{i}", "metric": "logit_kl", "threshold": 0.1} for i in range(20)]
    other = [rule | {"threshold": 0.2} for rule in rules]
    (told,) = changes(
        config(nightly=CHECK | {"rules": rules}), config(nightly=CHECK | {"rules": other})
    )
    assert told.endswith("… and 12 more")


DOCUMENT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(DOCUMENT, DOCUMENT)
def test_no_difference_means_equal(before: Any, after: Any) -> None:
    """Catches a change that is found by nobody, and one that is none."""
    found = list(differences(before, after))
    if before == after:
        assert found == []
    elif not found:
        # A key that is null is the same as none: that is how TOML leaves a setting out.
        assert without_nulls(before) == without_nulls(after)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, {})}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["x" * 200])
def test_long_values_are_cut(name: str) -> None:
    """Catches a prompt or a description that fills the screen."""
    longer = CHECK | {"description": name}
    (told,) = changes(config(nightly=CHECK), config(nightly=longer))
    assert len(told) < 120


def test_long_texts_are_told_from_where_they_differ() -> None:
    """Catches a template's change that reads the same on both sides."""
    same = "x" * 200
    [told] = differences({"body": f"{same} old words"}, {"body": f"{same} new words"})
    assert told == f'body: "…{"x" * 19} old words" → "…{"x" * 19} new words"'
    [told] = differences({"body": "short"}, {"body": "shorter"})
    assert told == 'body: "short" → "shorter"'
