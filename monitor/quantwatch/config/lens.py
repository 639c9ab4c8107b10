"""Which settings of the lens go together. Pure."""

from typing import Literal, Protocol

Products = Literal["float32", "int16", "bfloat16"]


class _Check(Protocol):
    @property
    def lens(self) -> Literal["sampled", "estimated"]: ...
    @property
    def lens_positions(self) -> int: ...
    @property
    def lens_products(self) -> Products: ...


def lens_problem(check: _Check) -> str | None:
    """Return why a check's layers can't be read as it says, None when they can."""
    if check.lens != "estimated":
        return None
    if not check.lens_positions:
        return (
            'lens = "estimated" needs lens_positions of 1 or more: the exact sample that the '
            "estimates are held against"
        )
    if check.lens_products != "float32":
        return (
            f'lens = "estimated" is not allowed with lens_products = "{check.lens_products}": '
            "the sample that estimates are held against has to be exact"
        )
    return None
