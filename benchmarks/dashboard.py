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
import time
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
from dashboard_server import WAIT_S, percentile, server
from playwright.sync_api import Browser, Page, sync_playwright

from quantwatch.domain import Verdict
from quantwatch.store.overview import check_states
from quantwatch.store.session import open_database
from quantwatch_dashboard import views
from quantwatch_dashboard.launch import serving

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
WAIT_MS = 1000 * WAIT_S
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
        with serving(args.url, WAIT_S) as address:
            if args.paints:
                figures["browser"] = paints(address, found, args.paints)
            if args.sessions:
                figures["memory"] = memory(address, found, args.sessions)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
