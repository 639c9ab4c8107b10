"""The shipped recipes from 8.5 down to 4 bits per weight, beside llama.cpp's types of that size.

One recipe file per row (`recipes/ladder/bpw-BITS.toml`; the name says how many bits it may take).
Everything is counted in bits per weight: codes, scales, zero points, norms in float32, the tied
embedding once. A recipe is calibrated as its file says, as in a check that names it, except on what
is measured; with a text on later windows of it, too. llama.cpp's types used no calibration.

llama.cpp's figures and the bars belong to one protocol: SmolLM2-135M-Instruct off its 4-bit grid on
8 windows of WikiText-2's test text. They are shown only where the reference's perplexity is the one
they were measured at, so that no figure is held against another text's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import quantwatch
from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.config.recipes import load_recipe
from quantwatch.errors import UserError
from quantwatch.kernel_lab.calibrating import of_section
from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables.model import Cell, Column, Rows, Table, TableRequest
from quantwatch.kernel_lab.tables.peers import is_peers, not_peers_note
from quantwatch.kernel_lab.texts import Text, calibration_text
from quantwatch.models.recipes import kernel_recipe
from quantwatch_kernels.quantize.recipe import Recipe

_WINDOWS = 16
"""Later windows of a text that a recipe is calibrated on: 8,192 tokens."""
_COLUMNS = (
    Column("recipe", "recipe"),
    Column("calibration", "calibrated on"),
    Column("budget", "bits per weight, at most", "g"),
    Column("bits_per_weight", "bits per weight", ".4f"),
    Column("kl", "mean KL, nats", ".5f"),
    Column("kl_se", "± se", ".5f"),
    Column("same_top1", "same top-1", ".1%"),
    Column("ppl", "PPL", ".3f"),
    Column("peer", "llama.cpp at that size"),
    Column("peer_kl", "its mean KL", ".5f"),
    Column("reach", "to reach", ".4f"),
    Column("reached", "reached"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row is held against, on the peers' protocol."""

    reach: float
    peer: str | None = None
    peer_kl: float | None = None


BARS: dict[float, Bar] = {
    8.5: Bar(0.0008, "Q8_0", 0.00423),
    8.1: Bar(0.0015, "Q6_K", 0.01052),
    6.56: Bar(0.012, "Q5_K_M", 0.0477),
    6.17: Bar(0.020, "Q4_K_M", 0.0748),
    5.35: Bar(0.060, "IQ4_XS", 0.2215),
    4.85: Bar(0.120),
    4.0: Bar(0.25),
}
"""By budget; llama.cpp's smallest for this model, Q2_K, takes 5.14."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A recipe file and the bits per weight that it may take."""

    name: str
    budget: float
    recipe: Recipe
    calibration: CalibrationConfig | None = None
    """The file's own section."""


def recipes_folder() -> Path:
    """Return where the recipe files are: in the package, or beside it in a clone.

    Raises UserError when they are in neither place.
    """
    package = Path(quantwatch.__file__).parent
    for folder in (package / "_recipes", package.parents[1] / "recipes"):
        if (folder / "ladder").is_dir():
            return folder
    raise UserError("this installation has no recipes: neither quantwatch/_recipes nor recipes/")


def rungs(folder: Path) -> list[Rung]:
    """Return the recipes `bpw-BITS.toml` of a folder, the largest budget first.

    Raises UserError for another name and where there are none, ConfigError for a bad file.
    """
    read = {path: load_recipe(path) for path in folder.glob("*.toml")}
    found = [
        Rung(path.stem, _budget(path), kernel_recipe(recipe), recipe.calibration)
        for path, recipe in read.items()
    ]
    if not found:
        raise UserError(f"{folder} holds no recipe")
    return sorted(found, key=lambda rung: -rung.budget)


def _budget(path: Path) -> float:
    kind, _, bits = path.stem.partition("-")
    try:
        if kind == "bpw":
            return float(bits)
    except ValueError:
        pass
    raise UserError(f"{path}: a recipe of the ladder is called bpw-BITS.toml, e.g. bpw-6.17.toml")


def build(request: TableRequest) -> Table:
    """Quantize and measure one row per recipe and calibration."""
    ladder = rungs(recipes_folder() / "ladder")
    loaded = load_reference(request.model, request.cache_dir, off_grid_seed=request.seed)
    measured = yardstick(loaded, request.text, windows=request.windows)
    rows = Rows(_COLUMNS, request.tell)
    comparable = False
    for own in [True] if request.text is None else [False] if request.quick else [False, True]:
        for rung in (ladder[0], ladder[-1]) if request.quick else ladder:
            name, texts = _texts(rung, own, loaded.tokenizer, measured.text, request)
            request.tell(f"{rung.name}, calibrated on {name}")
            figures = _measure(measured, rung.recipe, texts)
            comparable = is_peers(request, figures)
            bar = BARS.get(rung.budget) if comparable else None
            rows.add(rung.name, name, *_row(rung, figures, bar))
    return Table("Ladder of recipes", _COLUMNS, tuple(rows), _notes(request, measured, comparable))


def _texts(
    rung: Rung, own: bool, tokenizer: object, measured: Text, request: TableRequest
) -> tuple[str, list[Tensor]]:
    """Return what a recipe is calibrated on, by its own section or not: never what is measured."""
    if rung.calibration is None:
        return "nothing", []
    if own:
        found = of_section(rung.calibration, tokenizer, measured)
        return found.note, found.inputs
    skip = request.windows or 8
    return "later windows", calibration_text(tokenizer, request.text, skip=skip, windows=_WINDOWS)


def _measure(measured: Yardstick, recipe: Recipe, texts: Sequence[Tensor]) -> Figures:
    return measured.try_recipe(recipe, calibration=texts if recipe.calibrated else None)


def _row(rung: Rung, figures: Figures, bar: Bar | None) -> tuple[Cell, ...]:
    """Return the cells behind the names; without a bar nothing is said to be reached."""
    within = figures.bits_per_weight <= rung.budget
    return (
        *(rung.budget, figures.bits_per_weight, figures.kl, figures.kl_se),
        *(figures.same_top1, figures.ppl),
        *((None, None, None) if bar is None else (bar.peer, bar.peer_kl, bar.reach)),
        None if bar is None else within and figures.kl <= bar.reach,
    )


def _notes(request: TableRequest, measured: Yardstick, comparable: bool) -> tuple[str, ...]:
    notes = [
        f"{request.model} off its grid (seed {request.seed}), {measured.text.name}, "
        f"{measured.text.num_scored} scored tokens, execution dequantized, float32 activations",
        f"calibrated as the recipe file says, without what is measured; later windows: {_WINDOWS}",
        "reached: at most so many bits, everything counted, and a mean KL of at most the bar",
    ]
    if not comparable:
        notes.append(not_peers_note("llama.cpp's figures and the bars"))
    else:
        notes.append(
            "llama.cpp's kernels round activations to 8 bits as well: Q8_0's weights alone 0.00137"
        )
    return tuple(notes)
