"""How many prompts a decision takes."""

import math


def more_prompts(half_width: float, wanted: float, num_prompts: int) -> int:
    """Return about how many more prompts bring an interval down to the wanted half-width.

    The width is t·s/√n, with s the spread of the paired differences: n grows with its square. At
    least 1; both widths are positive.
    """
    return max(1, math.ceil(num_prompts * ((half_width / wanted) ** 2 - 1)))
