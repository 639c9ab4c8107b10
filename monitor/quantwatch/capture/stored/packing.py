"""Named tensors and a JSON structure as the bytes of one safetensors file, and back, bit for bit.

A tensor that has several names is written once. Strides are kept: a sum over a transposed row may
round otherwise. Tensors come back in memory of their own, aligned as torch aligns it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from quantwatch.capture.stored.checked import CheckedFile
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.domain import Json
from quantwatch.telemetry import canonical_json

_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Packed:
    """What goes into a file: tensors by name, and what they mean."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """A tensor's further names → its first one."""
    structure: Json = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict, compare=False)

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; the same object again is only another name. Return the name."""
        known = self._names.setdefault(id(tensor), name)
        if known == name:
            self.tensors[name] = tensor
        else:
            self.aliases[name] = known
        return name

    def __getitem__(self, name: str) -> Tensor:
        found = self.tensors.get(self.aliases.get(name, name))
        if found is None:
            raise DamagedError(f"it has no {name}")
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors.values())

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file's content piece by piece: no tensor is copied but to the CPU."""
        layouts = {name: _layout(tensor) for name, tensor in self.tensors.items()}
        structure = canonical_json([self.structure, self.aliases, layouts])
        # Wide values first, so that each one is aligned in the file.
        ordered = sorted(self.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"structure": structure}}
        start = 0
        for name, tensor in ordered:
            end = start + tensor.numel() * tensor.dtype.itemsize
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        yield memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for _, tensor in ordered:
            yield _bytes_of(tensor.cpu().contiguous())

    @classmethod
    def read(cls, file: CheckedFile) -> "Packed":
        """Read a file's content. Raises DamagedError when it isn't what was written."""
        try:
            found = cls._read(file)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            file.finish()  # more often than a file of somebody else it is a damaged one
            raise DamagedError("it is no file of ours") from error
        file.finish()
        return found

    @classmethod
    def _read(cls, file: CheckedFile) -> "Packed":
        length = int.from_bytes(_taken(file, _LENGTH_BYTES), "little")
        header: Any = json.loads(_taken(file, length))
        structure, aliases, layouts = json.loads(header.pop("__metadata__")["structure"])
        tensors = {name: _read_tensor(file, entry) for name, entry in header.items()}
        return cls({n: _restored(t, layouts[n]) for n, t in tensors.items()}, aliases, structure)


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two packs are from each other."""

    num_values: int
    num_differing: int
    largest: float
    """Largest difference; infinite where a value isn't finite, or the forms differ."""
    first: str | None
    """Name of the first tensor that differs."""


def difference(one: Packed, other: Packed) -> Difference:
    """Compare two packs bit for bit; a NaN equals any NaN."""
    count = sum(tensor.numel() for tensor in one.tensors.values())
    shapes = [{n: (t.shape, t.dtype) for n, t in each.tensors.items()} for each in (one, other)]
    if shapes[0] != shapes[1] or (one.structure, one.aliases) != (other.structure, other.aliases):
        return Difference(count, count, float("inf"), "their structure")
    differing, largest, first = 0, 0.0, None
    for name, tensor in one.tensors.items():
        found, size = _compare(tensor.cpu(), other.tensors[name].cpu())
        differing, largest = differing + found, max(largest, size)
        first = name if found and first is None else first
    return Difference(count, differing, largest, first)


def _compare(ours: Tensor, theirs: Tensor) -> tuple[int, float]:
    bits = _BITS[ours.dtype.itemsize]
    same = ours.contiguous().view(bits) == theirs.contiguous().view(bits)
    if ours.is_floating_point():
        same |= ours.isnan() & theirs.isnan()
    if bool(same.all()):
        return 0, 0.0
    away = (ours[~same].double() - theirs[~same].double()).abs()
    return int((~same).sum()), float(away.nan_to_num(nan=torch.inf).max())


def _layout(tensor: Tensor) -> list[Any]:
    """Return a tensor's device, and its strides where rows aren't one after another."""
    return [str(tensor.device), None if tensor.is_contiguous() else list(tensor.stride())]


def _taken(file: CheckedFile, count: int) -> bytearray:
    if count > file.left:
        raise ValueError(f"{count} bytes are wanted, {file.left} are left")
    room = bytearray(count)
    file.take(memoryview(room))
    return room


def _read_tensor(file: CheckedFile, entry: Any) -> Tensor:
    """Read the next tensor: they are written in the header's order."""
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if prod(shape) * dtype.itemsize > file.left:
        raise ValueError(f"{shape} values of {dtype} are more than the file has")
    tensor = torch.empty(shape, dtype=dtype)
    file.take(_bytes_of(tensor))
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _restored(tensor: Tensor, layout: Any) -> Tensor:
    device, strides = layout
    if strides is not None:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor.to(device)
