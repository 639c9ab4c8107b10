"""Read a GGUF file's header: architecture, tensor types and sizes. No tensor data is read.

Layout (little-endian, GGUF v2 and v3): magic, version, number of tensors, number of key–value
pairs, the pairs, then per tensor its name, dimensions, ggml type and offset. The `gguf` package's
own reader takes seconds for a large vocabulary, since it builds an object per token.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from quantwatch.errors import ModelError

_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the metadata value types of fixed size; 8 is a string, 9 an array."""
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_LENGTH = struct.Struct("<Q")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    architecture: str
    keys: frozenset[str]
    num_weights: int
    num_bytes: int
    """Bytes of all tensors as stored."""
    types: tuple[str, ...]
    """Names of the ggml types in use, the one with most weights first."""

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is stored in quantized blocks."""
        return not _FLOATS.issuperset(self.types)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, over all tensors."""
        return 8 * self.num_bytes / self.num_weights


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header.

    Raises:
        ModelError: bad magic, unknown version or type, a truncated header or tensor data.
    """
    if path.stat().st_size < 24:
        raise ModelError(f"{path} is not a GGUF file: only {path.stat().st_size} bytes long")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        _check_magic(blob, path)
        try:
            return _Cursor(blob, path).header()
        # A length that points past the end, or text that isn't UTF-8.
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelError(f"{path} is corrupt: its GGUF header is cut or garbled") from error


def _check_magic(blob: mmap.mmap, path: Path) -> None:
    if blob[:4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {blob[:4]!r}, not b'GGUF'")
    (version,) = struct.unpack_from("<I", blob, 4)
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} is a big-endian GGUF file, which transformers can't load")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 can be loaded")


class _Cursor:
    """A position in the header that moves forward."""

    def __init__(self, blob: mmap.mmap, path: Path) -> None:
        self.blob, self.path, self.at = blob, path, 8

    def header(self) -> GgufHeader:
        num_tensors, num_pairs = self._take("<QQ")
        pairs = dict(self._pair() for _ in range(num_pairs))
        architecture = pairs.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{self.path} is corrupt: no general.architecture in its GGUF header")
        tensors = [self._tensor() for _ in range(num_tensors)]
        if not tensors:
            raise ModelError(f"{self.path} holds no tensors")
        alignment = pairs.get("general.alignment") or 32
        if not isinstance(alignment, int):
            raise ModelError(f"{self.path} is corrupt: general.alignment is {alignment!r}")
        if not any(tensor.num_weights for tensor in tensors):
            raise ModelError(f"{self.path} holds no weights")
        return self._summary(architecture, frozenset(pairs), tensors, alignment)

    def _summary(
        self, architecture: str, keys: frozenset[str], tensors: list["_Tensor"], alignment: int
    ) -> GgufHeader:
        start = -(-self.at // alignment) * alignment
        end = start + max(tensor.offset + tensor.num_bytes for tensor in tensors)
        if end > len(self.blob):
            missing = end - len(self.blob)
            raise ModelError(f"{self.path} is truncated: the last {missing:,} bytes are missing")
        weights: dict[str, int] = {}
        for tensor in tensors:
            weights[tensor.type] = weights.get(tensor.type, 0) + tensor.num_weights
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        types = tuple(sorted(weights, key=lambda name: (-weights[name], name)))
        return GgufHeader(architecture, keys, sum(weights.values()), num_bytes, types)

    def _take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self.blob, self.at)
        self.at += struct.calcsize(layout)
        return values

    def _text(self) -> str:
        (length,) = self._take("<Q")
        start = self.at
        self._skip(length)
        return self.blob[start : self.at].decode()

    def _pair(self) -> tuple[str, str | int | None]:
        key = self._text()
        (kind,) = self._take("<I")
        return key, self._value(kind)

    def _value(self, kind: int) -> str | int | None:
        """Return strings and 32-bit integers, step over everything else."""
        if kind == _STRING:
            return self._text()
        if kind == _UINT32:
            return self._take("<I")[0]
        if kind == _ARRAY:
            self._skip_array()
            return None
        self._skip(self._width(kind))
        return None

    def _skip_array(self) -> None:
        kind, count = self._take("<IQ")
        if kind != _STRING:
            self._skip(count * self._width(kind))
            return
        at = self.at
        for _ in range(count):  # a hundred thousand tokens and merges: nothing is called but this
            at += _LENGTH.size + _LENGTH.unpack_from(self.blob, at)[0]
        self._skip(at - self.at)

    def _skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self.blob):
            raise struct.error("past the end")

    def _width(self, kind: int) -> int:
        if kind not in _FIXED:
            raise ModelError(f"{self.path} is corrupt: unknown GGUF metadata type {kind}")
        return _FIXED[kind]

    def _tensor(self) -> "_Tensor":
        name = self._text()
        (num_dims,) = self._take("<I")
        shape = self._take(f"<{num_dims}Q")
        kind, offset = self._take("<IQ")
        return _tensor(name, prod(shape), kind, offset, self.path)


@dataclass(frozen=True, slots=True)
class _Tensor:
    type: str
    num_weights: int
    num_bytes: int
    offset: int


def _tensor(name: str, num_weights: int, kind: int, offset: int, path: Path) -> _Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        ggml_type = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ModelError(f"{path}: tensor {name!r} has the unknown ggml type {kind}") from error
    block_weights, block_bytes = GGML_QUANT_SIZES[ggml_type]
    return _Tensor(ggml_type.name, num_weights, num_weights // block_weights * block_bytes, offset)
