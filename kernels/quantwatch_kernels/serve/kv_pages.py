"""Pages of codes: where each byte of a quantized paged cache lies.

A page holds `page_size` tokens of all key heads of one layer and is one string of bytes, so that a
swap or a copy moves scales and zeros along with the codes they belong to:

    keys:   codes [page_size, H, ⌈D·b/8⌉] · scales float16 [page_size, H, G] · zeros
            [page_size, ⌈H·G·b/8⌉]
    values: the same

Each of the six planes begins at a multiple of 64 bytes (a cache line; what vector loads want), and
so does the next page; the padding counts in `page_bytes`. Zeros have b bits, 4 for 4-bit codes,
packed within a token: writing one never touches a neighbour's byte.

Tokens are written once, slot by slot, and never read before: a page may hold anything, NaN
included, before. What was given up: groups of tokens, means, products, sinks and windows (they need
several tokens at a time; `QuantizedCache` has them), and scales beyond float16: a head of a token
that needs one is NaN, so that it is seen and harms no other request. A scale too small for float16
is rounded to what it has, an absolute error below 1e-5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantwatch_kernels.quantize.affine import dequantize, quantize
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.quantize.qparams import QParams, group_range, qparams_as_stored
from quantwatch_kernels.serve.block_pool import NULL_BLOCK
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_quant import rotation
from quantwatch_kernels.serve.paged_plan import PagedPlan

__all__ = ["ALIGNMENT", "PageShape", "QuantizedPages"]

ALIGNMENT = 64
"""Bytes at whose multiples planes and pages begin."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """Tokens of a page, key heads, features of a head. Raises ValueError for one below 1."""

    page_size: int
    heads: int
    features: int

    def __post_init__(self) -> None:
        if min(self.page_size, self.heads, self.features) < 1:
            raise ValueError(f"a page has tokens, heads and features; not {self}.")


class _Plane:
    """Keys or values in a page: views of the pool's memory from byte `begin` of each page on."""

    def __init__(self, plane: PlaneScheme, shape: PageShape) -> None:
        self.plane, self.shape, self.spec = plane, shape, plane.spec
        self.groups = -(-shape.features // self.spec.granularity.group_size(shape.features))
        code = self.spec.format.num_bytes(1, shape.features)
        zero = 0 if plane.symmetric else self.spec.format.num_bytes(1, shape.heads * self.groups)
        self.widths = (shape.heads * code, 2 * shape.heads * self.groups, zero)
        """Bytes of a token's codes, scales and zeros."""
        self.sizes = tuple(_aligned(shape.page_size * width) for width in self.widths)

    def place(self, memory: Tensor, begin: int) -> None:
        """Take views [num_blocks, page_size, bytes of a token] of codes, scales and zeros."""
        parts, tokens = [], self.shape.page_size
        for width, size in zip(self.widths, self.sizes, strict=True):
            flat = memory[:, begin : begin + tokens * width]
            parts.append(flat.view(len(memory), tokens, width))
            begin += size
        self.parts = tuple(parts)

    def ready(self, x_THD: Tensor) -> Tensor:
        """Return x as it is stored: rotated, NaN where float16 can't hold a scale."""
        x = x_THD.float()
        x = rotation(self.shape.features)(x) if self.plane.hadamard else x
        finite = x.where(torch.isfinite(x), 0.0)
        low, high = finite.amin(-1), finite.amax(-1)
        width = torch.maximum(high, -low) if self.plane.symmetric else high - low
        fits = width / self.spec.format.qmax <= torch.finfo(torch.float16).max
        return x.where(fits[..., None], torch.nan)

    def write(self, block: Tensor, place: Tensor, x_THD: Tensor) -> None:
        """Write what `ready` returned."""
        rows = x_THD.reshape(-1, self.shape.features)
        found = self._qparams(rows)
        codes = pack(quantize(rows, found, self.spec), self.spec.format)
        new = [codes, found.scales.contiguous().view(torch.uint8)]
        if found.zeros is not None:
            new.append(pack(found.zeros.reshape(len(block), -1), self.spec.format))
        for part, packed in zip(self.parts, new, strict=False):
            part[block, place] = packed.reshape(len(block), part.shape[-1])

    def _qparams(self, rows: Tensor) -> QParams:
        if self.plane.clip == "mse":
            found = mse_qparams(rows, self.spec)
            if found.scales.dtype == torch.float16:
                return found
        return qparams_as_stored(*group_range(rows, self.spec), self.spec)[0]

    def read(self, block: Tensor, place: Tensor) -> Tensor:
        codes, scales, zeros = (part[block, place] for part in self.parts)
        tokens, rows = len(block), len(block) * self.shape.heads
        fmt, count = self.spec.format, self.shape.heads * self.groups
        found = QParams(
            scales.contiguous().view(torch.float16).reshape(rows, self.groups),
            None if self.plane.symmetric else unpack(zeros, fmt, count).reshape(rows, self.groups),
        )
        codes = codes.reshape(rows, fmt.num_bytes(1, self.shape.features))
        values = dequantize(unpack(codes, fmt, self.shape.features), found, self.spec)
        values = values.reshape(tokens, self.shape.heads, self.shape.features)
        return rotation(self.shape.features).inverse(values) if self.plane.hadamard else values


class QuantizedPages:
    """Keys and values of one layer in `num_blocks` pages of codes.

    Raises ValueError for a scheme that doesn't store each token by itself.
    """

    def __init__(
        self,
        num_blocks: int,
        shape: PageShape,
        scheme: KVScheme,
        device: torch.device | str = "cpu",
    ) -> None:
        neighbours = scheme.flush != 1 or scheme.sinks or scheme.window or scheme.gain
        if neighbours or scheme.high_layers:
            raise ValueError(
                "pages hold schemes that store every token by itself: no groups of tokens, means, "
                "products, sinks, window, gain or top pages, and one form for all layers."
            )
        if scheme.keys.floats or scheme.values.floats:
            raise ValueError("pages of codes hold no 16-bit floats.")
        if num_blocks < 1:
            raise ValueError(f"there must be at least 1 page; not {num_blocks}.")
        self.shape = shape
        self._planes = (_Plane(scheme.keys, shape), _Plane(scheme.values, shape))
        self.page_bytes = sum(sum(plane.sizes) for plane in self._planes)
        size = num_blocks * self.page_bytes + ALIGNMENT
        raw = torch.empty(size, dtype=torch.uint8, device=device)
        skip = -raw.data_ptr() % ALIGNMENT
        memory = raw[skip : skip + num_blocks * self.page_bytes]
        self.memory = memory.view(num_blocks, self.page_bytes)
        """uint8 [num_blocks, page_bytes]: what is copied and swapped."""
        self.memory[NULL_BLOCK] = 0
        begin = 0
        for plane in self._planes:
            plane.place(self.memory, begin)
            begin += sum(plane.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from a page's begin to its six planes: codes, scales, zeros of keys, of values."""
        sizes = [size for plane in self._planes for size in plane.sizes]
        return tuple(sum(sizes[:number]) for number in range(len(sizes)))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's codes, scales and zeros, without the padding of planes."""
        return sum(sum(plane.widths) for plane in self._planes)

    @property
    def bits_per_element(self) -> float:
        """Bits of memory per cached number in full pages, padding included."""
        tokens, heads, features = self.shape.page_size, self.shape.heads, self.shape.features
        return 8 * self.page_bytes / (2 * tokens * heads * features)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [T, H, D] of new tokens into their slots, int64 [T]; −1 is skipped.

        Raises ValueError, with nothing written, for other shapes, slots that don't exist or come
        twice, and the null block.
        """
        expected = (len(slots), self.shape.heads, self.shape.features)
        if keys.shape != expected or values.shape != expected:
            raise ValueError(
                f"{len(slots)} slots take keys and values {list(expected)}; not "
                f"{list(keys.shape)} and {list(values.shape)}."
            )
        kept = slots >= 0
        block, place = self._split(slots[kept])
        if len(block) == 0:
            return
        if bool((block == NULL_BLOCK).any()) or len(set(slots[kept].tolist())) < len(block):
            raise ValueError("a slot comes twice, or is in the null block.")
        new = (keys[kept], values[kept])
        ready = [plane.ready(x) for plane, x in zip(self._planes, new, strict=True)]
        for plane, x in zip(self._planes, ready, strict=True):
            plane.write(block, place, x)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, float32 [T, H, D], of slots that were written."""
        block, place = self._split(slots)
        keys, values = (plane.read(block, place) for plane in self._planes)
        return keys, values

    def gather(self, plan: PagedPlan) -> tuple[tuple[Tensor, Tensor], PagedPlan]:
        """Return the restored pages of a plan, [pages, page_size, H, D] each, and a plan of them.

        Slots behind a sequence's last token hold whatever was there, which `paged_attention` never
        reads. Raises ValueError for a plan with another page size.
        """
        if plan.page_size != self.shape.page_size:
            raise ValueError(
                f"the plan has pages of {plan.page_size} tokens; these have {self.shape.page_size}."
            )
        size = self.shape.page_size
        slots = plan.kv_indices.long()[:, None] * size + torch.arange(
            size, device=plan.kv_indices.device
        )
        shape = (len(slots), size, self.shape.heads, self.shape.features)
        keys, values = (x.reshape(shape) for x in self.read(slots.flatten()))
        numbers = torch.arange(
            len(plan.kv_indices), dtype=torch.int32, device=plan.kv_indices.device
        )
        return (keys, values), plan._replace(kv_indices=numbers)

    def _split(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        last = len(self.memory) * self.shape.page_size
        if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < last):
            raise ValueError(f"slots lie in 0 … {last - 1}; not {slots.tolist()}.")
        return slots // self.shape.page_size, slots % self.shape.page_size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
