"""The script that `streamlit run` executes: page configuration, access and navigation."""

import streamlit as st

from quantwatch_dashboard import access, views
from quantwatch_dashboard.components import page, person
from quantwatch_dashboard.roles import Role

st.set_page_config(page_title="quantwatch", page_icon="🔎", layout="wide")
who = access.current()
chosen = st.navigation(views.pages(), position="top" if who.may(Role.VIEWER) else "hidden")
if who.may(Role.VIEWER):
    person.corner(who)
    chosen.run()
else:
    page.begin()
    person.refusal(who)
