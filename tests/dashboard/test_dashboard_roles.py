"""Who may do what: every rule as a row of a table."""

from collections.abc import Mapping
from typing import Any

import pytest

from quantwatch.config.dashboard import DashboardConfig, GrantsConfig
from quantwatch_dashboard.roles import (
    AccessError,
    How,
    Person,
    Role,
    ends_at,
    groups,
    role_of,
    signed_in,
    verified_email,
)

NOW = 1_800_000_000
GRANTS = GrantsConfig(
    admin=("alice@example.com",),
    operator=("oncall-?@example.com", "*@ops.example.com"),
    viewer=("*@Example.com",),
)
SETTINGS = DashboardConfig(
    roles=GRANTS,
    groups_claim="groups",
    groups=GrantsConfig(operator=("ml-*",), admin=("Root",)),
)


def identity(email: str = "bob@example.com", **claims: Any) -> dict[str, Any]:
    usual = {"sub": "7", "iss": "https://sso.example.com", "iat": NOW - 60, "exp": NOW + 60}
    return {**usual, "email": email, "email_verified": True, **claims}


ROLES: dict[str, tuple[Mapping[str, Any], Role]] = {
    "named": (identity("alice@example.com"), Role.ADMIN),
    "the highest of several": (identity("oncall-1@example.com"), Role.OPERATOR),
    "one character stands for one": (identity("oncall-12@example.com"), Role.VIEWER),
    "any case": (identity("ALICE@Example.COM"), Role.ADMIN),
    "glob over a domain": (identity("bob@example.com"), Role.VIEWER),
    "a subdomain is another domain": (identity("bob@x.example.com"), Role.NONE),
    "a domain that begins so": (identity("bob@example.com.evil.test"), Role.NONE),
    "a domain that ends so": (identity("bob@notexample.com"), Role.NONE),
    "two at signs": (identity("bob@evil.test@example.com"), Role.NONE),
    "a quoted local part": (identity('"a@b"@example.com'), Role.NONE),
    "a line break": (identity("bob@evil.test\n@example.com"), Role.NONE),
    "a trailing line break": (identity("alice@example.com\n"), Role.NONE),
    "a blank": (identity(" alice@example.com"), Role.NONE),
    "nothing before the at sign": (identity("@example.com"), Role.NONE),
    "the Kelvin sign is no k": (identity("oncall-\u212a@ops.exam\u212ale.com"), Role.NONE),
    "not verified": (identity("alice@example.com", email_verified=False), Role.NONE),
    "not said": (identity("alice@example.com", email_verified=None), Role.NONE),
    "verified in words": (identity("alice@example.com", email_verified="true"), Role.ADMIN),
    "not verified in words": (identity("alice@example.com", email_verified="false"), Role.NONE),
    "verified is a number": (identity("alice@example.com", email_verified=1), Role.NONE),
    "a list of addresses": (identity(email=["alice@example.com"]), Role.NONE),  # type: ignore[arg-type]
    "no address": ({"sub": "7", "exp": NOW + 60}, Role.NONE),
    "a group": (identity("x@y.z", groups=["ml-platform", "other"]), Role.OPERATOR),
    "a group alone, without an address": ({"sub": "7", "groups": "ml-a"}, Role.OPERATOR),
    "case of groups matters": (identity("x@y.z", groups=["ML-platform", "root"]), Role.NONE),
    "group above address": (identity("bob@example.com", groups=["Root"]), Role.ADMIN),
    "address above group": (identity("alice@example.com", groups=["ml-a"]), Role.ADMIN),
    "groups of another kind": (identity("x@y.z", groups={"ml-a": 1}), Role.NONE),
    "numbers among groups": (identity("x@y.z", groups=[1, None, "ml-a"]), Role.OPERATOR),
    "an address is no group": (identity("x@y.z", groups=["alice@example.com"]), Role.NONE),
}


@pytest.mark.parametrize(("claims", "role"), ROLES.values(), ids=ROLES)
def test_role_of_an_identity(claims: Mapping[str, Any], role: Role) -> None:
    """Catches a role for an address that nobody vouches for, or that only looks like another."""
    assert role_of(claims, SETTINGS) is role
    person = signed_in({"exp": NOW + 60, **claims}, SETTINGS, NOW)
    assert (person.role, person.how) == (role, How.SIGNED_IN)


@pytest.mark.parametrize(
    ("mark", "trusted"), [(None, True), (True, True), (False, False), ("false", False)], ids=str
)
def test_an_unmarked_address_is_believed_where_settings_say_so(mark: Any, trusted: bool) -> None:
    """Catches a setting for providers without the mark that makes unverified addresses count."""
    settings = DashboardConfig(roles=GRANTS, trust_unmarked_email=True)
    claims = identity("alice@example.com", email_verified=mark)

    assert (role_of(claims, settings) is Role.ADMIN) is trusted
    assert (verified_email(claims, settings) is not None) is trusted


def test_without_roles_nobody_has_one() -> None:
    """Catches a sign-in, configured without roles, that lets everybody of that provider in."""
    person = signed_in(identity(), DashboardConfig(), NOW)

    assert person.role is Role.NONE
    assert person.name == "bob@example.com"
    assert "no role" in person.words


