"""Operations: the configuration as it was applied, and versions."""

import platform
from importlib.metadata import PackageNotFoundError, version

import streamlit as st

from quantwatch.store.applied import ENDPOINT
from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import facts, page, trouble
from quantwatch_dashboard.components.address import choose, every
from quantwatch_dashboard.components.markup import link
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.text import ANY

_PACKAGES = ("quantwatch", "streamlit", "plotly", "sqlalchemy", "alembic", "pydantic", "numpy")


def show(url: str) -> None:
    """Show what the service works with, then the versions of this page's programs."""
    page.section(
        "Configuration as it was applied",
        "What the service works with, which may differ from the file until it is applied. Secrets"
        " are never stored: of them and of addresses there is a digest. What is left at nothing is"
        " not shown.",
    )
    found = operation_queries.applied(url)
    if not found.checks and not found.sections:
        st.html(
            trouble.state(
                "Nothing was applied yet",
                "A service applies its quantwatch.toml when it starts and when the file changes.",
                command=f"{connection.program()} config plan\n{connection.program()} start",
            )
        )
    else:
        left, right = st.columns(2, gap="large")
        with left:
            _check(found)
        with right:
            _section(url, found)
    page.section("Versions", "Of what draws this page; each run keeps its own environment.")
    st.html(facts.facts([("python", platform.python_version()), *map(_version, _PACKAGES)]))


def _check(found: operation_queries.Applied) -> None:
    known = {each.check: each for each in found.checks}
    chosen = choose("Check", "check", [ANY, *known], every("checks"), "stretch")
    if chosen == ANY:
        page.say(f"{text.plural(len(known), 'check is', 'checks are')} applied.")
        return
    each = known[chosen]
    applied = text.NONE if each.applied_at is None else text.instant(each.applied_at, clock.zone())
    pairs = [
        ("check", link(each.check, "check", check=each.check)),
        ("paths start at", each.folder or text.NONE),
        ("applied", applied),
    ]
    st.html(facts.facts([*pairs, *facts.own_code(each.config)]))
    st.html(facts.document(each.config))


def _section(url: str, found: operation_queries.Applied) -> None:
    known = {_words(name): (one.document, one.applied_at) for name, one in found.sections.items()}
    chosen = choose("Section or endpoint", "section", [ANY, *known], every("sections"), "stretch")
    parts = operation_queries.service(url).parts
    files = {str(part.details["config"]) for part in parts if part.details.get("config")}
    pairs: list[tuple[str, object]] = [("file", path) for path in sorted(files)]
    if chosen == ANY:
        st.html(facts.facts(pairs or [("file", "no running service tells which file it reads")]))
        return
    document, applied_at = known[chosen]
    st.html(facts.facts([*pairs, ("applied", text.instant(applied_at, clock.zone()))]))
    st.html(facts.document(document))


def _words(name: str) -> str:
    return f"endpoint {name.removeprefix(ENDPOINT)}" if name.startswith(ENDPOINT) else name


def _version(package: str) -> tuple[str, str]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "not installed as a package"
