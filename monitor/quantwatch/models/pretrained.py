"""Load a folder or hub repository through transformers, refusing what it would paper over."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models import hub
from quantwatch.models.checkpoint import (
    check_folder,
    read_config,
    refuse_bare_codes,
    refuse_contradictions,
    weight_files,
)
from quantwatch.models.marks import Marks
from quantwatch.models.quantized import check_quantizer, quantization_of
from quantwatch.models.quiet import explained, shorten
from quantwatch.models.sources import Source
from quantwatch.models.streaming.opening import refuse_unstreamable, streamed_model
from quantwatch.models.streaming.skeleton import Skeleton
from quantwatch.models.streaming.stream import LayerStream
from quantwatch_kernels.quantize.compressed_tensors import mark_loaded_

_SCALE = re.compile(
    r"(.+)\.(weight[_.].*(scale|zero|absmax|quant).*|scales?|scale_inv|qzeros|SCB|g_idx)"
)
"""What quantizers store beside `X.weight`, by the name of X."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A module loaded by transformers, and where its files are."""

    module: nn.Module
    folder: Path
    method: str | None
    """Quantization method of the checkpoint, None for float checkpoints."""
    commit: str | None
    notes: tuple[str, ...]
    files: Marks
    """Configuration and weights as they were before they were read."""
    stream: LayerStream | None = None
    """What gives the layers their values, if they are read one at a time."""


def load_folder(folder: Path, config: VariantConfig, streamed: bool = False) -> Pretrained:
    """Load a local model folder; raises ModelError naming the file or weights that are wrong."""
    check_folder(folder)
    return _load(str(folder), folder, None, config, streamed)


def load_hub(source: Source, config: VariantConfig, streamed: bool = False) -> Pretrained:
    """Load a hub repository at the commit that `revision` means now.

    Raises:
        ModelError: it can't be had from the hub, or as for a folder.
    """
    folder = hub.snapshot(source.location, config.revision, source.similar)
    read_config(folder)
    return _load(source.location, folder, folder.name, config, streamed)


def _load(
    location: str, folder: Path, commit: str | None, config: VariantConfig, streamed: bool
) -> Pretrained:
    from transformers import AutoConfig

    read = _read_files(folder)
    files = Marks.of(read)
    refuse_contradictions(read)
    common: dict[str, Any] = {"revision": commit, "trust_remote_code": config.allow_code}
    with explained(location), _own_code(location):
        settings = AutoConfig.from_pretrained(location, **common)
    method = _checked_method(location, settings, read, config)
    if streamed:
        refuse_unstreamable(location, folder, settings, method)
    skeletons: list[Skeleton] = []
    with explained(f"{location}: transformers can't load it"), _own_code(location):
        module, info = _loader(settings, skeletons if streamed else None)(
            location,
            dtype=getattr(torch, config.loading_dtype),
            device_map={"": config.device},
            attn_implementation=config.attention,
            # Mismatches are refused below, with names and shapes.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **common,
        )
    notes = refuse_incomplete(location, info)
    _refuse_unscaled(location, module, () if method else info["unexpected_keys"])
    with explained(location):
        mark_loaded_(module)
    stream = LayerStream(skeletons[0], torch.device(config.device)) if streamed else None
    return Pretrained(module, folder, method, commit, notes, files, stream)


def _checked_method(
    location: str, settings: Any, read: Iterable[Path], config: VariantConfig
) -> str | None:
    """Return the quantization method; raises ModelError where it, or having none, is no way."""
    method = quantization_of(settings)
    if method is None:
        refuse_bare_codes(read)
    else:
        check_quantizer(location, method)
        refuse_recipe(location, method, config)
    return method


def _read_files(folder: Path) -> list[Path]:
    """Return configuration and weights; where some are missing, transformers says so."""
    with suppress(ModelError):
        return [folder / "config.json", *weight_files(folder)]
    return []


def _loader(settings: Any, skeletons: list[Skeleton] | None) -> Callable[..., Any]:
    from transformers import AutoModelForCausalLM

    if skeletons is None:
        resident: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        return resident
    return partial(streamed_model, settings, skeletons)


@contextmanager
def _own_code(location: str) -> Iterator[None]:
    """Name our setting where transformers asks for its own."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(
            f"{location} brings its own model code: set allow_code = true to run it"
        ) from error


def _refuse_unscaled(location: str, module: nn.Module, unused: Iterable[str]) -> None:
    """Refuse weights whose scales are not used: without them they are other weights.

    Raises ModelError. What the model doesn't have (layers beyond the configuration's, the tower of
    another modality, whose `scale` may be a weight) is no matter.
    """
    used = {f".{name}" for name in module.state_dict()}
    scales = [
        name
        for name in sorted(set(unused))
        if (found := _SCALE.fullmatch(name))
        and any(each.endswith(f".{found[1]}.weight") for each in used)
    ]
    if scales:
        raise ModelError(
            f"{location}: {len(scales)} scales of quantized weights would not be used, since "
            f"config.json has no quantization_config: {shorten(scales)}"
        )


def refuse_recipe(location: str, method: str, config: VariantConfig) -> None:
    """Refuse a recipe for a model that is quantized already; raises ModelError."""
    if config.recipe is not None:
        raise ModelError(
            f"{location} is already quantized with {method}: a recipe can't be applied on top"
        )


def refuse_incomplete(location: str, info: dict[str, Any]) -> tuple[str, ...]:
    """Refuse weights that transformers would initialise at random; note those it leaves unused.

    Raises:
        ModelError: naming the weights that are missing or have another shape.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{location}: the checkpoint lacks {len(missing)} weights, which would be random: "
            f"{shorten(missing)}"
        )
    mismatched = [
        f"{name} is {tuple(found)} in the file and {tuple(wanted)} by the configuration"
        for name, found, wanted in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise ModelError(f"{location}: weights of another shape: {shorten(mismatched)}")
    unused = sorted(info["unexpected_keys"])
    if not unused:
        return ()
    return (f"{len(unused)} weights of the checkpoint are not used: {shorten(unused)}",)
