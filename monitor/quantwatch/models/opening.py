"""Open a source: module, tokenizer, digests of what was stored. Nothing is changed yet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models import factory, fingerprints, hub
from quantwatch.models.checkpoint import weight_files
from quantwatch.models.gguf_cache import converted_folder
from quantwatch.models.gguf_header import GgufHeader, read_gguf_header
from quantwatch.models.marks import NO_FILES, Marks
from quantwatch.models.pretrained import (
    Pretrained,
    load_folder,
    load_hub,
    refuse_recipe,
)
from quantwatch.models.quantized import quantization_of
from quantwatch.models.quiet import explained
from quantwatch.models.sources import Source
from quantwatch.models.streaming.stream import LayerStream
from quantwatch.models.tokenizers import load_tokenizer
from quantwatch.telemetry import canonical_sha


@dataclass(frozen=True, slots=True)
class Opened:
    """A model as its source gives it."""

    module: nn.Module
    tokenizer: Any | None
    weights_sha: str
    config_sha: str
    resolved: str
    """Where it really came from: path, repository@commit, or factory."""
    dtype: torch.dtype | None = None
    """Computing dtype where it was asked for, None where the module decides."""
    method: str | None = None
    """Quantization method of the checkpoint."""
    gguf: GgufHeader | None = None
    notes: tuple[str, ...] = ()
    stream: LayerStream | None = None
    """What gives the decoder layers their values, if they are read one at a time."""
    files: Marks = NO_FILES
    """Those that the module computes in, so that nobody may write into them."""


def open_source(
    source: Source,
    config: VariantConfig,
    *,
    base_dir: Path,
    cache_dir: Path,
    streamed: bool = False,
) -> Opened:
    """Load what a source names onto the variant's device, in its dtype.

    Raises:
        ModelError: it is missing, corrupt, incomplete, or needs a package that isn't installed.
        ResourceError: memory or disk ran out.
    """
    if source.kind == "factory":
        if streamed:
            raise ModelError(
                f"factory {source.location!r}: what code builds is in memory already and can't be "
                'streamed; memory = "streamed" needs a checkpoint'
            )
        return _open_factory(source.location, config, base_dir)
    if source.kind == "gguf":
        return _open_gguf(source.path, config, cache_dir, streamed)
    if source.kind == "hub" and source.gguf_file is not None:
        gguf = hub.gguf_file(source.location, source.gguf_file, config.revision)
        return _open_gguf(gguf, config, cache_dir, streamed)
    if source.kind == "hub":
        loaded = load_hub(source, config, streamed)
    else:
        loaded = load_folder(source.path, config, streamed)
    return _opened(loaded, source.location, config, cache_dir)


def open_module(module: nn.Module, tokenizer: Any | None, resolved: str) -> Opened:
    """Take a module that exists already; its weights and structure are its identity.

    Raises:
        ModelError: the tokenizer lacks a method that transformers' tokenizers have, or the module
            has no values.
    """
    for name in ("get_vocab", "encode", "decode"):
        if tokenizer is not None and not callable(getattr(tokenizer, name, None)):
            raise ModelError(
                f"{resolved}: its tokenizer, a {type(tokenizer).__name__}, has no {name}()"
            )
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ModelError(f"{resolved}: its weights are on the meta device and hold no values")
    settings = getattr(module, "config", None)
    has_settings = hasattr(settings, "get_text_config")
    return Opened(
        module,
        tokenizer,
        weights_sha=fingerprints.module_sha(module),
        config_sha=fingerprints.module_config_sha(module),
        resolved=resolved,
        method=quantization_of(settings) if has_settings else None,
        notes=() if tokenizer is not None else ("has no tokenizer",),
    )


def _opened(loaded: Pretrained, location: str, config: VariantConfig, cache_dir: Path) -> Opened:
    tokenizer = load_tokenizer(loaded.folder, allow_code=config.allow_code)
    weights_sha = fingerprints.files_sha(weight_files(loaded.folder), cache_dir)
    config_sha = fingerprints.folder_config_sha(loaded.folder, allow_code=config.allow_code)
    loaded.files.require_same()
    return Opened(
        loaded.module,
        tokenizer,
        weights_sha=weights_sha,
        config_sha=config_sha,
        resolved=location if loaded.commit is None else f"{location}@{loaded.commit}",
        dtype=getattr(torch, config.loading_dtype),
        method=loaded.method,
        notes=loaded.notes if tokenizer is not None else (*loaded.notes, "has no tokenizer"),
        stream=loaded.stream,
        files=_mapped(loaded, config),
    )


def _mapped(loaded: Pretrained, config: VariantConfig) -> Marks:
    """Return the files that a module computes in: a stream and other devices have copies."""
    mapped = loaded.stream is None and config.device == "cpu"
    return loaded.files.of_weights() if mapped else NO_FILES


def _open_gguf(path: Path, config: VariantConfig, cache_dir: Path, streamed: bool) -> Opened:
    header = read_gguf_header(path)
    content_sha = fingerprints.file_sha(path, cache_dir)
    folder = converted_folder(path, content_sha, cache_dir)
    loaded = load_folder(folder, config, streamed)
    tokenizer = load_tokenizer(folder)
    loaded.files.require_same()
    notes = list(loaded.notes) if tokenizer is not None else [*loaded.notes, "has no tokenizer"]
    if header.is_quantized:
        notes.append(f"weights are dequantized from GGUF ({', '.join(header.types)})")
    return Opened(
        loaded.module,
        tokenizer,
        weights_sha=canonical_sha([content_sha]),
        config_sha=fingerprints.folder_config_sha(folder, allow_code=False),
        resolved=str(path),
        dtype=getattr(torch, config.loading_dtype),
        gguf=header,
        notes=tuple(notes),
        stream=loaded.stream,
        files=_mapped(loaded, config),
    )


def _open_factory(spec: str, config: VariantConfig, base_dir: Path) -> Opened:
    module, tokenizer = factory.build(spec, base_dir)
    opened = open_module(module, tokenizer, spec)
    if opened.method is not None:
        refuse_recipe(spec, opened.method, config)
    # A factory decides its own dtype unless the configuration names one.
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    with explained(f"factory {spec!r}: its module can't be moved to {config.device}"):
        module.to(device=config.device, dtype=dtype)
    return opened


def check_device(device: str) -> None:
    """Check that a device exists; raises ModelError naming those that do."""
    present = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        present.append("mps")
    wanted = "cuda:0" if device == "cuda" else device
    if wanted not in present:
        raise ModelError(f"device {device!r} does not exist; this machine has {', '.join(present)}")
