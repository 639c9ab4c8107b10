"""Keys or values of a flushed chunk as codes, and back.

x [B, H, n, D] → rows of one head's features (per token) or of one feature's tokens (per channel),
quantized by the one definition of `quantize.affine`. With a rotation the codes are of x·R, R the
Hadamard matrix of width D, and so is the low-rank product A·Bm of what rounding left in a chunk of
f tokens: E = x·R − codes [f, D]; U S Vh = E in float32, A = U_r·S_r [f, r], Bm = Vh_r [r, D]. The
rounding error of a uniform quantizer is nearly white: at 4 bits a rank-4 product holds little more
than its share of it.

Arithmetic is float32. A chunk with NaN or infinite numbers has NaN scales: they stay visible, and
no product is made of them.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import dequantize, quantize
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.serve.kv_codes import KV_QUANTIZE
from quantwatch_kernels.serve.kv_plane import PlaneScheme

__all__ = ["StoredPlane", "restore", "rotation", "store"]


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """Packed codes of a chunk [B, H, n, D] with scales, zero points and the low-rank product."""

    codes: Tensor
    """uint8 [rows, bytes]; rows are (b, h, token) or (b, h, feature)."""
    scales: Tensor
    """float16 [rows, groups]; float32 where float16 can't hold one."""
    zeros: Tensor | None
    """uint8 [bytes], packed like codes, row after row without a gap."""
    means: Tensor | None
    """float16 [B, H, m, 1, D] of m chunks of tokens."""
    factors: tuple[Tensor, Tensor] | None
    """float16 A [B, H, m, f, r] and Bm [B, H, m, r, D] of m chunks of f tokens."""
    shape: tuple[int, int, int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is stored."""
        tensors = [self.codes, self.scales, *(self.factors or ())]
        tensors += [tensor for tensor in (self.zeros, self.means) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)


@cache
def rotation(features: int) -> Hadamard:
    """Return the rotation of one head's features. Raises ValueError where there is none."""
    return Hadamard(features)


def store(x_BHnD: Tensor, plane: PlaneScheme) -> StoredPlane:
    """Quantize a chunk. Raises ValueError for whole groups that aren't whole, and a wrong shape."""
    if x_BHnD.ndim != 4 or not x_BHnD.is_floating_point():
        raise ValueError(
            f"a cache takes floats [B, H, tokens, D]; not {x_BHnD.dtype} {list(x_BHnD.shape)}."
        )
    batch, heads, tokens, features = x_BHnD.shape
    if plane.per != "token" and tokens % plane.flush:
        what = "groups" if plane.per == "channel" and plane.chunk is None else "chunks"
        raise ValueError(f"{tokens} tokens are no whole {what} of {plane.flush} tokens.")
    if plane.floats:
        return _as_floats(x_BHnD, plane)
    x = rotation(features)(x_BHnD.float()) if plane.hadamard else x_BHnD.float()
    means = _means(x, plane) if plane.center and tokens else None
    if means is not None:
        x = _shifted(x, -means.float())
    rows = _rows(x, plane)
    spec = plane.spec
    if plane.clip == "mse" and rows.numel():
        found = mse_qparams(rows, spec)
        packed, scales = pack(quantize(rows, found, spec), spec.format), found.scales
        each = found.zeros
    else:
        packed, scales, each = KV_QUANTIZE.run(None, rows, replace(spec, clip="none"))
    zeros = None if each is None else pack(each.flatten(), spec.format)
    factors = None
    if plane.rank and tokens:
        codes = unpack(packed, spec.format, rows.shape[1])
        values = _unrows(dequantize(codes, QParams(scales, each), spec), x.shape, plane)
        factors = _factors(x - values, plane)
    shape = (batch, heads, tokens, features)
    return StoredPlane(packed, scales, zeros, means, factors, shape)


def restore(stored: StoredPlane, plane: PlaneScheme, *, rotated: bool = False) -> Tensor:
    """Return what was stored, float32 [B, H, n, D]; `rotated`: before R is undone."""
    if plane.floats:
        return stored.codes.view(getattr(torch, plane.floats)).reshape(stored.shape).float()
    spec, columns = plane.spec, plane.shape(*stored.shape[2:])[1]
    zeros = None
    if stored.zeros is not None:
        count = stored.scales.numel()
        zeros = unpack(stored.zeros, spec.format, count).reshape(stored.scales.shape)
    codes = unpack(stored.codes, spec.format, columns)
    rows = dequantize(codes, QParams(stored.scales, zeros), spec)
    values = _unrows(rows, torch.Size(stored.shape), plane)
    if stored.factors is not None:
        left, right = stored.factors
        values = values + (left.float() @ right.float()).reshape(values.shape)
    if stored.means is not None:
        values = _shifted(values, stored.means.float())
    if plane.hadamard and not rotated:
        return rotation(stored.shape[-1]).inverse(values)
    return values


def _means(x_BHnD: Tensor, plane: PlaneScheme) -> Tensor:
    """Return the mean of each feature over each chunk, 0 where one isn't finite."""
    means = _chunks(x_BHnD, plane).mean(-2, keepdim=True).half()
    return means.where(torch.isfinite(means), 0.0)


def _shifted(x_BHnD: Tensor, by: Tensor) -> Tensor:
    chunks = x_BHnD.reshape(*x_BHnD.shape[:2], by.shape[2], -1, x_BHnD.shape[-1])
    return (chunks + by).reshape(x_BHnD.shape)


def _chunks(x_BHnD: Tensor, plane: PlaneScheme) -> Tensor:
    """Return [B, H, m, f, D]. Raises ValueError for tokens that are no whole chunks."""
    batch, heads, tokens, features = x_BHnD.shape
    if tokens % plane.flush:
        raise ValueError(f"{tokens} tokens are no whole chunks of {plane.flush} tokens.")
    return x_BHnD.reshape(batch, heads, tokens // plane.flush, plane.flush, features)


def _as_floats(x_BHnD: Tensor, plane: PlaneScheme) -> StoredPlane:
    rounded = x_BHnD.to(getattr(torch, plane.floats)).contiguous()
    rows = rounded.view(torch.uint8).reshape(x_BHnD.shape[:-1].numel(), 2 * x_BHnD.shape[-1])
    batch, heads, tokens, features = x_BHnD.shape
    none = torch.empty(len(rows), 0, dtype=torch.float16)
    return StoredPlane(rows, none, None, None, None, (batch, heads, tokens, features))


def _rows(x_BHnD: Tensor, plane: PlaneScheme) -> Tensor:
    """Return the rows whose groups share a scale: [B·H·n, D], [B·H·D, n] or [B·H·m, f·D]."""
    x = x_BHnD.transpose(-1, -2) if plane.per == "channel" else x_BHnD
    rows, columns = plane.shape(*x_BHnD.shape[-2:])  # −1 says nothing of a chunk without tokens
    return x.reshape(x.shape[:2].numel() * rows, columns)


def _unrows(rows: Tensor, shape: torch.Size, plane: PlaneScheme) -> Tensor:
    batch, heads, tokens, features = shape
    if plane.per != "channel":
        return rows.reshape(shape)
    return rows.reshape(batch, heads, features, tokens).transpose(-1, -2)


def _factors(error_BHnD: Tensor, plane: PlaneScheme) -> tuple[Tensor, Tensor]:
    """Return A [B, H, m, f, r] and Bm [B, H, m, r, D] of m chunks of f tokens."""
    chunks = _chunks(error_BHnD, plane)
    finite = torch.isfinite(chunks).all(-1, keepdim=True).all(-2, keepdim=True)
    left, sizes, right = torch.linalg.svd(chunks.where(finite, 0.0), full_matrices=False)
    rank = min(plane.rank, sizes.shape[-1])
    scaled = left[..., :rank] * sizes[..., None, :rank]
    return scaled.half(), right[..., :rank, :].half()
