"""`quantwatch kernels allocate`: a recipe file for a number of bits per weight."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quantwatch.cli.output import show_json
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import say, whisper
from quantwatch.errors import UserError
from quantwatch.telemetry import check_writable

if TYPE_CHECKING:
    from quantwatch.kernel_lab.allocate import Allocated, Wanted


MOST_GRID_BITS = 15.5
"""A bfloat16 model has 16, less what is stored in fewer; GGUF's largest grid, Q8_0, has 8.5."""


class Texts(NamedTuple):
    """What is measured, and what the recipe is calibrated on."""

    measured: Path | None
    windows: int
    source: str
    calibration_windows: int
    tokens: int
    """About so many tokens of the calibration texts are used for sensitivities."""


def names(text: str) -> tuple[str, ...]:
    """Return the formats of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def wanted(target: float, formats: str, embedding: str, probe: str | None, **weights: Any) -> Any:
    """Return what is asked for. Raises UserError for what can't be."""
    from quantwatch.kernel_lab.allocate import Wanted

    return Wanted(target, names(formats), names(embedding), probe, tell=whisper, **weights)


def allocate(session: Session, model: str, wish: "Wanted", texts: Texts, out: Path) -> None:
    """Run the command. Raises UserError before anything is measured for an --out that can't be."""
    from quantwatch.kernel_lab.allocate import make_recipe
    from quantwatch.kernel_lab.calibrating import choose_calibration
    from quantwatch.kernel_lab.recipe_files import write_recipe
    from quantwatch.kernel_lab.references import load_reference, yardstick

    if out.suffix != ".toml":
        raise UserError(f"--out {out}: a recipe is a .toml file")
    check_writable(out)
    loaded = load_reference(model, cache_dir(), off_grid_seed=None)
    chosen = choose_calibration(
        loaded.tokenizer,
        texts.source,
        texts.measured,
        windows=texts.calibration_windows,
        skip=texts.windows,
    )
    measured = yardstick(loaded, texts.measured, windows=texts.windows)
    try:
        found = make_recipe(measured, wish, chosen.inputs, chosen.section, tokens=texts.tokens)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{model}: {error}") from error
    lines = summary(model, wish, found, f"{measured.text.name}; calibrated on {chosen.note}")
    lines += on_a_grid(model, loaded.variant.bits_per_weight)
    write_recipe(out, found.recipe, lines)
    if session.json:
        show_json(document(found, out))
    else:
        say("\n".join([*lines, f"wrote {out}", ""]))


def summary(model: str, wish: "Wanted", found: "Allocated", text: str) -> list[str]:
    """Return what the file says of itself: target, size, predicted and measured KL."""
    figures, again = found.measured, found.again
    return [
        f"Made by `quantwatch kernels allocate {model} --target-bpw {wish.target_bpw:g}`.",
        f"{figures.bits_per_weight:.4f} bits per weight, {figures.size_bytes} bytes, everything "
        "counted.",
        f"Measured on {text}.",
        f"KL {figures.kl:.4g} ± {figures.kl_se:.2g} nats per token ({figures.num_tokens} tokens), "
        f"same top-1 {figures.same_top1:.1%}, perplexity {figures.ppl:.3f} "
        f"(reference {figures.ppl_reference:.3f}).",
        f"On the texts of the sensitivities: predicted {found.allocation.cost:.4g}, measured "
        f"{again.kl:.4g}: {found.additivity:.2f} times what the layers cost alone.",
    ]


def on_a_grid(model: str, bits_per_weight: float | None) -> list[str]:
    """Say when a model's weights are quantized already: going back to their grid costs too little.

    Weights stored in fewer than 16 bits lie on a grid, whatever they are computed in.
    """
    if bits_per_weight is None or bits_per_weight >= MOST_GRID_BITS:
        return []
    return [
        f"Careful: {model} is stored in {bits_per_weight:.2f} bits per weight. Its weights lie on "
        "a grid, so these KL are too small for others: see `quantwatch kernels off-grid`."
    ]


def document(found: "Allocated", out: Path) -> dict[str, Any]:
    """Return the same as JSON data, with the format of each item."""
    figures = found.measured
    return {
        "recipe": str(out),
        "bits_per_weight": figures.bits_per_weight,
        "size_bytes": figures.size_bytes,
        "kl": figures.kl,
        "kl_se": figures.kl_se,
        "same_top1": figures.same_top1,
        "ppl": figures.ppl,
        "predicted_kl": found.allocation.cost,
        "measured_kl_there": found.again.kl,
        "additivity": found.additivity,
        "formats": {
            name: option.name
            for name, option in zip(found.names, found.allocation.options, strict=True)
        },
    }
