"""Which models the engine runs, found out before the first request.

Refused by what they say of themselves: no causal decoder, layers that are neither full nor sliding
attention (state spaces, chunks), and rotary embeddings that depend on the longest text around
(dynamic, longrope): one request would change another.

Everything else is tried: two short texts run through pages in one flat batch, in two chunks, and
their logits must be those of the model by itself. That finds what no list would: attention that
mixes the tokens of a batch, or that never comes to the engine's function.
"""

from typing import Any

import torch
from torch import Tensor

from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.serve.block_manager import BlockManager
from quantwatch_kernels.serve.engine.batch import Batch, Row
from quantwatch_kernels.serve.engine.interface import AttentionCall, held, running
from quantwatch_kernels.serve.engine.pages import FloatPages, LayerShape, PoolShape
from quantwatch_kernels.serve.engine.runner import ModelRunner, forward

__all__ = ["ModelFacts", "max_positions", "probe"]

_ALLOWED = {"full_attention", "sliding_attention"}
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TEXTS = (7, 14)
"""Cut after 6 tokens: the second batch holds a single token beside a chunk of another text."""


class ModelFacts:
    """Shapes and windows per layer, as a pass through the model has shown them."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}
        self._windows: dict[int, int | None] = {}

    def attention(self, call: AttentionCall) -> Tensor:
        """Note a layer's shapes; answer zeros."""
        self._shapes[call.layer] = LayerShape(
            call.keys.shape[1], call.keys.shape[2], call.values.shape[2]
        )
        self._windows[call.layer] = call.rule.window
        tokens, heads = call.queries.shape[:2]
        return call.queries.new_zeros(tokens, heads, call.values.shape[2])

    @property
    def shapes(self) -> list[LayerShape]:
        """Of layers 0, 1, …"""
        return [self._shapes[layer] for layer in sorted(self._shapes)]

    @property
    def window(self) -> int | None:
        """Keys that a query sees at most in any layer; None: all, in one of them."""
        windows = list(self._windows.values())
        widest = [window for window in windows if window is not None]
        return max(widest) if widest and len(widest) == len(windows) else None

    def check(self, model: Any) -> None:
        """Raise ValueError unless every layer came, and slides as its config says."""
        text = model.config.get_text_config(decoder=True)
        count = text.num_hidden_layers
        what = type(model).__name__
        if sorted(self._shapes) != list(range(count)):
            raise ValueError(f"{what}: {len(self._shapes)} of {count} layers attend; all must.")
        for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
            if kind not in _ALLOWED:
                raise ValueError(
                    f"{what}: layer {layer} is {kind}; allowed are {sorted(_ALLOWED)}."
                )
            window = self._windows[layer]
            if (kind == "sliding_attention") != (window is not None):
                raise ValueError(f"{what}: layer {layer} is {kind} and its window is {window}.")


def max_positions(model: Any) -> int | None:
    """Return how many tokens a text may have, None where the model doesn't say."""
    text = model.config.get_text_config(decoder=True)
    found = getattr(text, "max_position_embeddings", None)
    return int(found) if found else None


@torch.inference_mode()
def probe(model: Any) -> ModelFacts:
    """Return a model's facts. Raises ValueError for one that the engine doesn't run right."""
    _check_said(model)
    known = model.config.get_text_config(decoder=True).vocab_size
    texts = [(torch.arange(n) * 7 + n) % min(known, 97) for n in _TEXTS]
    expected = torch.stack(
        [
            model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, -1]
            for ids in texts
        ]
    )
    facts = ModelFacts()
    with held(model):
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        with running(facts):
            forward(model, one, one, one)
        facts.check(model)
        actual = _through_pages(model, facts, texts)
    error = relative_rmse(actual.double(), expected.double())
    if not error <= _TOLERANCE[model.dtype]:
        raise ValueError(
            f"pages change what {type(model).__name__} computes (relative error {error:.1e}); "
            "its attention isn't causal attention over one text, so the engine can't run it."
        )
    return facts


def _through_pages(model: Any, facts: ModelFacts, texts: list[Tensor]) -> Tensor:
    manager = BlockManager(16, 4, caching=False)
    pool = PoolShape(16, 4, model.dtype, model.device)
    runner = ModelRunner(model, FloatPages(facts.shapes, pool))
    for number, ids in enumerate(texts):
        manager.start(str(number), ids.tolist())
    logits = torch.empty(0)
    for begin, end in ((0, 6), (6, None)):
        rows = []
        for number, ids in enumerate(texts):
            tokens = tuple(ids[begin:end].tolist())
            manager.reserve(str(number), len(tokens))
            manager.commit(str(number), tokens)
            rows.append(Row(str(number), begin, tokens, samples=end is None))
        logits = runner.run(Batch(tuple(rows)), manager.tables)
    return logits


def _check_said(model: Any) -> None:
    what: str = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{what} is no language model of transformers.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{what} has an encoder; the engine runs decoders.")
    if model.training:
        raise ValueError(f"{what} is in training mode; call eval() first.")
    if model.dtype not in _TOLERANCE:
        raise ValueError(f"{what} is in {model.dtype}; allowed are {list(_TOLERANCE)}.")
    for kind in _rope_types(config.get_text_config(decoder=True)):
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"{what} has {kind} rotary embeddings, which depend on the longest text of a "
                "batch: one request would change another."
            )


def _rope_types(text: Any) -> list[str]:
    parameters = getattr(text, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(one["rope_type"]) for one in each if one.get("rope_type")]
