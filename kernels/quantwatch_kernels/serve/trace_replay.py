"""Replaying a trace through the real pool and prefix cache.

Content n of a trace becomes the tokens n·T … n·T + T − 1, so equal contents get equal tokens and no
others do. What the block manager then hits must be what `trace_policies.simulate` counts: two
implementations of one rule, checked against each other.
"""

from collections.abc import Sequence

from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.block_trace import BlockTrace
from quantwatch_kernels.serve.cached_block import CacheStats
from quantwatch_kernels.serve.eviction import EvictionPolicy

__all__ = ["replay"]


def replay(trace: BlockTrace, capacity: int, policy: EvictionPolicy) -> CacheStats:
    """Run a trace with `capacity` usable blocks and return what the prefix cache counted.

    Raises PoolExhaustedError when requests that run at the same time use more.
    """
    manager = BlockManager(capacity + 1, trace.page_size, policy)
    for event in trace.events:
        number = event if event >= 0 else -1 - event
        name, request = str(number), trace.requests[number]
        if event >= 0:
            prompt = _tokens(trace, request.prompt)
            # The token behind the prompt's full blocks stands for its unfinished page.
            manager.start(name, [*prompt, _unfinished(trace, number)])
            _compute(manager, name, prompt)
        else:
            _compute(manager, name, _tokens(trace, request.whole))
            manager.finish(name)
    assert manager.cache is not None
    return manager.cache.stats


def _compute(manager: BlockManager, name: str, tokens: Sequence[int]) -> None:
    done = manager.table(name).num_tokens
    manager.reserve(name, len(tokens) - done)
    manager.commit(name, tokens[done:])


def _tokens(trace: BlockTrace, block: int) -> list[int]:
    size = trace.page_size
    return [number * size + k for number in trace.path(block) for k in range(size)]


def _unfinished(trace: BlockTrace, number: int) -> int:
    return len(trace.parents) * trace.page_size + number
