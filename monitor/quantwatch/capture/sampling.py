"""Choose what is measured in detail: the same tokens every night, whatever the batches are.

Each choice is a hash of the suite, the prompt's index and the stratum: no generator's state is
carried from one prompt to the next.
"""

import hashlib
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import Prompt, Suite


def stratified_positions(
    suite_hash: str, prompt: Prompt, count: int, purpose: str
) -> NDArray[np.int64]:
    """Choose `count` scored positions of a prompt, one in each of `count` equal strata, ascending.

    All scored positions when there are fewer.
    """
    scored = prompt.num_scored
    count = min(count, scored)
    edges = [prompt.score_start + scored * k // count for k in range(count + 1)] if count else [0]
    chosen = [
        first + _draw(f"{purpose}:{suite_hash}:{prompt.index}:{k}") % (last - first)
        for k, (first, last) in enumerate(pairwise(edges))
    ]
    return np.array(chosen, dtype=np.int64)


def lens_positions(suite_hash: str, prompt: Prompt, per_256: int) -> NDArray[np.int64]:
    """Choose the positions that are read through the lens: `per_256` of 256, at least one."""
    count = max(1, round(prompt.num_scored * per_256 / 256)) if per_256 else 0
    return stratified_positions(suite_hash, prompt, count, "lens")


def token_seeds(suite_hash: str, prompt: Prompt, purpose: str) -> NDArray[np.int64]:
    """Return one 64-bit seed per scored position of a prompt."""
    positions = range(prompt.score_start, len(prompt.token_ids))
    seeds = [_draw(f"{purpose}:{suite_hash}:{prompt.index}:{at}") for at in positions]
    return np.array(seeds, dtype=np.uint64).view(np.int64)


def isolated_prompts(suite: Suite, fraction: float) -> frozenset[int]:
    """Choose whole prompts, one category after another, for `fraction` of the scored tokens.

    A prompt that no longer fits is passed over; when none fits, the shortest one is taken.
    """
    if fraction <= 0:
        return frozenset()
    left = fraction * sum(prompt.num_scored for prompt in suite.prompts)
    chosen = []
    for prompt in _by_turns(suite):
        if prompt.num_scored <= left:
            chosen.append(prompt.index)
            left -= prompt.num_scored
    shortest = min(suite.prompts, key=lambda prompt: (prompt.num_scored, prompt.index))
    return frozenset(chosen or [shortest.index])


def _by_turns(suite: Suite) -> list[Prompt]:
    """Order the prompts so that every category has its turn before one comes again."""
    rank = {p.index: _draw(f"isolated:{suite.hash}:{p.index}") for p in suite.prompts}
    turns: dict[str, int] = {}
    order = []
    for prompt in sorted(suite.prompts, key=lambda p: rank[p.index]):
        turn = turns.get(prompt.category, 0)
        turns[prompt.category] = turn + 1
        order.append((turn, rank[prompt.index], prompt.index, prompt))
    return [prompt for *_, prompt in sorted(order, key=lambda entry: entry[:3])]


def _draw(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
