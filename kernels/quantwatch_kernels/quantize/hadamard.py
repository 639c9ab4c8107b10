"""Hadamard rotations of any width n = m · 2^k for which a base matrix of order m can be built.

H is ±1 with H·Hᵀ = n·I; x·H/√n spreads an outlier over all n channels. Sylvester's construction
doubles orders: H_{2n} = [[H, H], [H, −H]]. Base orders come from Paley's two constructions over the
finite field of q elements, χ its quadratic character and Q[a, b] = χ(a − b):

- q ≡ 3 mod 4: order q + 1, I + S with S = [[0, 1], [−1, Q]]: 4, 8, 12, 20, 24, 28, 32, 44, 48, 60 …
- q ≡ 1 mod 4: order 2(q + 1), C ⊗ [[1, 1], [1, −1]] + I ⊗ [[1, −1], [−1, −1]] with
  C = [[0, 1], [1, Q]]: 12, 28, 36, 52, 60, 76, 84, 100 …

q may be a prime or its square or cube: 52 needs 25 elements, 344 = 11008/32 needs 343. Each base is
checked when it is made. So 576 = 36 · 16, 1536 = 12 · 128, 896 = 28 · 32. Orders 92, 116, 156, 172
have other constructions, not built here: the error says so.

H_n = Sylvester(2^k) ⊗ base(m), so x·H is two small products (the Sylvester part in factors of 64)
instead of one with n² terms. Rotation by a random diagonal of signs first, D·H/√n, is seeded. With
`block`, H is block-diagonal: neighbours are mixed only within blocks.
"""

import math
from functools import cache
from itertools import product

import torch
from torch import Generator, Tensor, nn

__all__ = ["Hadamard", "Inverse", "hadamard_base", "hadamard_matrix"]

_LARGEST_BASE = 2048
_FACTOR = 64


