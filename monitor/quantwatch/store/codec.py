"""Matrices as bytes. All codecs shuffle bytes (all first bytes, all second bytes, …) before zlib.

`log2f16`  2 bytes a value: y = log₂(value) + 10 as float16. Raw float16 is 81 % wrong at 3e-8. The
           10 puts 1.5e-8 … 64 into |y| < 16, where half a step of float16 is 2⁻⁸: at most 0.27 %
           relative error there, twice that with each doubling of |y| beyond. Reserved: 0 → −inf,
           +inf → +inf, and three NaNs for NaN, −inf and "not measured".
`f64`      8 bytes a value, exact; "not measured" is a NaN of its own.
`topk`     4 bytes a value: rows of int32 ids and float32 logits in the order of `TopLogits`.

Cells that were not measured decode to NaN and are marked in `missing`.
"""

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Missing = NDArray[np.bool_]
Shape = tuple[int, ...]

_OFFSET = 10.0
_F16_NAN, _F16_MISSING, _F16_NEGINF = 0x7E00, 0x7E01, 0x7E02
_F64_NAN, _F64_MISSING = 0x7FF8_0000_0000_0000, 0x7FF8_0000_0000_0001
_ID_ROWS, _LOGIT_ROWS = [0, 2], [1, 3, 4]
_SMALLEST, _LARGEST = np.finfo(np.float64).smallest_subnormal, np.finfo(np.float64).max
_INT32 = np.iinfo(np.int32)


def encode(values: Values, missing: Missing | None, codec: str) -> bytes:
    """Return compressed bytes. Raises ValueError on what the codec can't hold, naming the value."""
    if missing is not None and missing.shape != values.shape:
        raise ValueError(f"missing has shape {missing.shape}, values have {values.shape}")
    encoder, _ = _codec(codec)
    return zlib.compress(encoder(np.asarray(values, dtype=np.float64), missing))


def decode(payload: bytes, shape: Shape, codec: str) -> tuple[Values, Missing | None]:
    """Return values and the mask of cells that were not measured, None when all were.

    Raises ValueError when the bytes don't hold that shape.
    """
    _, decoder = _codec(codec)
    values, missing = decoder(_raw(payload, codec), shape)
    return values, missing if missing is not None and missing.any() else None


def decode_column(
    payload: bytes, shape: Shape, codec: str, column: int
) -> tuple[Values, Missing | None]:
    """Return one column [S, 1] of a matrix [S, P] as `decode` does, without the rest.

    Raises ValueError when the bytes don't hold a matrix of that shape, or it has no such column.
    """
    _, decoder = _codec(codec)
    size, raw = _SIZES.get(codec), _raw(payload, codec)
    if size is None or len(shape) != 2 or not 0 <= column < shape[1]:
        raise ValueError(f"{codec} of shape {shape} has no column {column}")
    if len(raw) != size * shape[0] * shape[1]:
        raise ValueError(f"{len(raw)} bytes can't be {codec} of shape {shape}")
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(size, *shape)
    values, missing = decoder(planes[:, :, column].tobytes(), (shape[0], 1))
    return values, missing if missing is not None and missing.any() else None


def _raw(payload: bytes, codec: str) -> bytes:
    try:
        return zlib.decompress(payload)
    except zlib.error as error:
        raise ValueError(f"{codec} bytes don't decompress: {error}") from error


def codec_for(kind: str, values: Values) -> str:
    """Return the codec for a block: exact for partial sums and signed values, log2 for the rest."""
    if kind == "topk":
        return "topk"
    signed = bool((values[np.isfinite(values)] < 0).any())
    return "f64" if kind == "per_prompt" or signed else "log2f16"


