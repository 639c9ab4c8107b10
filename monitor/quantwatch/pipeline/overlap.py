"""Does a check measure what its recipe was calibrated on? Its figures then look too good.

Token ids are compared, not names: one text may lie in two files, or be cut into other windows. A
prompt counts as calibrated on when a calibration text holds one of its blocks of 64 tokens (at
multiples of 64), or the whole prompt if it is shorter; one of fewer than 8 tokens only where it is
the whole text. Shorter passages in common don't count: prompts of one chat template begin alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from quantwatch.domain import WARNING, Suite

BLOCK, KEY = 64, 8
_Ids = tuple[int, ...]


def overlap_notes(suite: Suite, texts: Sequence[Tensor]) -> tuple[str, ...]:
    """Warn, naming how many of a suite's prompts are in calibration texts (int64 [1, T] each)."""
    seen = count_seen([prompt.token_ids for prompt in suite.prompts], texts)
    if not seen:
        return ()
    return (
        f"{WARNING}calibrated on {seen} of the {len(suite.prompts)} measured prompts: "
        "its figures are better than on texts it hasn't seen",
    )


def count_seen(prompts: Sequence[_Ids], texts: Sequence[Tensor]) -> int:
    """Return how many prompts are calibrated on."""
    whole: set[_Ids] = {tuple(text.flatten().tolist()) for text in texts}
    found = _found(whole, {block for ids in prompts for block in _blocks(ids)})
    return sum(ids in whole or any(block in found for block in _blocks(ids)) for ids in prompts)


def _blocks(ids: _Ids) -> Iterator[_Ids]:
    """Yield the whole blocks of a prompt; one that is shorter is its own."""
    if KEY <= len(ids) < BLOCK:
        yield ids
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        yield ids[start : start + BLOCK]


def _found(texts: Iterable[_Ids], blocks: set[_Ids]) -> set[_Ids]:
    """Return the blocks that lie in texts, in one pass: by their first tokens."""
    starting: dict[_Ids, list[_Ids]] = defaultdict(list)
    for block in blocks:
        starting[block[:KEY]].append(block)
    return {
        block
        for ids in texts
        for at in range(len(ids) - KEY + 1)
        for block in starting.get(ids[at : at + KEY], ())
        if ids[at : at + len(block)] == block
    }
