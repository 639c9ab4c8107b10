"""Who is at this machine, and who may come from elsewhere: every rule as a row of a table."""

import pytest

from quantwatch_dashboard.roles import How, Role, Visit, local_person, why_not_local


def visit(
    listens: str | None = "127.0.0.1", peer: str | None = "127.0.0.1", **headers: str
) -> Visit:
    host = headers.get("host", "localhost:8501")
    own = {"host": host, "origin": f"http://{host}"}
    return Visit(listens, peer, own | {k.replace("_", "-"): v for k, v in headers.items()})


LOCAL = {
    "IPv4": visit(),
    "IPv6": visit("::1", "::1", host="[::1]:8501"),
    "another loopback address": visit("127.0.0.2", "127.0.0.2", host="127.0.0.2:8501"),
    "listens on the name": visit("localhost"),
    "a name below localhost": visit(host="quantwatch.localhost:8501"),
    "upper case": visit(host="LOCALHOST:8501"),
    "no port": visit(host="localhost"),
    "a page of its own": visit(origin="http://localhost:8501"),
    "own headers that only look so": visit(x_forward="1", referer="http://elsewhere.example/"),
}


@pytest.mark.parametrize("given", LOCAL.values(), ids=LOCAL)
def test_this_machine_is_operator_and_told_so(given: Visit) -> None:
    """Catches somebody at their own machine who may do nothing."""
    person = local_person(given, "ann@box")

    assert (person.name, person.role, person.how) == ("ann@box", Role.OPERATOR, How.LOCAL)
    assert person.words == (
        "You are operator: this page is served on this machine only, and no sign-in is configured."
    )


ELSEWHERE = {
    "listens everywhere": (visit(None), "all addresses"),
    "listens on 0.0.0.0": (visit("0.0.0.0"), "0.0.0.0"),
    "listens on ::": (visit("::"), "listens on ::"),
    "listens on a private address": (visit("10.0.0.5"), "10.0.0.5"),
    "listens on a socket": (visit("unix:///run/q.sock"), "unix"),
    "listens on a name that only begins so": (visit("localhost.example"), "localhost.example"),
    "another peer": (visit(peer="10.1.2.3"), "10.1.2.3"),
    "an unknown peer": (visit(peer=None), "unknown address"),
    "no request": (Visit("127.0.0.1", None, {}), "unknown address"),
    "Forwarded": (visit(forwarded="for=1.2.3.4"), "forwarded"),
    "X-Forwarded-For": (visit(x_forwarded_for="127.0.0.1"), "x-forwarded-for"),
    "X-Forwarded-Proto alone": (visit(x_forwarded_proto="https"), "x-forwarded-proto"),
    "an empty header": (visit(x_forwarded_for=""), "x-forwarded-for"),
    "X-Real-IP": (visit(x_real_ip="127.0.0.1"), "x-real-ip"),
    "Via": (visit(via="1.1 proxy"), "via"),
    "a content network": (visit(cf_connecting_ip="1.2.3.4"), "cf-connecting-ip"),
    "another content network": (visit(true_client_ip="1.2.3.4"), "true-client-ip"),
    "a mesh": (visit(x_envoy_external_address="1.2.3.4"), "x-envoy"),
    "a private network's door": (visit(tailscale_user_login="a@b.c"), "tailscale"),
    "another name (rebinding)": (visit(host="evil.example:8501"), "evil.example:8501"),
    "a name that ends almost so": (visit(host="notlocalhost"), "notlocalhost"),
    "a name that begins so": (visit(host="127.0.0.1.evil.example"), "127.0.0.1.evil.example"),
    "a user before the name": (visit(host="localhost@evil.example"), "localhost@evil.example"),
    "a host that can't be read": (visit(host="[::1"), "[::1"),
    "no origin, as of no browser": (
        Visit("127.0.0.1", "127.0.0.1", {"host": "localhost"}), "no header Origin"),
    "an origin that can't be read": (visit(origin="http://[::1"), "http://[::1"),
    "no host": (visit(host=""), "(none)"),
    "a page elsewhere": (visit(origin="https://evil.example"), "evil.example"),
    "a page on another port": (visit(origin="http://localhost:3000"), "localhost:3000"),
    "a page without origin": (visit(origin="null"), "null"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "named"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_whatever_may_come_from_elsewhere_only_reads(given: Visit, named: str) -> None:
    """Catches all the world as operator, behind a proxy or by a name that was made to resolve so."""
    person = local_person(given, "ann@box")

    assert (person.role, person.how) == (Role.VIEWER, How.OPEN)
    assert named in person.words
    assert "no sign-in is configured" in person.words
    assert why_not_local(given) is not None
