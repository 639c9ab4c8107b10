"""Take the pictures of the README: overview and run page of a database, in a real browser.

python docs/make_screenshots.py --database sqlite:///quantwatch.db --out docs/
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from quantwatch_dashboard.launch import serving

CHROMIUM = os.environ.get("QUANTWATCH_CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
PAGES = {"overview": ("", ".qw-overview", 760), "run": ("run", ".js-plotly-plot", 2440)}
"""Name → path, what must be visible, height of the picture."""
MAX_BYTES = 400_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the dashboard on loopback, take the pictures, stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True, help="SQLAlchemy URL of a filled database")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the pictures")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with serving(given.database) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for name in PAGES:
            picture = take(browser, address, name, given.out)
            sys.stdout.write(f"{picture} ({picture.stat().st_size / 1000:.0f} kB)\n")
        browser.close()


def take(browser: Browser, address: str, name: str, out: Path) -> Path:
    """Take one page's picture. Raises ValueError when the file is too large for a repository."""
    path, awaited, height = PAGES[name]
    page = browser.new_page(viewport={"width": 1440, "height": height}, color_scheme="light")
    page.goto(f"{address}/{path}")
    page.wait_for_selector(awaited, timeout=60_000)
    page.wait_for_selector("[data-testid=stStatusWidget]", state="detached", timeout=60_000)
    page.wait_for_timeout(1_500)  # Plotly's and Streamlit's transitions
    picture = out / f"{name}.png"
    page.screenshot(path=picture)
    page.close()
    if picture.stat().st_size > MAX_BYTES:
        raise ValueError(f"{picture} has {picture.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return picture


if __name__ == "__main__":
    main()
