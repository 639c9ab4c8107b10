"""The server's half of benchmarks/dashboard.py: pages without a browser, their queries, figures."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import streamlit as st
from sqlalchemy import Engine, event
from sqlalchemy.engine.cursor import CursorFetchStrategy
from streamlit.testing.v1 import AppTest

WAIT_S = 300


class Queries:
    """Times every statement of this process: until its last row is fetched, as wall and CPU."""

    def __init__(self) -> None:
        self.spent: dict[str, list[list[float]]] = defaultdict(list)
        self.count = 0

    def watch(self) -> None:
        """Listen from now on."""
        event.listen(Engine, "before_cursor_execute", self._begin)
        event.listen(Engine, "after_cursor_execute", self._end)
        for name in ("fetchone", "fetchmany", "fetchall"):
            setattr(CursorFetchStrategy, name, _timing(getattr(CursorFetchStrategy, name)))

    def slowest(self, most: int = 5) -> list[dict[str, Any]]:
        """Return the statements with the largest p95."""
        found = [
            {
                "p95_ms": percentile([wall for wall, _ in spent], 95),
                "p95_cpu_ms": percentile([cpu for _, cpu in spent], 95),
                "times": len(spent),
                "statement": words,
            }
            for words, spent in self.spent.items()
        ]
        return sorted(found, key=lambda each: -float(each["p95_cpu_ms"]))[:most]

    def _begin(self, _c: Any, _cursor: Any, _words: str, _v: Any, context: Any, _m: Any) -> None:
        context.quantwatch_began = _clocks()

    def _end(self, _c: Any, _cursor: Any, words: str, _v: Any, context: Any, _m: Any) -> None:
        self.count += 1
        entry = context.quantwatch_spent = [0.0, 0.0]
        _add(entry, context.quantwatch_began)
        self.spent[re.sub(r"\s+", " ", words)[:300]].append(entry)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def _add(entry: list[float], began: tuple[float, float]) -> None:
    for i, (now, then) in enumerate(zip(_clocks(), began, strict=True)):
        entry[i] += (now - then) * 1000


def _timing(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Add the time of a fetch to its statement: SQLite works while rows are fetched."""

    def timed(strategy: Any, result: Any, *args: Any) -> Any:
        began = _clocks()
        try:
            return fetch(strategy, result, *args)
        finally:
            _add(getattr(result.context, "quantwatch_spent", [0.0, 0.0]), began)

    return timed


def server(found: Sequence[Any], repeats: int) -> dict[str, Any]:
    """Time each page without a browser."""
    figures: dict[str, Any] = {}
    queries = Queries()
    queries.watch()
    for case in found:
        page = AppTest.from_string(case.script, default_timeout=WAIT_S)
        for key, value in case.query.items():
            page.query_params[key] = value
        # Once for the imports: a process that serves pages has them.
        page.run()
        assert not page.exception, (case.title, page.exception)
        cold = [_timed(page, clear=True) for _ in range(max(3, repeats // 4))]
        asked = queries.count
        _timed(page, clear=True)
        asked = queries.count - asked
        warm = [_timed(page) for _ in range(repeats)]
        figures[case.title] = {
            **_both("cold", cold),
            **_both("warm", warm),
            "queries_cold": asked,
            "figures": charts(page),
        }
    return {"pages": figures, "slowest_queries": queries.slowest()}


def _timed(page: AppTest, *, clear: bool = False) -> tuple[float, float]:
    if clear:
        st.cache_resource.clear()
        st.cache_data.clear()
    began, used = time.perf_counter(), time.process_time()
    page.run()
    return (time.perf_counter() - began) * 1000, (time.process_time() - used) * 1000


def _both(name: str, spent: list[tuple[float, float]]) -> dict[str, Any]:
    walls, cpus = zip(*spent, strict=True)
    return {
        f"{name}_ms": {"p50": percentile(walls, 50), "p95": percentile(walls, 95)},
        f"{name}_cpu_ms": {"p50": percentile(cpus, 50), "p95": percentile(cpus, 95)},
    }


def charts(page: AppTest) -> dict[str, Any]:
    """Count the figures of a page, the cells of the largest one and its bytes."""
    specs = [element.proto.spec for element in page.get("plotly_chart")]
    cells = [sum(map(_cells, json.loads(spec)["data"])) for spec in specs]
    return {
        "count": len(specs),
        "most_cells": max(cells, default=0),
        "most_bytes": max((len(spec.encode()) for spec in specs), default=0),
    }


def _cells(trace: dict[str, Any]) -> int:
    """Return how many values a trace holds along its largest array."""
    return max((_length(trace.get(name)) for name in ("x", "y", "z", "customdata")), default=0)


def _length(values: Any) -> int:
    if isinstance(values, dict):
        # Typed arrays travel as base64.
        width = int(re.sub(r"\D", "", values["dtype"]) or 8)
        width = width // 8 if width >= 8 else width
        return len(values["bdata"]) * 3 // 4 // max(1, width)
    if isinstance(values, list):
        return sum(len(row) if isinstance(row, list) else 1 for row in values)
    return 0


def percentile(values: Any, which: float) -> float:
    """Return a percentile, to a tenth."""
    return round(float(np.percentile(list(values), which)), 1)
