"""How fast the dashboard is on a filled database. Prints JSON.

    python benchmarks/fill.py --url sqlite:////tmp/filled.db
    python benchmarks/dashboard.py --url sqlite:////tmp/filled.db

Server: each page by Streamlit's own test runner, with every cache empty (cold) and again (warm), as
wall and as CPU time; its queries and its figures are counted on the way. Browser: first paint and
the time until a page has drawn itself, in headless Chromium. Memory: of a real server while
sessions are opened and closed. Pages are those of `views.pages()`.
"""

import argparse
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlencode

import numpy as np
import psutil
import streamlit as st
from playwright.sync_api import Browser, Page, sync_playwright
from sqlalchemy import Engine, event
from sqlalchemy.engine.cursor import CursorFetchStrategy
from streamlit.testing.v1 import AppTest

from quantwatch.domain import Verdict
from quantwatch.store.overview import check_states
from quantwatch.store.session import open_database
from quantwatch_dashboard import views
from quantwatch_dashboard.launch import serving

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
WAIT_MS = 300_000
MOST_CELLS, MOST_BYTES = 200_000, 2_000_000
_BUSY = "[data-testid=stStatusWidget]"
_DRAWN = ".qw-head, .qw-state, [class^=qw-]"


@dataclass(frozen=True, slots=True)
class Case:
    """One page with what its address names."""

    title: str
    path: str
    script: str
    query: dict[str, str]

    @property
    def address(self) -> str:
        """Path and query."""
        return f"/{self.path}?{urlencode(self.query)}"


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


def cases(url: str) -> list[Case]:
    """Return each page with a check that has a regression, and a run and a candidate of it."""
    known: list[Any] = []

    def note(function: Callable[[], None], **options: Any) -> Any:
        known.append((function, options))
        return SimpleNamespace()

    with mock.patch.object(st, "Page", note):
        views.pages()
    query = _query(url)
    return [
        Case(
            str(options.get("title") or function.__module__),
            str(options.get("url_path") or ""),
            f"from {function.__module__} import {function.__name__}\n{function.__name__}()",
            query if options.get("url_path") != "overview" else {},
        )
        for function, options in known
    ]


def _query(url: str) -> dict[str, str]:
    database = open_database(url, read_only=True)
    states = [state for state in check_states(database) if state.decided is not None]
    database.close()
    if not states:
        return {}
    order = list(Verdict)
    worst = min(states, key=lambda s: order.index(s.decided.verdict or Verdict.PASS))
    assert worst.decided is not None
    return {"check": worst.check, "run": worst.decided.run_id}


def server(found: list[Case], repeats: int) -> dict[str, Any]:
    """Time each page without a browser."""
    figures: dict[str, Any] = {}
    queries = Queries()
    queries.watch()
    for case in found:
        page = AppTest.from_string(case.script, default_timeout=WAIT_MS / 1000)
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


@contextmanager
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(FLAGS), timeout=WAIT_MS
        )
        yield found
        found.close()


def paints(address: str, found: list[Case], repeats: int) -> dict[str, Any]:
    """Time each page in a browser whose cache is warm, as the second page of a session is."""
    figures = {}
    with browser() as chromium:
        for case in found:
            first, drawn = [], []
            context = chromium.new_context(viewport={"width": 1280, "height": 800})
            for _ in range(repeats + 1):
                page = context.new_page()
                began = time.perf_counter()
                _open(page, address + case.address)
                drawn.append((time.perf_counter() - began) * 1000)
                first.append(_first_paint(page))
                page.close()
            context.close()
            figures[case.title] = {
                "first_paint_ms": {"first": round(first[0]), "p50": percentile(first[1:], 50)},
                "drawn_ms": {"first": round(drawn[0]), "p50": percentile(drawn[1:], 50)},
            }
    return figures


def _open(page: Page, address: str) -> None:
    page.set_default_timeout(WAIT_MS)
    page.goto(address)
    page.wait_for_selector(_DRAWN, state="attached")
    page.wait_for_selector(_BUSY, state="detached")


def _first_paint(page: Page) -> float:
    words = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN"
    return float(page.evaluate(words))


def memory(address: str, found: list[Case], sessions: int) -> dict[str, Any]:
    """Watch the server's memory while sessions come and go, each on the next page."""
    process = _server_of(int(address.rsplit(":", 1)[1]))
    seen = []
    with browser() as chromium:
        for number in range(sessions):
            context = chromium.new_context()
            _open(context.new_page(), address + found[number % len(found)].address)
            context.close()
            seen.append(round(process.memory_info().rss / 1e6, 1))
    half = seen[len(seen) // 2 :]
    slope = float(np.polyfit(range(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
    return {
        "sessions": sessions,
        "rss_mb": seen[:: max(1, sessions // 10)],
        "rss_mb_end": seen[-1],
        "mb_per_session_second_half": round(slope, 3),
    }


def _server_of(port: int) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        if str(port) in child.cmdline():
            return child
    raise RuntimeError(f"no process of ours serves port {port}")


def percentile(values: Any, which: float) -> float:
    """Return a percentile, to a tenth."""
    return round(float(np.percentile(list(values), which)), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--paints", type=int, default=3, help="times each page is drawn; 0: none")
    parser.add_argument("--sessions", type=int, default=50, help="0: memory is not watched")
    args = parser.parse_args()
    os.environ["QUANTWATCH_DATABASE_URL"] = args.url
    found = cases(args.url)
    figures = {"database": args.url.split(":", 1)[0], "cores": len(os.sched_getaffinity(0))}
    figures["load"] = os.getloadavg()[0]
    figures |= server(found, args.repeats)
    if (args.paints or args.sessions) and Path(CHROMIUM).exists():
        with serving(args.url, WAIT_MS / 1000) as address:
            if args.paints:
                figures["browser"] = paints(address, found, args.paints)
            if args.sessions:
                figures["memory"] = memory(address, found, args.sessions)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
