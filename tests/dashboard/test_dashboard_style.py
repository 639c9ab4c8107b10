"""The style sheet and the markup that it dresses: each knows the other's classes."""

import re
from collections.abc import Iterator
from pathlib import Path

import quantwatch_dashboard

ROOT = Path(quantwatch_dashboard.__file__).parent
SHEET = (ROOT / "components/style.css").read_text(encoding="utf-8")
FOREIGN = {"stApp", "stMain", "stMainBlockContainer", "js-plotly-plot", "xtick", "ytick"}
FOREIGN |= {"cbaxis", "g-xtitle", "g-ytitle", "cbtitle"}
"""Classes of Streamlit and Plotly."""


def selectors() -> Iterator[str]:
    plain = re.sub(r"/\*.*?\*/", "", SHEET, flags=re.DOTALL)
    yield from (part.group(1) for part in re.finditer(r"([^{};]+)\{", plain))


def styled() -> set[str]:
    names = {name for each in selectors() for name in re.findall(r"\.([a-zA-Z][\w-]*)", each)}
    return {name.removeprefix("st-key-") for name in names - FOREIGN}


def used() -> set[str]:
    """Return what the sources name; a name that ends with a dash is the beginning of several."""
    found: set[str] = set()
    for path in ROOT.rglob("*.py"):
        found |= set(re.findall(r"(?<!-)\bqw-[a-z-]*", path.read_text(encoding="utf-8")))
    return found


def test_every_class_has_a_style() -> None:
    """Catches a class that was misspelt, or whose rules are gone."""
    plain = {name for name in used() if not name.endswith("-")}

    assert plain - styled() == set()


def test_every_style_has_a_class() -> None:
    """Catches rules that dress nothing any more, and classes without the package's prefix."""
    begun = tuple(name for name in used() if name.endswith("-") and name != "qw-")

    assert {name for name in styled() - used() if not name.startswith(begun)} == set()
