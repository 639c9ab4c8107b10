"""Clicks on pictures: the token and the layer that was hit go into the address.

A picture's points carry their scope, prompt and position as `customdata`; those of a layer chart
end with their scope.
"""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from quantwatch_dashboard.exports import file_name
from quantwatch_dashboard.series import place_key


def chart(figure: go.Figure, key: str, alt: str, name: str) -> None:
    """Show a picture whose points can be clicked; its own button saves it as `name`.png."""
    config = {
        "displaylogo": False,
        "toImageButtonOptions": {"format": "png", "filename": file_name(name), "scale": 2},
    }
    figure.update_layout(dragmode="zoom")
    st.plotly_chart(
        figure, key=key, config=config, alt=alt, on_select=_chosen(key), selection_mode="points"
    )


def _chosen(key: str) -> Callable[[], None]:
    def note() -> None:
        state: Any = st.session_state.get(key)
        points = list((state or {}).get("selection", {}).get("points", ()))
        data = points[0].get("customdata") if points else None
        if isinstance(data, dict):
            data = [data[name] for name in sorted(data)]
        if isinstance(data, (list, tuple)) and data:
            _note(list(data))

    return note


def _note(data: list[Any]) -> None:
    """Write what was clicked into the address: of a cell all three, of a layer chart its scope."""
    if len(data) == 3 and isinstance(data[0], str) and _whole(data[1]) and _whole(data[2]):
        scope, prompt, position = data
        st.query_params["prompt"] = str(int(prompt))
        st.query_params["position"] = str(int(position))
    else:
        scope = data[-1]
    if isinstance(scope, str) and scope:
        st.query_params["layer"] = place_key(scope)


def _whole(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdecimal()
    return isinstance(value, (int, float)) and float(value).is_integer()
