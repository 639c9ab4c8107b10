"""Whether a packed checkpoint's files hold what its description says, before anything is read.

A tensor that is described and not stored would be uninitialised memory, a stored one that nobody
describes would be dropped and its layer made at random: transformers only warns. Only the headers
of the files are read. transformers renames modules of some families as it saves and loads, so
tensors whose kind, dtype and shape are those described, one for one, are right under any name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from quantwatch_kernels.quantize.checkpoint import Layout
from quantwatch_kernels.quantize.packed_linear import Buffers

__all__ = ["check_stored"]

_NAMES = {
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
}
_Tensors = Mapping[str, tuple[str, str, tuple[int, ...]]]
"""Key in the files → (buffer, dtype, shape)."""


def check_stored(files: Sequence[str | Path], layout: Layout) -> None:
    """Compare the headers of safetensors files with a layout.

    Raises ValueError naming the first tensor that is missing, not described, or another.
    """
    found, expected = _found(files), _expected(layout)
    if Counter(found.values()) == Counter(expected.values()):
        return
    for key, wanted in expected.items():
        if (stored := found.get(key)) != wanted:
            said = "not stored" if stored is None else _text(stored)
            raise ValueError(f"{key} is {said}; the description says {_text(wanted)}.")
    extra = next(key for key in found if key not in expected)
    raise ValueError(f"{extra} is stored ({_text(found[extra])}), but not described.")


def _expected(layout: Layout) -> _Tensors:
    return {
        f"{path}.{name}": (name, _NAMES[buffer.dtype], tuple(buffer.shape))
        for path, stored in layout.layers.items()
        for name, buffer in stored.empty(torch.device("meta"))._asdict().items()
        if buffer is not None
    }


def _found(files: Sequence[str | Path]) -> _Tensors:
    """Return weight_packed of every file, and what is stored beside one."""
    headers: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for file in files:
        if Path(file).suffix != ".safetensors":
            raise ValueError(f"{file} can't be checked; allowed: .safetensors.")
        with safe_open(file, framework="np") as opened:
            for key in opened.keys():  # noqa: SIM118 — it is no mapping
                part = opened.get_slice(key)
                name = key.rpartition(".")[2]
                headers[key] = (name, part.get_dtype(), tuple(part.get_shape()))
    packed = {key.rpartition(".")[0] for key in headers if key.endswith(".weight_packed")}
    return {
        key: value
        for key, value in headers.items()
        if key.rpartition(".")[0] in packed and value[0] in Buffers._fields
    }


def _text(tensor: tuple[str, str, tuple[int, ...]]) -> str:
    _, dtype, shape = tensor
    return f"{dtype} {list(shape)}"
