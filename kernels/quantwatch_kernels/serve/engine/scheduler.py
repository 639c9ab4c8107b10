"""Which tokens are computed next: continuous batching as a state machine, without a tensor.

    waiting ──admit──► running ──eos, length──► ended         cancel: from anywhere to ended
       ▲                  │
       └──── preempt ─────┘   to the host (its pages wait there) or for good (computed again)

One step is one flat batch of at most `max_batch_tokens`. Whoever decodes gets its one token first,
so that a long prompt never stalls those that answer; what is left goes to prompts in order, in
chunks (Sarathi-Serve, 2403.02310). Order is (priority, arrival). When no block is free the last in
order is preempted, so the first always moves on, and with it the whole: a request that the empty
pool couldn't hold to its end is refused when it comes.

Hysteresis: a block is taken as long as one is free, but nobody is admitted into the last `reserve`
share of the pool, nor in a step that preempted, nor past the blocks that running prompts still
need. Otherwise whoever was just preempted would come back at once and be preempted again.

Given up: skipping a request that doesn't fit for a smaller one behind it (long prompts would
starve), and preempting for somebody who waits.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from quantwatch_kernels.serve.block_pool import Writable
from quantwatch_kernels.serve.engine.batch import Batch, Limits, Row, SchedulerStats
from quantwatch_kernels.serve.engine.ports import Blocks
from quantwatch_kernels.serve.engine.request import Outcome, Request, Sequence

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Step:
    budget: int
    rows: list[Row] = field(default_factory=list)
    copies: list[Writable] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """`schedule` says what to compute, `update` hears what came out; one after the other."""

    def __init__(self, blocks: Blocks, limits: Limits, window: int | None = None) -> None:
        """`window`: keys a query sees in every layer, so that pages behind it can go; None: all."""
        self.limits, self.stats = limits, SchedulerStats()
        self._blocks, self._window = blocks, window
        self._arrivals = count()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def running(self) -> tuple[str, ...]:
        """Names in order."""
        return tuple(one.name for one in self._running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names in order, those in the host included."""
        return tuple(one.name for one in self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError for one that can't ever be served, or is there."""
        if any(one.name == request.name for one in self._all()):
            raise ValueError(f"request {request.name!r} is there already.")
        pages = self._pages(request.num_stored)
        if pages > self._blocks.num_usable:
            raise ValueError(
                f"request {request.name!r}: a prompt of {len(request.prompt)} tokens and "
                f"{request.max_new_tokens} new ones take {pages} pages of "
                f"{self._blocks.page_size} tokens; the pool has {self._blocks.num_usable}."
            )
        one = Sequence(request, next(self._arrivals), list(request.prompt))
        insort(self._waiting, one, key=lambda other: other.order)

    def cancel(self, name: str) -> Outcome:
        """End a request, wherever it is. Raises ValueError if it isn't there."""
        for one in self._all():
            if one.name == name:
                return self._end(one, one.outcome("cancelled"))
        raise ValueError(f"there is no request {name!r}; it may have ended.")

    def schedule(self) -> Batch:
        """Reserve slots for the next batch and return it; empty if nobody is there.

        If the pages raise on the way (a swap whose copy fails), who had slots by then waits and is
        computed again, and nobody is lost.
        """
        step = _Step(self.limits.max_batch_tokens)
        try:
            for one, num_new in self._shares():
                if one in self._running and self._make_room(one, num_new, step):
                    self._give(one, num_new, step)
            while not step.preempted and self._admit_next(step):
                pass
        except BaseException:
            self.abandon(Batch(tuple(step.rows)))
            raise
        self.stats.steps += 1
        return Batch(tuple(step.rows), tuple(step.copies))

    def update(self, batch: Batch, sampled: Mapping[str, int | None]) -> list[Outcome]:
        """Note that a batch is computed; return who has ended.

        `sampled`: the next token of each row that samples; None where its logits aren't finite.
        Rows of requests that were cancelled meanwhile are ignored.
        """
        by_name = {one.name: one for one in self._running}
        ended = list[Outcome]()
        for row in batch.rows:
            one = by_name.get(row.name)
            if one is None:
                continue
            one.in_flight = 0
            if row.samples and sampled[row.name] is None:
                text = f"the logits after token {len(one.tokens)} aren't finite."
                ended.append(self._end(one, one.outcome("failed", text)))
                continue
            outcome = self._advance(one, row, sampled)
            if outcome is not None:
                ended.append(self._end(one, outcome))
        return ended

    def abandon(self, batch: Batch) -> None:
        """Hear that a batch failed as a whole: its requests wait and are computed again."""
        for one in list(self._running):
            if any(row.name == one.name for row in batch.rows):
                self._blocks.finish(one.name)
                one.computed = one.in_flight = 0
                self._back(one)

    def _advance(
        self, one: Sequence, row: Row, sampled: Mapping[str, int | None]
    ) -> Outcome | None:
        self._blocks.commit(one.name, row.tokens)
        one.computed += len(row.tokens)
        self.stats.computed_tokens += len(row.tokens)
        if self._window is not None:
            # The next query, at position `computed`, sees computed − window + 1 and what follows.
            self._blocks.drop_before(one.name, one.computed - self._window + 1)
        token = sampled[one.name] if row.samples else None
        if token is None:
            return None
        one.tokens.append(token)
        if token in one.request.eos_ids:
            return one.outcome("eos")
        done = len(one.generated) >= one.request.max_new_tokens
        return one.outcome("length") if done else None

    def _shares(self) -> list[tuple[Sequence, int]]:
        """Return who gets how many tokens, in order: decodes first, prompts from what is left."""
        left = self.limits.max_batch_tokens - sum(one.missing == 1 for one in self._running)
        shares = []
        for one in self._running:
            num_new = 1 if one.missing == 1 else min(one.missing, max(left, 0))
            left -= num_new if one.missing > 1 else 0
            if num_new:
                shares.append((one, num_new))
        return shares

    def _make_room(self, one: Sequence, num_new: int, step: _Step) -> bool:
        """Preempt from the end of the order until the tokens have room; False: it went itself."""
        while self._blocks.wanted(one.name, num_new) > self._blocks.num_free:
            # Those who have slots in this step stand before `one`, so never at the end.
            last = self._running[-1]
            how = self._blocks.preempt(last.name)
            last.in_host = how == "swap"
            self.stats.swapped += last.in_host
            self.stats.recomputed += not last.in_host
            if not last.in_host:
                last.computed = 0
            last.num_preempted += 1
            step.preempted = True
            self._back(last)
            if last is one:
                return False
        return True

    def _give(self, one: Sequence, num_new: int, step: _Step) -> None:
        step.copies += self._blocks.reserve(one.name, num_new)
        end = one.computed + num_new
        tokens = tuple(one.tokens[one.computed : end])
        step.rows.append(Row(one.name, one.computed, tokens, end == len(one.tokens)))
        step.budget -= num_new
        one.in_flight = num_new

    def _admit_next(self, step: _Step) -> bool:
        if not self._waiting or len(self._running) >= self.limits.max_running or step.budget < 1:
            return False
        one = self._waiting[0]
        if not self._fits(one):
            return False
        if one.in_host:
            self._blocks.resume(one.name)
            one.in_host = False
        else:
            one.computed = self._blocks.start(one.name, one.tokens, one.request.extra)
            self.stats.cached_tokens += one.computed
            if one.num_cached is None:
                one.num_cached = one.computed
        self._waiting.pop(0)
        insort(self._running, one, key=lambda other: other.order)
        self._give(one, min(one.missing, step.budget), step)
        return True

    def _fits(self, one: Sequence) -> bool:
        if one.in_host:
            room = self._blocks.wanted_back(one.name)
            room += self._pages(len(one.tokens)) - self._pages(one.computed)
        else:
            room = self._blocks.wanted_to_start(one.tokens, one.request.extra)
        if not self._running:
            return room <= self._blocks.num_free
        promised = sum(
            self._blocks.wanted(other.name, other.missing - other.in_flight)
            for other in self._running
        )
        left = self._blocks.num_free - promised - room
        return left >= self.limits.reserve * self._blocks.num_usable

    def _back(self, one: Sequence) -> None:
        self._running.remove(one)
        insort(self._waiting, one, key=lambda other: other.order)

    def _end(self, one: Sequence, outcome: Outcome) -> Outcome:
        if one in self._running:
            self._running.remove(one)
            self._blocks.finish(one.name)
            return outcome
        self._waiting.remove(one)
        if one.in_host:
            self._blocks.discard(one.name)
        return outcome

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._blocks.page_size)

    def _all(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting
