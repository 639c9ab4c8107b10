"""What a packed model is apart from its tensors, and the same model with empty tensors.

The checkpoint of a quantized model is its state dict as it is in memory, in the canonical packing
(`packing`): per layer `weight_packed` uint8, `scales`, `zeros` if there are any, and the bias; the
rest in floats. Beside it stands, for every packed layer by path, how its bits are to be read: the
spec, the shape [out, in] and the dtype of the scales. Nothing is inferred from the recipe again, so
a model that GPTQ or mixed precision packed is stored the same way as one rounded to nearest, and a
later change of the rules for selecting layers can't misread a checkpoint. What rotation, smoothing
or AWQ changed between modules is noted as well (`basis`): hidden states are compared by it.

Given up: only weights are stored. A model with quantized activations, rotations done online or
hooks on its residual stream is refused rather than saved without them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.api import linear_op
from quantwatch_kernels.quantize.basis import marks_to_json
from quantwatch_kernels.quantize.high_precision import KEEPS_STATISTICS
from quantwatch_kernels.quantize.packed_embedding import (
    PackedEmbedding,
    TiedHead,
    install_embedding,
    link_head,
    why_not_packed_embedding,
)
from quantwatch_kernels.quantize.packed_linear import (
    Buffers,
    LinearOp,
    PackedLike,
    PackedLinear,
)
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.quantize.recipe_json import spec_from_json
from quantwatch_kernels.registry import Fallback, record_fallback

__all__ = ["Layout", "Stored", "describe", "install_empty", "set_backend"]

_US = "quantwatch_kernels"
_KINDS = (PackedLinear, PackedEmbedding, TiedHead)
_MORE = {
    "_TransformsInput": "its input is transformed online, as by a rotation",
    "_TransformsOutput": "its output is transformed online, as by a rotation",
    "_RoundsStream": "the residual stream is rounded: residual_dtype",
    "_HandsOnComputeDtype": "the residual stream is widened: residual_dtype",
    "W8A8Linear": "its input is quantized",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Stored:
    """How the buffers of one packed layer are to be read."""

    spec: WeightSpec
    shape: tuple[int, int]
    """[out, in], or [ids, width] of an embedding."""
    scale_dtype: torch.dtype
    """Of the scales as they are stored, which the spec's own may differ from (`storable`)."""

    def to_json(self) -> dict[str, object]:
        """Return the description as JSON."""
        dtype = str(self.scale_dtype).removeprefix("torch.")
        return {**self.spec.to_json(), "shape": list(self.shape), "stored_scales": dtype}

    @classmethod
    def from_json(cls, values: object, where: str) -> "Stored":
        """Read a description; raises ValueError naming `where`, key, value and what is allowed."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a JSON object; it is {values!r:.80}.")
        spec = {key: values[key] for key in values if key not in ("shape", "stored_scales")}
        shape, dtype = values.get("shape"), values.get("stored_scales")
        whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
        if not whole or len(shape) != 2:  # type: ignore[arg-type]
            raise ValueError(f"{where}.shape is {shape!r:.80}; allowed: two positive numbers.")
        if dtype not in _DTYPES:
            raise ValueError(
                f"{where}.stored_scales is {dtype!r:.80}; allowed: {', '.join(_DTYPES)}."
            )
        rows, columns = shape  # type: ignore[misc]
        return cls(spec_from_json(spec, where), (rows, columns), _DTYPES[dtype])

    def empty(self, device: torch.device) -> Buffers:
        """Return buffers of the right shapes and dtypes, without values."""
        (rows, columns), fmt = self.shape, self.spec.format
        groups = -(-columns // self.spec.granularity.group_size(columns))
        width = (columns * fmt.bits + 7) // 8
        packed = torch.empty(rows, width, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, groups, dtype=self.scale_dtype, device=device)
        if self.spec.zero == "none":
            return Buffers(packed, scales, None)
        if self.spec.zero == "float":
            return Buffers(packed, scales, torch.empty_like(scales))
        width = (groups * fmt.bits + 7) // 8
        zeros = torch.empty(rows, width, dtype=torch.uint8, device=device)
        return Buffers(packed, scales, zeros)


@dataclass(frozen=True, slots=True)
class Layout:
    """The packed layers of a model by path, and the heads that are tied to a packed embedding."""

    layers: Mapping[str, Stored]
    tied: Mapping[str, str]
    """Path of a head → path of its embedding."""
    other_basis: Mapping[str, Any] = field(default_factory=dict)
    """Which modules take or give other hidden states than the float model's (`marks_to_json`)."""

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        layers = {path: stored.to_json() for path, stored in self.layers.items()}
        return {"layers": layers, "tied": dict(self.tied), "other_basis": dict(self.other_basis)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Layout":
        """Read a description; raises ValueError naming key, value and what is allowed."""
        layers, tied, basis = (values.get(name) for name in ("layers", "tied", "other_basis"))
        if not isinstance(layers, Mapping) or not layers or not isinstance(tied, Mapping):
            raise ValueError("layers and tied must be JSON objects, layers not empty.")
        # Without it a rotated model would be compared as if it were a plain one.
        if not isinstance(basis, Mapping):
            raise ValueError(f"other_basis is {basis!r:.80}; allowed: a JSON object ({{}}: none).")
        if wrong := [path for path, source in tied.items() if not isinstance(source, str)]:
            raise ValueError(f"tied[{wrong[0]!r}] is {tied[wrong[0]]!r:.80}; allowed: a path.")
        read = {path: Stored.from_json(v, f"layers[{path!r}]") for path, v in layers.items()}
        return cls(read, dict(tied), dict(basis))


def describe(model: nn.Module) -> Layout:
    """Return the layout of a model that `quantize_` packed.

    Raises ValueError when nothing is packed, or when weights alone don't make up the model.
    """
    layers, heads, embeddings = {}, {}, {}
    for path, module in model.named_modules():
        _check_storable(path, module)
        if isinstance(module, PackedLinear):
            shape = (module.out_features, module.in_features)
            layers[path] = Stored(module.spec, shape, module.scales.dtype)
            embeddings[id(module)] = path
        elif isinstance(module, TiedHead):
            heads[path] = module.embedding
    if not layers:
        raise ValueError(
            f"no layer of this {type(model).__name__} is packed: quantize it with "
            'execution = "reference" or "aten" first.'
        )
    for path, source in heads.items():
        if id(source) not in embeddings:
            raise ValueError(f"{path} is tied to an embedding that is no longer in the model.")
    tied = {path: embeddings[id(other)] for path, other in heads.items()}
    return Layout(layers, tied, marks_to_json(model))


def _check_storable(path: str, module: nn.Module) -> None:
    # All bases: what is interposed in a forward hides behind the module's own name (`interpose`).
    # Norm statistics and routers in float32 are no part of the weights: done again when loaded.
    ours = [
        kind
        for kind in type(module).__mro__
        if kind.__module__.startswith(_US) and kind not in KEEPS_STATISTICS
    ]
    allowed = [kind.__name__ for kind in _KINDS]
    if [kind for kind in ours if kind not in _KINDS]:
        telling = [kind.__name__ for kind in ours if kind.__name__ not in allowed]
        raise ValueError(
            f"{path} is a {telling[0]}: a checkpoint holds packed weights, and this layer computes "
            f"more than that ({_MORE.get(telling[0], 'a part of the recipe')}); allowed: "
            f"{', '.join(allowed)}."
        )
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if found := [hook for hook in hooks if _comes_from_us(hook)]:
        raise ValueError(
            f"{path or 'the model'} runs a hook of the recipe ({found[0]!r:.80}): a checkpoint "
            "holds weights and would lose it."
        )


def _comes_from_us(hook: object) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).startswith(_US)