def hadamard_matrix(order: int) -> Tensor:
    """Return H, int8 [order, order] of ±1 with H·Hᵀ = order · I.

    Raises ValueError for an order that no construction here reaches.
    """
    base = hadamard_base(order)
    matrix = _base_matrix(base)
    return torch.kron(_sylvester(order // base), matrix)


def hadamard_base(order: int) -> int:
    """Return the smallest m with order = m · 2^k that can be constructed.

    Raises ValueError naming the order and the nearest widths that exist.
    """
    if (found := _find_base(order)) is not None:
        return found
    below = next((n for n in range(order - 1, 0, -1) if _find_base(n)), 1)
    above = next(n for n in range(max(order, 0) + 1, 2 * max(order, 1) + 2) if _find_base(n))
    blocks = [n for n in range(order // 2, 1, -1) if order % n == 0 and _find_base(n)]
    hint = f"; blocks of {blocks[0]} would fit" if blocks else ""
    raise ValueError(
        f"no Hadamard matrix of order {order} can be constructed here "
        f"(orders are m · 2^k; the nearest are {below} and {above}{hint})."
    )


@cache
def _find_base(order: int) -> int | None:
    if order < 1:
        return None
    odd = order
    while odd % 2 == 0:
        odd //= 2
    m = odd
    while m <= min(order, _LARGEST_BASE):
        if m in (1, 2) or (m % 4 == 0 and _paley_field(m) is not None):
            return m
        m *= 2
    return None


def _paley_field(order: int) -> tuple[int, int, bool] | None:
    """Return (p, k, first construction) of the field that gives this order, or None."""
    for q, first in ((order - 1, True), (order // 2 - 1, False)):
        if q % 4 == (3 if first else 1) and (field := _prime_power(q)) is not None:
            return *field, first
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    for k in (1, 2, 3):
        p = round(q ** (1 / k))
        if p > 2 and p**k == q and all(p % d for d in range(2, math.isqrt(p) + 1)):
            return p, k
    return None


@cache
def _base_matrix(order: int) -> Tensor:
    """Return a base, int8. Order 1 and 2 are Sylvester's own."""
    if order <= 2:
        return _sylvester(order)
    field = _paley_field(order)
    assert field is not None
    p, k, first = field
    core = _characters(p, k)
    size = len(core) + 1
    bordered = torch.zeros(size, size, dtype=torch.int64)
    bordered[0, 1:] = 1
    bordered[1:, 0] = -1 if first else 1
    bordered[1:, 1:] = core
    eye = torch.eye(size, dtype=torch.int64)
    if first:
        matrix = bordered + eye
    else:
        matrix = torch.kron(bordered, torch.tensor([[1, 1], [1, -1]]))
        matrix += torch.kron(eye, torch.tensor([[1, -1], [-1, -1]]))
    gram = matrix @ matrix.T
    if not torch.equal(gram, order * torch.eye(order, dtype=torch.int64)):
        raise AssertionError(f"the construction of order {order} is wrong")
    return matrix.to(torch.int8)


def _characters(p: int, k: int) -> Tensor:
    """Return χ(a − b) over the field of p^k elements, int64 [q, q]."""
    elements = list(product(range(p), repeat=k))
    modulus = _irreducible(p, k)
    squares = {_multiply(a, a, modulus, p) for a in elements}
    zero = elements[0]
    character = {a: 0 if a == zero else (1 if a in squares else -1) for a in elements}
    rows = [
        [character[tuple((x - y) % p for x, y in zip(a, b, strict=True))] for b in elements]
        for a in elements
    ]
    return torch.tensor(rows, dtype=torch.int64)


def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """Return c with x^k = c₀ + c₁x + … irreducible: of degree 2 or 3 that means without a root."""
    if k == 1:
        return (0,)
    for lower in product(range(p), repeat=k):
        if all((x**k - sum(c * x**n for n, c in enumerate(lower))) % p for x in range(p)):
            return lower
    raise AssertionError(f"no irreducible polynomial of degree {k} over {p} elements")


def _multiply(
    a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], p: int
) -> tuple[int, ...]:
    k = len(a)
    terms = [0] * (2 * k - 1)
    for i, j in product(range(k), repeat=2):
        terms[i + j] += a[i] * b[j]
    for high in range(2 * k - 2, k - 1, -1):  # x^high = x^(high − k) · (c₀ + c₁x + …)
        for n, c in enumerate(modulus):
            terms[high - k + n] += terms[high] * c
    return tuple(term % p for term in terms[:k])


@cache
def _sylvester(order: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.int8)
    while len(matrix) < order:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), matrix)
    return matrix


class Hadamard(nn.Module):
    """The orthogonal rotation x → x·D·H/√n of the last axis; an input transform.

    Buffers are not saved: width, seed and block make them. Computed in float32 (float64 for float64
    inputs), returned in the input's dtype.
    """

    signs: Tensor

    def __init__(self, width: int, seed: int | None = None, block: int | None = None) -> None:
        """`seed` None: no signs. Raises ValueError unless blocks fill the width and H exists."""
        super().__init__()
        self.width, self.seed, self.block = width, seed, block or width
        if self.block < 1 or width % self.block:
            raise ValueError(f"blocks of {self.block} don't fill a width of {width}.")
        base = hadamard_base(self.block)
        sizes, rest = [], self.block // base
        while rest > 1:
            sizes.append(min(rest, _FACTOR))
            rest //= sizes[-1]
        factors = [_sylvester(size) for size in sizes] + ([_base_matrix(base)] if base > 1 else [])
        self._num_factors = len(factors)
        for n, factor in enumerate(factors):
            self.register_buffer(f"factor{n}", factor, persistent=False)
        self.register_buffer("signs", _signs(width, seed), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate the last axis [.., width]. Raises ValueError for another width."""
        return self._mix(self._upcast(x) * self.signs, transpose=False).to(x.dtype)

    def inverse(self, x: Tensor) -> Tensor:
        """Undo the rotation."""
        return (self._mix(self._upcast(x), transpose=True) * self.signs).to(x.dtype)

    def matrix(self) -> Tensor:
        """Return the whole rotation in float64 [width, width]: x·matrix is the slow twin."""
        dense = hadamard_matrix(self.block).double() / math.sqrt(self.block)
        whole = torch.kron(torch.eye(self.width // self.block, dtype=torch.float64), dense)
        return self.signs.double().cpu()[:, None] * whole

    def extra_repr(self) -> str:
        """Say in `print(model)` which rotation this is."""
        return f"width={self.width}, block={self.block}, seed={self.seed}"

    def _upcast(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise ValueError(f"a rotation of width {self.width} was given {list(x.shape)}.")
        return x if x.dtype == torch.float64 else x.float()

    def _mix(self, x: Tensor, *, transpose: bool) -> Tensor:
        """Multiply by each Kronecker factor along its own axis."""
        shape = x.shape
        inner = self.block
        for n in range(self._num_factors):
            factor: Tensor = getattr(self, f"factor{n}").to(x.dtype)
            size = len(factor)
            inner //= size
            parts = x.reshape(-1, size, inner)
            # Row vectors times H: along the middle axis that is Hᵀ from the left.
            left = factor if transpose else factor.T
            x = parts.squeeze(-1) @ left.T if inner == 1 else left @ parts
        return x.reshape(shape) / math.sqrt(self.block)


def _signs(width: int, seed: int | None) -> Tensor:
    if seed is None:
        return torch.ones(width, dtype=torch.int8)
    generator = Generator().manual_seed(seed)
    return torch.randint(0, 2, (width,), generator=generator, dtype=torch.int8) * 2 - 1


class Inverse(nn.Module):
    """The inverse of a rotation as a transform."""

    def __init__(self, rotation: Hadamard) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        """Undo the rotation of the last axis."""
        return self.rotation.inverse(x)