ENDS = {
    "before the token's end": (identity(exp=NOW + 1), None, True),
    "at its end": (identity(exp=NOW), None, False),
    "after its end": (identity(exp=NOW - 1), None, False),
    "a fraction": (identity(exp=NOW + 0.5), None, True),
    "no end": (identity(exp=None), None, False),
    "an end in words": (identity(exp=str(NOW + 60)), None, False),
    "an end that is true": (identity(exp=True), None, False),
    "session beyond the token": (identity(iat=NOW - 3599, exp=NOW - 3000), "1h", True),
    "session is over": (identity(iat=NOW - 3600, exp=NOW + 9999), "1h", False),
    "session of a token without start": (identity(iat=None), "1h", False),
}


@pytest.mark.parametrize(("claims", "session", "holds"), ENDS.values(), ids=ENDS)
def test_a_sign_in_ends(claims: Mapping[str, Any], session: str | None, holds: bool) -> None:
    """Catches a sign-in of thirty days: Streamlit's cookie lives so long, whatever the token says."""
    settings = DashboardConfig(roles=GRANTS, session=session)
    person = signed_in(claims, settings, NOW)

    assert (person.how is How.SIGNED_IN) is holds
    assert (person.role is Role.VIEWER) is holds
    assert (ends_at(claims, settings) > NOW) is holds
    if not holds:
        assert person.how is How.EXPIRED
        assert "bob@example.com" in person.words


ANONYMOUS = {
    "nobody": ("none", None, Role.NONE, How.SIGNED_OUT),
    "readers": ("viewer", None, Role.VIEWER, How.SIGNED_OUT),
    "expired, nobody": ("none", identity(exp=0), Role.NONE, How.EXPIRED),
    "expired, readers": ("viewer", identity(exp=0), Role.VIEWER, How.EXPIRED),
    "known but without role": ("viewer", identity("x@y.z"), Role.NONE, How.SIGNED_IN),
}


@pytest.mark.parametrize(("setting", "claims", "role", "how"), ANONYMOUS.values(), ids=ANONYMOUS)
def test_who_is_not_signed_in(setting: Any, claims: Any, role: Role, how: How) -> None:
    """Catches a page open to everybody where a sign-in is wanted, and an admin who stays one."""
    person = signed_in(claims, DashboardConfig(anonymous=setting, roles=GRANTS), NOW)

    assert (person.role, person.how) == (role, how)
    if how is not How.SIGNED_IN:
        assert person.name == "anonymous"


NAMES = {
    "verified address": (identity("Bob@Example.com"), "bob@example.com"),
    "unverified address": (identity(email_verified=False), "7 of sso.example.com"),
    "a chosen name counts for nothing": (
        {"sub": "7", "iss": "https://sso.example.com/x", "preferred_username": "alice@example.com",
         "name": "alice@example.com", "groups": ["ml-a"]}, "7 of sso.example.com"),
    "no issuer": ({"sub": "7"}, "7 of unknown provider"),
    "nothing": ({}, "unknown of unknown provider"),
}  # fmt: skip


@pytest.mark.parametrize(("claims", "name"), NAMES.values(), ids=NAMES)
def test_the_name_in_the_audit_can_not_be_chosen(claims: Mapping[str, Any], name: str) -> None:
    """Catches an audit log in which one person can write under another's name."""
    assert signed_in({"exp": NOW + 60, **claims}, SETTINGS, NOW).name == name


GROUPS: dict[str, tuple[dict[str, Any], str | None, tuple[str, ...]]] = {
    "no claim is looked at": ({"groups": ["a"]}, None, ()),
    "a list": ({"groups": ["a", "b"]}, "groups", ("a", "b")),
    "one text": ({"groups": "a"}, "groups", ("a",)),
    "absent": ({}, "groups", ()),
    "a path": ({"realm_access": {"roles": ["a"]}}, "realm_access.roles", ("a",)),
    "a name with dots": ({"https://x.y/groups": ["a"]}, "https://x.y/groups", ("a",)),
    "a path that ends early": ({"realm_access": "roles"}, "realm_access.roles", ()),
}


@pytest.mark.parametrize(("claims", "claim", "found"), GROUPS.values(), ids=GROUPS)
def test_groups(claims: Mapping[str, Any], claim: str | None, found: tuple[str, ...]) -> None:
    """Catches a provider whose groups lie in a table of their own or under a URL."""
    assert groups(claims, claim) == found


@pytest.mark.parametrize("needed", list(Role), ids=str)
@pytest.mark.parametrize("own", list(Role), ids=str)
def test_roles_include_those_below(own: Role, needed: Role) -> None:
    """Catches an admin who may not do what an operator may."""
    person = Person("ann", own, How.SIGNED_IN)

    assert person.may(needed) is (own.value >= needed.value)
    if not person.may(needed):
        with pytest.raises(AccessError, match=f"Pausing it needs the role {needed.word}; ann has"):
            person.require(needed, "Pausing it")
    else:
        person.require(needed, "Pausing it")
