"""Who is looking: at the top right of each page, and the pages of those who may not look."""

import streamlit as st
from streamlit.errors import StreamlitAuthError

from quantwatch_dashboard import access
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.components.trouble import state
from quantwatch_dashboard.roles import How, Person

_SHORT = {
    How.LOCAL: "on this machine",
    How.OPEN: "no sign-in is configured",
    How.SIGNED_OUT: "not signed in",
    How.EXPIRED: "sign-in has expired",
}
_GUIDE = "docs/operations.md, “Sign-in”"
_MORE = {
    How.LOCAL: f"Before others can reach it, configure a sign-in: {_GUIDE}.",
    How.OPEN: f"Whoever acts is written down, so a sign-in is needed: {_GUIDE}.",
}


def corner(person: Person) -> None:
    """Show at the top right who one is and as what, with the way out or in."""
    with st.container(key="qw-person", horizontal=True, vertical_alignment="center"):
        st.html(chip(person))
        if person.how is How.SIGNED_IN:
            st.button("Sign out", key="sign-out", on_click=st.logout, type="tertiary")
        elif person.how in (How.SIGNED_OUT, How.EXPIRED):
            _sign_in(primary=False)


def chip(person: Person) -> Html:
    """Return role and name; what that means shows on opening it."""
    name = person.name if person.how is How.SIGNED_IN else _SHORT[person.how]
    shown = tag("summary", tag("b", person.role.word), tag("span", name, class_="qw-person-name"))
    more = _MORE.get(person.how)
    sentences = [tag("p", person.words), *([tag("p", more)] if more else [])]
    return tag("details", shown, tag("div", *sentences), class_="qw-person")


def refusal(person: Person) -> None:
    """Show the page of somebody who may not look, with what helps."""
    with st.container(key="qw-door"):
        if person.how is How.BROKEN:
            st.html(_broken(person))
        elif person.how is How.SIGNED_IN:
            st.html(_without_role(person))
            st.button("Sign out", key="sign-out", on_click=st.logout)
        else:
            st.html(_sign_in_card(person))
            _sign_in(primary=True)


def _sign_in(*, primary: bool) -> None:
    """Show a button for each provider; the only one needs no name."""
    names = access.providers()
    for name in names:
        label = "Sign in" if len(names) == 1 or name is None else f"Sign in with {name}"
        if st.button(label, key=f"sign-in-{name}", type="primary" if primary else "tertiary"):
            _login(name)


def _login(name: str | None) -> None:
    try:
        st.login(name)
    except StreamlitAuthError as error:
        st.html(state("The sign-in is not configured correctly", str(error)))


def _sign_in_card(person: Person) -> Html:
    # Providers send everybody back to the first page.
    later = ["After signing in, open your link once more."] if st.query_params else []
    if person.how is How.EXPIRED:
        return state("Your sign-in has expired", f"{person.words} Sign in to go on.", *later)
    what = "It shows how quantized models compare with their reference, where, and since when."
    return state("Sign in to quantwatch", what, *later)


def _without_role(person: Person) -> Html:
    title, ask = "You have no role here yet", "Ask whoever looks after this service"
    if "@" not in person.name:
        why = "Your provider vouches for no e-mail address, so none can give you a role."
        return state(title, person.words, why, f"{ask} to give one to a group that you are in.")
    return state(
        title,
        person.words,
        f"{ask} for the role viewer (reading), operator (runs, baselines and alerts as well) or "
        "admin (everything). It is one line in quantwatch.toml; then reload this page:",
        command=f'[dashboard.roles]\nviewer = ["{person.name}"]',
    )


def _broken(person: Person) -> Html:
    return state(
        "The sign-in is not configured correctly",
        person.words,
        f"Nobody may look until that is mended; {_GUIDE}, has an example.",
    )
