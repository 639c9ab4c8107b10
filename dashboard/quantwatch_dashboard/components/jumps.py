"""Pictures whose points lead to a run: a click opens its page.

The run's id is the last of a point's `customdata`.
"""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from quantwatch_dashboard.logic.exports import file_name

_ID_LENGTH = 26


def chart(figure: go.Figure, key: str, alt: str, name: str) -> str | None:
    """Show a picture; return the run of the point that was clicked, None without a click."""
    config = {
        "displaylogo": False,
        "toImageButtonOptions": {"format": "png", "filename": file_name(name), "scale": 2},
    }
    figure.update_layout(dragmode="zoom")
    event: Any = st.plotly_chart(
        figure, key=key, config=config, alt=alt, on_select="rerun", selection_mode="points"
    )
    return clicked((event or {}).get("selection", {}).get("points", ()))


def clicked(points: Sequence[Any]) -> str | None:
    """Return the run of the point that was clicked, None without one."""
    data = points[0].get("customdata") if points else None
    if isinstance(data, dict):
        data = [data[name] for name in sorted(data)]
    run = data[-1] if isinstance(data, (list, tuple)) and data else None
    return run if isinstance(run, str) and len(run) == _ID_LENGTH else None
