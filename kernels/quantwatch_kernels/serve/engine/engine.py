"""Continuous batching over paged keys and values, for one transformers model.

    with Engine(model, EngineConfig(num_blocks=512)) as engine:
        engine.add(Request("a", prompt, 64, eos_ids(model)))
        while engine.busy:
            for outcome in engine.step():
                …

Token ids are those of `model.generate(do_sample=False)` for each request alone, whatever else is in
the batch: float arithmetic differs in the last bits with the size of a batch, no more.

A request that can't be served is refused when it comes, one whose logits aren't finite fails; the
others go on. If a whole step raises (memory, say) its requests wait and are computed again.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantwatch_kernels.serve.block_hash import ExtraKeys
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.engine.adaptive import AdaptiveBatch, StepReport
from quantwatch_kernels.serve.engine.batch import Batch, SchedulerStats
from quantwatch_kernels.serve.engine.blocks import EngineBlocks, Host
from quantwatch_kernels.serve.engine.buckets import Buckets, powers_up_to, sizes_up_to
from quantwatch_kernels.serve.engine.config import EngineConfig
from quantwatch_kernels.serve.engine.cuda_graph import CudaGraphs
from quantwatch_kernels.serve.engine.graphs import GraphRunner
from quantwatch_kernels.serve.engine.interface import hold
from quantwatch_kernels.serve.engine.pages import PoolShape, make_pages
from quantwatch_kernels.serve.engine.pieces import Graph
from quantwatch_kernels.serve.engine.request import Outcome, Request
from quantwatch_kernels.serve.engine.runner import ModelRunner, Runner
from quantwatch_kernels.serve.engine.scheduler import Scheduler
from quantwatch_kernels.serve.engine.support import max_positions, probe
from quantwatch_kernels.serve.eviction import make_policy
from quantwatch_kernels.serve.host_tier import HostFile, HostTensors
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.swap import PageBytes, SwapSpace

__all__ = ["Engine", "EngineConfig", "eos_ids"]


class Engine:
    """Serves one model, which does nothing else until `close`."""

    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        observe: Callable[[str, int, Tensor], None] | None = None,
        make_graph: Callable[[], Graph] | None = None,
    ) -> None:
        """`observe(name, position, logits [V])` hears what each new token is chosen from.

        `make_graph`: what graphs are captured with; by default CUDA's, on CUDA.
        """
        facts = probe(model)
        self.model, self.config, self._observe = model, config, observe
        self._positions = max_positions(model)
        scheme = None if config.kv_scheme is None else scheme_named(config.kv_scheme)
        pool = PoolShape(config.num_blocks, config.page_size, model.dtype, model.device)
        self.pages = make_pages(facts.shapes, pool, scheme)
        policy = make_policy(config.eviction, config.num_blocks)
        caching = config.prefix_caching
        manager = BlockManager(config.num_blocks, config.page_size, policy, caching=caching)
        self.blocks = EngineBlocks(manager, self._host(), self._keys())
        self.scheduler = Scheduler(self.blocks, replace(config.limits), facts.window)
        self.adaptive = None if config.adaptive is None else AdaptiveBatch(config.adaptive)
        if self.adaptive is not None:
            self.scheduler.limits.max_running = self.adaptive.limit
        self.runner: Runner = self._runner(make_graph)
        self._before: str | None = hold(model)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._before is not None:
            self.model.set_attn_implementation(self._before)
            self._before = None

    @property
    def busy(self) -> bool:
        """Whether any request is there."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def stats(self) -> SchedulerStats:
        """Counts since the engine was made."""
        return self.scheduler.stats

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError for one that can't be served, no other."""
        if self._positions is not None and request.num_stored > self._positions:
            raise ValueError(
                f"request {request.name!r}: {len(request.prompt)} tokens and "
                f"{request.max_new_tokens} new ones; the model has {self._positions} positions."
            )
        largest = self.model.config.get_text_config(decoder=True).vocab_size
        if max(request.prompt) >= largest:
            raise ValueError(
                f"request {request.name!r}: token {max(request.prompt)} isn't one of {largest}."
            )
        self.scheduler.add(request)

    def cancel(self, name: str) -> Outcome:
        """End a request and free its pages; what they hold stays findable."""
        return self.scheduler.cancel(name)

    def weights_changed(self, adapter: str = "") -> None:
        """Forget all kept pages and captured graphs: they were made with other weights.

        `adapter` names what is loaded now. Raises ValueError while requests are there, whose pages
        would be half of one and half of the other.
        """
        if self.busy:
            count = len(self.scheduler.running) + len(self.scheduler.waiting)
            raise ValueError(f"{count} requests are there; finish or cancel them first.")
        if self.blocks.manager.cache is not None:
            self.blocks.manager.cache.clear()
        if isinstance(self.runner, GraphRunner):
            self.runner.adapter = adapter

    def step(self) -> list[Outcome]:
        """Compute one batch; return who has ended."""
        batch = self.scheduler.schedule()
        if not batch.rows:
            return []
        start = self.clock()
        try:
            logits = self.runner.run(batch, self.blocks.manager.tables)
            sampled = self._sample(batch, logits)
        except BaseException:
            self.scheduler.abandon(batch)
            raise
        self._adapt(batch, self.clock() - start)
        return self.scheduler.update(batch, sampled)

    def run(self, requests: Iterable[Request]) -> dict[str, Outcome]:
        """Serve requests to their ends; those that can't be served are refused with the reason."""
        ended = dict[str, Outcome]()
        for request in requests:
            try:
                self.add(request)
            except ValueError as error:
                ended[request.name] = Outcome(request.name, "refused", (), error=str(error))
        while self.busy:
            ended |= {outcome.name: outcome for outcome in self.step()}
        return ended

    def _adapt(self, batch: Batch, seconds: float) -> None:
        """Tell the controller of a step that only decoded: a chunk's time says nothing of it."""
        if self.adaptive is None or batch.num_tokens > len(batch.rows):
            return
        free = self.blocks.num_free / self.blocks.num_usable
        report = StepReport(seconds, free, len(batch.rows), len(self.scheduler.waiting))
        self.scheduler.limits.max_running = self.adaptive.observe(report)

    def _sample(self, batch: Batch, logits: Tensor) -> dict[str, int | None]:
        rows = [row for row in batch.rows if row.samples]
        if not rows:
            return {}
        chosen = logits.argmax(-1)
        best = logits.gather(-1, chosen[:, None])[:, 0]
        # NaN is the largest of a row that has one, so the chosen logit shows it.
        tokens, finite = chosen.tolist(), torch.isfinite(best).tolist()
        if self._observe is not None:
            for row, each in zip(rows, logits, strict=True):
                self._observe(row.name, row.start + len(row.tokens) - 1, each)
        named = zip(rows, tokens, finite, strict=True)
        return {row.name: token if good else None for row, token, good in named}

    def _runner(self, make_graph: Callable[[], Graph] | None) -> Runner:
        eager, config = ModelRunner(self.model, self.pages), self.config
        if make_graph is None and self.model.device.type == "cuda" and config.graphs:
            make_graph = CudaGraphs()
        # Codes are made with decisions on the host, which no graph can hold.
        if make_graph is None or config.kv_scheme is not None:
            return eager
        limits, usable = config.limits, (config.num_blocks - 1) * config.page_size
        most = usable if self._positions is None else min(usable, self._positions)
        rows = Buckets(sizes_up_to(limits.max_running))
        keys = Buckets(powers_up_to(most, 256))
        tokens = Buckets(powers_up_to(limits.max_batch_tokens, 64))
        return GraphRunner(eager, make_graph, rows, keys, tokens)

    def _host(self) -> Host | None:
        if not self.config.host_pages:
            return None
        pages = PageBytes(self.pages.planes)
        sizes, folder = (self.config.host_pages, pages.page_bytes), self.config.host_folder
        tier = HostTensors(*sizes) if folder is None else HostFile(folder, *sizes)
        return Host(SwapSpace(tier, pages), pages.page_bytes, self.config.preemption_costs)

    def _keys(self) -> ExtraKeys:
        return (*self.config.extra, ("scheme", self.config.kv_scheme or "as computed"))


def eos_ids(model: Any) -> frozenset[int]:
    """Return the ids that end a text, as `generate` has them."""
    found = model.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
