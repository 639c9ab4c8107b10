"""Pure functions from data to Plotly figures. No Streamlit, no database."""
