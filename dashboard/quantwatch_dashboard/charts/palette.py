"""Colors that hold on light and on dark paper and for color-blind readers.

Candidates differ by color, dash and marker. Cells of a heatmap that hold no finite positive number
have colors that the scale does not contain. Of verdicts as markup: style.css.
"""

SERIES = ("#4C8BE0", "#E0951B", "#159C7F", "#C4679F", "#7A6FD0", "#8A9A2B", "#30A5C4", "#A8703E")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid", "dash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
CULPRIT = "#E5484D"
"""For lines and marks; words are set by `ink`: no one red can be read on both papers."""
MUTED = "#8B919B"
CHOSEN = "#0B6BFF"
"""What the reader chose; red is kept for what broke."""
WARNED, UNDECIDED, IMPROVED = "#C2410C", "#8E6FE0", "#3B82F6"
CLEAR, WARN = "#0F8F6F", "#D97706"
"""A value within its limits, and one between the limit to enter and the one to leave."""
CHANGED = "#7A86A0"
OUTLINE = "#FFFFFF"
"""Around marks, so that they are seen on any color."""
_INKS = {CULPRIT: "light-dark(#be1e2d, #ff7b7b)", WARNED: "light-dark(#9a5b00, #ffb84d)"}
_SOFT = "light-dark(#566072, #a3adbd)"

INFERNO = (
    "#1B0C41", "#2F0A5B", "#4A0C6B", "#65156E", "#7F1E6C", "#992766", "#B2325A", "#C83F4B",
    "#DB503B", "#EB6628", "#F57D15", "#FB9A06", "#FBB91F", "#F6D746", "#FCFFA4",
)  # fmt: skip
"""Matplotlib's inferno without its black end: perceptual, color-blind safe, used everywhere."""

CHANGE = (
    "#053061", "#2166AC", "#4393C3", "#92C5DE", "#D1E5F0", "#F7F7F7", "#FDDBC7", "#F4A582",
    "#D6604D", "#B2182B", "#67001F",
)  # fmt: skip
"""ColorBrewer's RdBu, color-blind safe: blue is better, red is worse, nearly white is equal."""
BETTER, WORSE = CHANGE[2], CHANGE[8]

NOT_MEASURED = "#A3A9B3"
ZERO = "#33556E"
NEGATIVE_INFINITY = "#3B82F6"
POSITIVE_INFINITY = "#22C55E"
NAN = "#00D5E5"


def series_style(index: int) -> tuple[str, str, str]:
    """Return color, dash and marker of the candidate with this place in the run."""
    cycle = index % len(SERIES)
    return SERIES[cycle], DASHES[cycle], MARKERS[cycle]


def ink(words: str, color: str = MUTED) -> str:
    """Return escaped words of an annotation in the shade of a color that its paper asks for.

    Plotly knows one color for both papers, and none has enough contrast on both; a browser chooses.
    """
    return f'<span style="color:{_INKS.get(color, _SOFT)}">{words}</span>'
