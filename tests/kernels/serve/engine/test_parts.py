"""What the engine's attention is made of: groups, masks and pages against a float64 loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.serve.engine.models import build, prompt
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    T5Config,
)

from quantwatch_kernels.serve.block_pool import Writable
from quantwatch_kernels.serve.block_table import BlockTable
from quantwatch_kernels.serve.engine.engine import Engine, EngineConfig
from quantwatch_kernels.serve.engine.interface import AttentionCall
from quantwatch_kernels.serve.engine.layout import Layout, TextRow, decode_groups
from quantwatch_kernels.serve.engine.pages import FloatPages, LayerShape, PoolShape, copy_pages
from quantwatch_kernels.serve.engine.runner import LayoutAttention
from quantwatch_kernels.serve.engine.support import probe
from quantwatch_kernels.serve.paged_attention import AttentionRule

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH, PAGE = 2, 3, 8, 4


@given(st.lists(st.integers(1, 5000), max_size=20))
def test_groups_waste_less_than_half(lengths: list[int]) -> None:
    groups = decode_groups(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert group == sorted(group)
        longest, shortest = (f(lengths[i] for i in group) for f in (max, min))
        assert 2 * shortest >= longest or longest <= 64


def slow(q: Tensor, k: Tensor, v: Tensor, own: int, rule: AttentionRule) -> Tensor:
    """One query of one head, keys by position, in float64."""
    first = 0 if rule.window is None else max(0, own - rule.window + 1)
    scores = k[first : own + 1] @ q * (WIDTH**-0.5 if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = torch.exp(scores - scores.max())
    return weights @ v[first : own + 1] / weights.sum()


RULES = {
    "plain": AttentionRule(),
    "scaled": AttentionRule(scaling=0.5),
    "window of a page and one": AttentionRule(window=5),
    "window of a page less one": AttentionRule(window=3),
    "window of one": AttentionRule(window=1),
    "soft-capped": AttentionRule(softcap=0.7),
    "soft-capped window": AttentionRule(0.3, 0.7, 4),
}
# (start, count) per text: decodes, a text's first chunk, a later one, lengths around the page.
BATCHES = {
    "decodes": [(0, 1), (3, 1), (4, 1), (90, 1), (200, 1)],
    "one decode": [(15, 1)],
    "from the beginning": [(0, 9)],
    "all kinds": [(16, 1), (0, 5), (7, 6), (90, 1), (3, 4), (100, 3)],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_against_a_loop(batch: str, rule: str) -> None:
    """Every query of a flat batch, alone and in float64; unwritten slots are NaN."""
    generator = torch.Generator().manual_seed(0)
    shape = PoolShape(160, PAGE, torch.float32, CPU)
    pages = FloatPages([LayerShape(HEADS, WIDTH, WIDTH)], shape)
    for plane in pages.planes:
        plane[1:] = torch.nan
    free = (1 + torch.randperm(159, generator=generator)).tolist()
    rows, texts = [], []
    for start, count in BATCHES[batch]:
        table, end = BlockTable(PAGE), start + count
        needed = table.blocks_needed(end)
        table.append([free.pop() for _ in range(needed)], end)
        slots = table.slot_mapping(0, end)
        q, k, v = (
            torch.randn(n, h, WIDTH, generator=generator)
            for n, h in ((count, HEADS * GROUPS), (end, HEADS), (end, HEADS))
        )
        pages.write(0, slots[:start], k[:start], v[:start])
        rows.append(TextRow(start, count, slots))
        texts.append((q, k, v))
    layout = Layout(rows, torch.float32, CPU)
    q_new, k_new, v_new = (
        torch.cat([text[i][-row.count :] for text, row in zip(texts, rows, strict=True)])
        for i in range(3)
    )
    answers = LayoutAttention(pages, layout, layout.slots)
    out = answers.attention(AttentionCall(0, q_new, k_new, v_new, RULES[rule]))
    expected = torch.stack(
        [
            torch.stack(
                [
                    slow(q[i, h].double(), k[:, h // GROUPS].double(), v[:, h // GROUPS].double(),
                         row.start + i, RULES[rule])
                    for h in range(HEADS * GROUPS)
                ]
            )
            for (q, k, v), row in zip(texts, rows, strict=True)
            for i in range(row.count)
        ]
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)
    positions = [row.start + i for row in rows for i in range(row.count)]
    assert layout.positions.tolist() == positions


def test_pages_are_copied_in_order() -> None:
    """A page that is copied and then written over: the copy keeps what was asked for first."""
    pages = FloatPages([LayerShape(1, 2, 2)], PoolShape(4, 2, torch.float32, CPU))
    for plane in pages.planes:
        for block in range(4):
            plane[block] = block
    copy_pages(pages, [Writable(2, 1), Writable(1, 3), Writable(3, None)])
    assert [plane[:, 0, 0, 0].tolist() for plane in pages.planes] == 2 * [[0.0, 3.0, 1.0, 3.0]]


SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def dynamic(kind: str) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    return LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "attention sinks": (
        lambda: GptOssConfig(**SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        "attention sinks of its own",
    ),
    "state space": (
        lambda: MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4),
        "can't be replaced|aren't|attend|changes? what",
    ),
    "encoder": (
        lambda: T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2),
        "has an encoder",
    ),
    "rotary by the longest": (lambda: dynamic("dynamic"), "dynamic rotary embeddings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_does_not_run(name: str) -> None:
    """Refused before the first request, and the model is as it was."""
    make, text = REFUSED[name]
    kind = AutoModelForSeq2SeqLM if name == "encoder" else AutoModelForCausalLM
    model = kind.from_config(make()).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=text):
        Engine(model, EngineConfig(8, 4))
    assert model.config._attn_implementation == before


class _Mixes(nn.Module):
    """Adds each token's neighbour, whoever's it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + x.roll(1, 1)
        return out


def test_a_model_that_mixes_the_tokens_of_a_batch_is_found() -> None:
    """No list of families would: one layer's MLP looks at the token before it in the batch."""
    model = build("llama")
    assert probe(model).window is None
    model.model.layers[1].mlp = _Mixes(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match="pages change what LlamaForCausalLM computes"):
        Engine(model, EngineConfig(8, 4))
    assert model(input_ids=torch.tensor([prompt(4)])).logits.shape == (1, 4, 96)


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        Engine(build("llama").train(), EngineConfig(8, 4))


def test_no_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear is no language model"):
        Engine(nn.Linear(2, 2), EngineConfig(8, 4))


@pytest.mark.parametrize(
    ("name", "window"),
    [("llama", None), ("mistral, sliding", 11), ("gemma3", None)],
    ids=["full", "all slide", "some slide"],
)
def test_pages_may_go_only_if_every_layer_slides(name: str, window: int | None) -> None:
    assert probe(build(name)).window == window
