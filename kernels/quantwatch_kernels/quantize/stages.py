"""What a recipe does to a model before and after its weights are quantized, in this order:

1. norm statistics and router logits of 16-bit models are made in float32;
2. rotation, since it decides which channels there are;
3. smoothing, in the rotated basis;
   — weights —
4. activations: quantizers in front of the converted linear layers. Static scales are observed on
   the model with quantized weights and unrounded activations;
5. the dtype of the residual stream.

Each step's report becomes (place, note): what was done to the whole model under its own name, what
could not be done under the place's.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from quantwatch_kernels.quantize.activations import add_activation_quantizer
from quantwatch_kernels.quantize.high_precision import keep_statistics_high_
from quantwatch_kernels.quantize.recipe import ActivationSpec, Recipe
from quantwatch_kernels.quantize.residual import round_residual_
from quantwatch_kernels.quantize.rotation import rotate_
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.smoothquant import smooth_
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["after_weights", "before_weights", "quantize_activations"]

Notes = list[tuple[str, str]]


def before_weights(
    model: nn.Module, recipe: Recipe, calibration: Sequence[Tensor] | None, names: Mapping[str, str]
) -> Notes:
    """Do steps 1 to 3 in place. Raises ValueError for what the model's structure doesn't allow."""
    notes = keep_statistics_high_(model)
    if recipe.rotation is not None:
        rotated = rotate_(model, recipe.rotation)
        notes += rotated.notes
        notes.append(("rotation", f"moved the logits by {rotated.logits_moved:.1e} of their size"))
    if recipe.smooth is not None:
        smoothed = smooth_(model, recipe.smooth, calibration or ())
        notes += smoothed.skipped
        count, moved = len(smoothed.smoothed), smoothed.logits_moved
        notes.append(("smoothing", f"{count} places; moved the logits by {moved:.1e}"))
    return [(names.get(place, place), note) for place, note in notes]


def after_weights(
    model: nn.Module,
    recipe: Recipe,
    layers: Sequence[Layer],
    calibration: Sequence[Tensor] | None,
    names: Mapping[str, str],
) -> Notes:
    """Do steps 4 and 5 in place; `layers` are the converted ones."""
    notes: Notes = []
    if recipe.activations is not None:
        notes += quantize_activations(model, recipe.activations, layers, calibration or ())
    if recipe.residual_dtype:
        dtypes = {layer.path: layer.weight.dtype for layer in layers}
        notes += round_residual_(model, recipe.residual_dtype, names, dtypes)
    return notes


def quantize_activations(
    model: nn.Module, spec: ActivationSpec, layers: Sequence[Layer], calibration: Sequence[Tensor]
) -> Notes:
    """Round the inputs of `layers`; embeddings have none. Calibrates static scales.

    Raises ValueError, naming the layer, where calibration doesn't reach one or isn't finite.
    """
    unrounded = {layer.key: why for layer in layers if (why := _why_not_rounded(layer))}
    linears = [layer for layer in layers if layer.key not in unrounded]
    walk = LayerWalk(model, calibration) if spec.static else None
    modules = [(layer.name, model.get_submodule(layer.path)) for layer in linears]
    quantizers = [
        add_activation_quantizer(module, name, spec)
        for name, module in modules
        if not isinstance(module, W8A8Linear)  # it rounds its input itself
    ]
    if walk is not None:
        # Made before: a walk runs the first layer once for itself, which would be observed twice.
        for quantizer in quantizers:
            quantizer.observe()
        for index in range(len(walk.layers)):
            walk.run(index)
        if any(not layer.path.startswith(_layers_path(walk)) for layer in linears):
            walk.finish(walk.hidden)
        for quantizer in quantizers:
            quantizer.freeze()
    return [(la.name, unrounded[la.key]) for la in layers if la.key in unrounded]


def _why_not_rounded(layer: Layer) -> str | None:
    if isinstance(layer.module, nn.Embedding):
        return "its input is not rounded: an embedding is looked up"
    if layer.expert is not None:
        return "its input is not rounded: stacked experts are no modules of their own"
    return None


def _layers_path(walk: LayerWalk) -> str:
    return walk.layers[0][0].rpartition(".")[0] + "."
