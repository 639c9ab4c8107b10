"""Operations: the configuration as it was applied, versions, and who changed what."""

import platform
from importlib.metadata import PackageNotFoundError, version

import streamlit as st

from quantwatch.store.applied import ENDPOINT
from quantwatch_dashboard import clock, queries, text
from quantwatch_dashboard.components import facts, page, trouble, upkeep
from quantwatch_dashboard.components.filters import ANY
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.components.picker import pick
from quantwatch_dashboard.queries import operations as operation_queries

_PACKAGES = ("quantwatch", "streamlit", "plotly", "sqlalchemy", "alembic", "pydantic", "numpy")
_MOST_CHANGES = 200


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
                command=f"{queries.program()} config plan\n{queries.program()} start",
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
    chosen = pick("Check", "check", [ANY, *known], ANY, _none_word)
    if chosen == ANY:
        st.html(tag("p", f"{len(known)} checks are applied.", class_="qw-soft"))
        return
    each = known[chosen]
    applied = "–" if each.applied_at is None else text.instant(each.applied_at, clock.zone())
    pairs = [
        ("check", link(each.check, "check", check=each.check)),
        ("paths start at", each.folder or "–"),
        ("applied", applied),
    ]
    st.html(facts.facts([*pairs, *facts.own_code(each.config)]))
    st.html(upkeep.document(each.config))


def _section(url: str, found: operation_queries.Applied) -> None:
    known = {_words(name): (one.document, one.applied_at) for name, one in found.sections.items()}
    chosen = pick("Section or endpoint", "section", [ANY, *known], ANY, _none_word)
    parts = operation_queries.service(url).parts
    files = {str(part.details["config"]) for part in parts if part.details.get("config")}
    pairs: list[tuple[str, object]] = [("file", path) for path in sorted(files)]
    if chosen == ANY:
        st.html(facts.facts(pairs or [("file", "no running service tells which file it reads")]))
        return
    document, applied_at = known[chosen]
    st.html(facts.facts([*pairs, ("applied", text.instant(applied_at, clock.zone()))]))
    st.html(upkeep.document(document))


def _none_word(name: str) -> str:
    return "none" if name == ANY else name


def _everybody(name: str) -> str:
    return "everybody" if name == ANY else name


def _words(name: str) -> str:
    return f"endpoint {name.removeprefix(ENDPOINT)}" if name.startswith(ENDPOINT) else name


def audit(url: str) -> None:
    """Show who changed what, of everything or of one thing."""
    subject = st.query_params.get("subject")
    page.section("Audit", f"Who changed what, newest first; the last {_MOST_CHANGES}.")
    if subject:
        every = link("show everything", "operations", part="Audit")
        st.html(tag("p", "Only of ", tag("b", subject), " · ", every, class_="qw-wrap"))
    found = operation_queries.changes(url, _MOST_CHANGES, subject)
    if not found:
        words = "What a person or the service changes is written down with who, when and what."
        st.html(trouble.state("Nothing was changed yet", words))
        return
    with st.columns([1, 3])[0]:
        actors = sorted({entry.actor for entry in found})
        who = pick("Who", "who", [ANY, *actors], ANY, _everybody)
    shown = [entry for entry in found if who in (ANY, entry.actor)]
    st.html(upkeep.changes(shown, clock.now(), clock.zone()))


def _version(package: str) -> tuple[str, str]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "not installed as a package"
