"""A pool of KV pages after some serving: what tables of block management are measured on.

Requests with a common system prompt come and go through the real block manager, a token of each per
step, so that pages lie where serving leaves them. Nothing is computed; what a page holds is random.
"""

from dataclasses import dataclass
from random import Random

from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_pool import PoolExhaustedError

__all__ = ["PAGE_SIZE", "Served", "serve"]

PAGE_SIZE = 16
_SYSTEM, _PROMPT, _ANSWER = 128, (64, 640), (32, 512)
_VOCABULARY = 49152


@dataclass(slots=True)
class Served:
    """A manager with running requests, and how many ran before."""

    manager: BlockManager
    num_started: int = 0
    num_waited: int = 0
    """Times a request found no room and waited for the next step."""


def serve(seed: int, steps: int, *, running: int = 24, num_blocks: int = 1536) -> Served:
    """Run so many decode steps, `running` requests at a time, and leave them running."""
    random = Random(seed)
    served = Served(BlockManager(num_blocks, PAGE_SIZE))
    system = _text(random, _SYSTEM)
    left: dict[str, int] = {}
    for _ in range(steps):
        while len(left) < running:
            name = f"r{served.num_started}"
            served.num_started += 1
            prompt = system + _text(random, random.randint(*_PROMPT))
            if not _write(served, name, prompt, served.manager.start(name, prompt)):
                served.manager.finish(name)
                break
            left[name] = random.randint(*_ANSWER)
        for name in list(left):
            if _write(served, name, _text(random, 1), 0):
                left[name] -= 1
            if left[name] == 0:
                served.manager.finish(name)
                del left[name]
    return served


def _write(served: Served, name: str, tokens: list[int], known: int) -> bool:
    try:
        served.manager.reserve(name, len(tokens) - known)
    except PoolExhaustedError:
        served.num_waited += 1
        return False
    served.manager.commit(name, tokens[known:])
    return True


def _text(random: Random, length: int) -> list[int]:
    return [random.randrange(_VOCABULARY) for _ in range(length)]
