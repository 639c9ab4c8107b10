"""The script that `streamlit run` executes: page configuration and navigation, nothing else."""

import streamlit as st

from quantwatch_dashboard import views

st.set_page_config(page_title="quantwatch", page_icon="🔎", layout="wide")
st.navigation(views.pages(), position="top").run()
