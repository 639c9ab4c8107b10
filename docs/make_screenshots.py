"""Take a picture of every page in a real browser, for README.md and docs/dashboard.md.

    python docs/make_screenshots.py                # of an invented month, see benchmarks/fill.py
    python docs/make_screenshots.py --database sqlite:///quantwatch.db --out /tmp/pictures

Each page in light, one in the dark, one on a phone. A picture that is too large is an error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, sync_playwright

from quantwatch_dashboard.launch import serving

CHROMIUM = os.environ.get("QUANTWATCH_CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
MAX_BYTES = 250_000
WAIT_MS = 120_000
MONTH = ("--checks", "17", "--nights", "30", "--layers", "30", "--candidates", "2")
"""A month of 17 checks: two with a fault, one that is not finite, one that fails, one that runs."""


@dataclass(frozen=True)
class Picture:
    """A page at an address; `awaited` is what it draws last."""

    address: str
    """`{run}` stands for the newest run of the worst check."""
    awaited: str = "h1"
    height: int = 1100
    width: int = 1280
    dark: bool = False
    top: str | None = None
    """Scrolls to this; the top of the page when absent."""


HEATMAP, LINES = ".heatmaplayer image", ".scatterlayer path"
PICTURES = {
    "overview": Picture("", ".qw-overview"),
    "operations": Picture("operations", ".qw-tiles"),
    "phone": Picture("", ".qw-overview", 844, 390),
    "check": Picture("check", LINES, 1240),
    "run": Picture("run", HEATMAP, 1500),
    "heatmap": Picture("run", HEATMAP, 1100, top="Inside: which layer, which token"),
    "dark": Picture("run", HEATMAP, 1100, dark=True),
    "compare": Picture("compare?run_a={run}&run_b={run}", HEATMAP, 1240),
    "alerts": Picture("alerts", ".qw-cards", 820),
    "kernels": Picture("kernels", LINES),
}
"""Name of the file → what is on it; first what ages: a service that was seen just now."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill a database unless one is named, start the dashboard on loopback, take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--database", help="SQLAlchemy URL of a filled database")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", nargs="*", choices=PICTURES, default=list(PICTURES))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        database = given.database or fill(Path(folder))
        with serving(database) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
            context = browser.new_context()
            context.set_default_timeout(WAIT_MS)
            for name in given.only:
                taken = take(context, address, name, given.out)
                sys.stdout.write(f"{taken} ({taken.stat().st_size / 1000:.0f} kB)\n")
            browser.close()


def fill(folder: Path) -> str:
    """Invent a month of nights; no model is needed."""
    url = f"sqlite:///{folder}/month.db"
    script = str(ROOT / "benchmarks" / "fill.py")
    subprocess.run([sys.executable, script, "--url", url, *MONTH], check=True, cwd=ROOT)
    return url


def take(context: BrowserContext, address: str, name: str, out: Path) -> Path:
    """Take one picture. Raises ValueError when the file is too large for a repository."""
    wanted, page = PICTURES[name], context.new_page()
    page.set_viewport_size({"width": wanted.width, "height": wanted.height})
    page.emulate_media(color_scheme="dark" if wanted.dark else "light")
    run = _worst_run(page, address) if "{run}" in wanted.address else ""
    page.goto(f"{address}/{wanted.address.format(run=run)}")
    _settle(page, wanted.awaited)
    if wanted.top is not None:
        heading = page.get_by_role("heading", name=wanted.top)
        heading.evaluate("e => e.scrollIntoView({block: 'start'})")
        page.mouse.wheel(0, -90)  # below the bar of the menu
        page.wait_for_timeout(500)
    picture = out / f"{name}.png"
    page.screenshot(path=picture)
    page.close()
    if picture.stat().st_size > MAX_BYTES:
        raise ValueError(f"{picture} has {picture.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    return picture


def _worst_run(page: Page, address: str) -> str:
    page.goto(f"{address}/run")
    link = page.get_by_role("link", name="compare with …").get_attribute("href") or ""
    return link.partition("run_b=")[2]


def _settle(page: Page, awaited: str) -> None:
    page.wait_for_selector(awaited)
    for busy in ("stStatusWidget", "stSkeleton"):
        page.wait_for_function(f"!document.querySelector('[data-testid={busy}]')")
    page.wait_for_timeout(1_500)  # Plotly's and Streamlit's transitions


if __name__ == "__main__":
    main()
