"""The article's layer table: numbers as everywhere else, the place that broke marked."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
import streamlit as st

from quantwatch_dashboard import text
from quantwatch_dashboard.series import LayerRow

_HEADERS = {
    "layer": "Layer",
    "mean_kl": "Mean KL, nats",
    "p99_kl": "p99",
    "max_kl": "max",
    "top3_logit_deviation": "Mean top-3 logit deviation",
    "isolated_error": "Isolated error",
    "rel_error": "Relative error",
    "num_nonfinite": "Not finite",
}
_ROW_HEIGHT, _MAX_ROWS = 29, 36
_MARKED = "background-color: rgba(229, 72, 77, 0.16); font-weight: 650"


def layer_table(rows: Sequence[LayerRow], marked: str | None) -> None:
    """Show one row per layer, sortable by number; `marked` is the layer to be seen first."""
    # Object columns: a float column would turn "not measured" into NaN.
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(_HEADERS), dtype=object)
    if not any(row.num_nonfinite for row in rows):
        frame = frame.drop(columns="num_nonfinite")
    numbers = [name for name in frame.columns if name not in ("layer", "num_nonfinite")]
    styled = frame.style.format(dict.fromkeys(numbers, _shown))
    styled = styled.apply(
        lambda row: [_MARKED if row["layer"] == marked else ""] * len(row), axis=1
    )
    st.dataframe(
        styled,
        hide_index=True,
        row_height=_ROW_HEIGHT,
        height=_ROW_HEIGHT * min(len(rows), _MAX_ROWS) + 38,
        column_config=_HEADERS,
    )


def _shown(value: Any) -> str:
    return text.number(value)