def _encode_log2f16(values: Values, missing: Missing | None) -> bytes:
    finite = np.isfinite(values)
    known = finite if missing is None else finite & ~missing
    negative = values[known & (values < 0)]
    if negative.size:
        raise ValueError(f"log2f16 holds no negative values; the first is {negative[0]}")
    with np.errstate(divide="ignore"):
        logs = np.log2(np.where(known, np.abs(values), 1.0)) + _OFFSET
    codes = logs.astype("<f2").view("<u2")
    codes[np.isnan(values)] = _F16_NAN
    codes[np.isposinf(values)] = np.float16(np.inf).view(np.uint16)
    codes[np.isneginf(values)] = _F16_NEGINF
    if missing is not None:
        codes[missing] = _F16_MISSING
    return _shuffle(codes)


def _decode_log2f16(raw: bytes, shape: Shape) -> tuple[Values, Missing]:
    codes = _unshuffle(raw, "<u2", shape)
    logs = codes.view("<f2").astype(np.float64) - _OFFSET
    with np.errstate(over="ignore"):
        values = np.exp2(logs)
    # Rounding the logarithm must not turn a finite value into 0 or infinity.
    finite = np.isfinite(logs)
    values[finite] = np.clip(values[finite], _SMALLEST, _LARGEST)
    values[codes == _F16_NEGINF] = -np.inf
    return values, codes == _F16_MISSING


def _encode_f64(values: Values, missing: Missing | None) -> bytes:
    codes = np.array(values, dtype="<f8", order="C", ndmin=1).view("<u8").reshape(values.shape)
    codes[np.isnan(values)] = _F64_NAN
    if missing is not None:
        codes[missing] = _F64_MISSING
    return _shuffle(codes)


def _decode_f64(raw: bytes, shape: Shape) -> tuple[Values, Missing]:
    codes = _unshuffle(raw, "<u8", shape)
    return codes.view("<f8").astype(np.float64), codes == _F64_MISSING


def _encode_topk(values: Values, missing: Missing | None) -> bytes:
    if missing is not None or values.ndim != 3 or values.shape[0] != 5:
        raise ValueError(f"topk holds complete matrices [5, P, K], not {values.shape}")
    ids = values[_ID_ROWS]
    wrong = ids[~((ids >= _INT32.min) & (ids <= _INT32.max) & (ids == np.round(ids)))]
    if wrong.size:
        raise ValueError(
            f"topk ids are whole numbers of 32 bits; the first other one is {wrong[0]}"
        )
    with np.errstate(over="ignore"):
        logits = values[_LOGIT_ROWS].astype("<f4")
    return _shuffle(ids.astype("<i4")) + _shuffle(logits)


def _decode_topk(raw: bytes, shape: Shape) -> tuple[Values, None]:
    _, num_positions, num_kept = shape
    split = 2 * num_positions * num_kept * 4
    values = np.empty(shape)
    values[_ID_ROWS] = _unshuffle(raw[:split], "<i4", (2, num_positions, num_kept))
    values[_LOGIT_ROWS] = _unshuffle(raw[split:], "<f4", (3, num_positions, num_kept))
    return values, None


def _shuffle(codes: NDArray[np.generic]) -> bytes:
    size = codes.dtype.itemsize
    return np.ascontiguousarray(codes).view(np.uint8).reshape(-1, size).T.tobytes()


def _unshuffle(raw: bytes, dtype: str, shape: Shape) -> NDArray[np.generic]:
    size = np.dtype(dtype).itemsize
    if len(raw) != size * int(np.prod(shape)):
        raise ValueError(f"{len(raw)} bytes can't be {dtype} of shape {shape}")
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(size, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)


_Encoder = Callable[[Values, Missing | None], bytes]
_Decoder = Callable[[bytes, Shape], tuple[Values, Missing | None]]
_CODECS: dict[str, tuple[_Encoder, _Decoder]] = {
    "log2f16": (_encode_log2f16, _decode_log2f16),
    "f64": (_encode_f64, _decode_f64),
    "topk": (_encode_topk, _decode_topk),
}
_SIZES = {"log2f16": 2, "f64": 8}
"""Bytes a cell, of codecs that hold one matrix."""


def _codec(name: str) -> tuple[_Encoder, _Decoder]:
    if name not in _CODECS:
        raise ValueError(f"codec {name!r} is none of {', '.join(_CODECS)}")
    return _CODECS[name]