def install_empty(model: nn.Module, layout: Layout, backend: str) -> None:
    """Replace the layers of a float model (on any device, meta too) by packed ones without values.

    Raises ValueError naming the layer that the model lacks or has in another shape.
    """
    for path, stored in layout.layers.items():
        module, weight = _float_layer(model, path, stored)
        op = linear_op(stored.spec)
        like = PackedLike(stored.spec, stored.shape[1], op, _backend(op, backend))
        buffers = stored.empty(weight.device)
        if isinstance(module, nn.Embedding):
            embedding = PackedEmbedding.of_buffers(buffers, like)
            embedding.set_dtype(weight.dtype, weight.device)
            install_embedding(model, path, embedding)
        else:
            bias = getattr(module, "bias", None)
            linear = PackedLinear.of_buffers(buffers, like, bias)
            model.set_submodule(path, linear.train(model.training))
    for path, source in layout.tied.items():
        packed = dict(model.named_modules()).get(source)
        if not isinstance(packed, PackedEmbedding):
            raise ValueError(f"{path} is tied to {source}, which is no packed embedding.")
        link_head(model, path, packed, getattr(model.get_submodule(path), "bias", None))


def _float_layer(model: nn.Module, path: str, stored: Stored) -> tuple[nn.Module, Tensor]:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"this {type(model).__name__} has no layer {path!r}.") from None
    transposed = type(module).__name__ == "Conv1D"
    plain = isinstance(module, nn.Linear | nn.Embedding) or transposed
    weight = getattr(module, "weight", None)
    if not plain or not isinstance(weight, Tensor):
        kind = type(module).__name__
        raise ValueError(f"{path} is a {kind}; allowed: Linear, Conv1D, Embedding.")
    shape = tuple(weight.T.shape if transposed else weight.shape)
    if shape != stored.shape:
        raise ValueError(
            f"{path} is {list(shape)} in the model and {list(stored.shape)} in the checkpoint."
        )
    if isinstance(module, nn.Embedding) and (reason := why_not_packed_embedding(model, module)):
        raise ValueError(f"{path} can't be packed: {reason}.")
    return module, weight


def set_backend(model: nn.Module, backend: str) -> None:
    """Let every packed layer compute with this back end, or the next one that applies."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.backend = _backend(module.op, backend)


def _backend(op: LinearOp, wanted: str) -> str:
    """Return what is wanted, or "dequantized", counted, where a width has no native kernel.

    Shapes that a native kernel refuses are the operator's own to count, call by call.
    """
    if wanted in op.backends:
        return wanted
    record_fallback(Fallback(op.name, wanted, "dequantized", "this width has no native kernel"))
    return "dequantized"
