"""Pictures: plain ones, and those whose points can be clicked; each saves itself as PNG.

A cell's `customdata` are scope, prompt and position; a layer chart's end with their scope, those of
a trend with the id of their run.
"""

from collections.abc import Callable, Iterable
from typing import Any

import plotly.graph_objects as go
import streamlit as st

from quantwatch_dashboard.logic.exports import file_name
from quantwatch_dashboard.logic.series import place_key

_ID_LENGTH = 26


def show(figure: go.Figure, key: str, alt: str, name: str) -> None:
    """Show a picture; its own button saves it as `name`.png."""
    st.plotly_chart(figure, key=key, config=_config(name), alt=alt)


def choose(figure: go.Figure, key: str, alt: str, name: str) -> None:
    """Show a picture; the token and the layer that are clicked go into the address."""
    figure.update_layout(dragmode="zoom")
    st.plotly_chart(
        figure, key=key, config=_config(name), alt=alt, on_select=_chosen(key),
        selection_mode="points",
    )  # fmt: skip


def jump(figure: go.Figure, key: str, alt: str, name: str) -> str | None:
    """Show a picture; return the run of the point that was clicked, None without a click."""
    figure.update_layout(dragmode="zoom")
    event: Any = st.plotly_chart(
        figure, key=key, config=_config(name), alt=alt, on_select="rerun", selection_mode="points"
    )
    return run_of(_points(event))


def run_of(points: Iterable[Any]) -> str | None:
    """Return the run of the point that was clicked, None without one."""
    data = _data(points)
    run = data[-1] if data else None
    return run if isinstance(run, str) and len(run) == _ID_LENGTH else None


def _config(name: str) -> dict[str, Any]:
    saved = {"format": "png", "filename": file_name(name), "scale": 2}
    return {"displaylogo": False, "toImageButtonOptions": saved}


def _points(event: Any) -> list[Any]:
    return list((event or {}).get("selection", {}).get("points", ()))


def _data(points: Iterable[Any]) -> list[Any]:
    """Return what the first point carries: Streamlit may make an object of a list."""
    data = next((point.get("customdata") for point in points), None)
    if isinstance(data, dict):
        data = [data[name] for name in sorted(data)]
    return list(data) if isinstance(data, (list, tuple)) else []


def _chosen(key: str) -> Callable[[], None]:
    def note() -> None:
        data = _data(_points(st.session_state.get(key)))
        if data:
            _note(data)

    return note


def _note(data: list[Any]) -> None:
    """Write what was clicked into the address: of a cell all three, of a layer chart its scope."""
    if len(data) == 3 and isinstance(data[0], str) and _whole(data[1]) and _whole(data[2]):
        scope, prompt, position = data
        st.query_params["prompt"] = str(int(prompt))
        st.query_params["token"] = str(int(position))
    else:
        scope = data[-1]
    if isinstance(scope, str) and scope:
        st.query_params["layer"] = place_key(scope)


def _whole(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdecimal()
    return isinstance(value, (int, float)) and float(value).is_integer()
