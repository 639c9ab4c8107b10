"""Blocks: stored with the run, read one by one, checked; and what a token costs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text

from quantwatch.domain import MODEL, Block, RunResult, Scope, Suite
from quantwatch.errors import StoreError
from quantwatch.store import blocks
from quantwatch.store.blocks import get_block, get_column, list_blocks
from quantwatch.store.runs import finish_run
from quantwatch.store.session import Database, open_database

Save = Callable[..., RunResult]
Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]


def test_blocks_come_back(db: Database, save: Save, token_blocks: tuple[Block, ...]) -> None:
    """Catches a block under another prompt, scope order or mask."""
    run_id = save(blocks=token_blocks).run_id
    for block in token_blocks:
        back = get_block(db, run_id, "int8", block.kind, block.metric, block.prompt)
        assert back is not None
        assert replace(back, values=block.values, missing=block.missing) == block
        if block.missing is None:
            np.testing.assert_array_equal(back.values, block.values)
            assert back.missing is None
        else:
            np.testing.assert_array_equal(back.missing, block.missing)
            seen = ~block.missing
            np.testing.assert_allclose(back.values[seen], block.values[seen], rtol=0.005)


def at_column(column: int, _width: int) -> int:
    return column


def test_a_column_comes_back(db: Database, save: Save, token_blocks: tuple[Block, ...]) -> None:
    """Catches a column of another matrix, and an exception beyond the last one."""
    run_id = save(blocks=token_blocks).run_id
    whole = get_block(db, run_id, "int8", "per_token", "lens_kl", 0)
    assert whole is not None
    width = whole.values.shape[1]
    for column in range(width):
        part = get_column(db, run_id, "int8", "lens_kl", 0, partial(at_column, column))
        assert part is not None
        np.testing.assert_array_equal(part.values, whole.values[:, [column]])
        assert part.scopes == whole.scopes
    last = get_column(db, run_id, "int8", "lens_kl", 0, lambda columns: columns - 1)
    assert last is not None
    np.testing.assert_array_equal(last.values, whole.values[:, [-1]])
    assert get_column(db, run_id, "int8", "lens_kl", 0, lambda columns: columns) is None
    assert get_column(db, run_id, "int8", "rel_error", 0, lambda _: 0) is None


def test_absent_blocks_are_none(db: Database, save: Save, token_blocks: tuple[Block, ...]) -> None:
    """Catches another prompt's matrix shown in place of a missing one."""
    run_id = save(blocks=token_blocks).run_id
    assert get_block(db, run_id, "int8", "per_token", "lens_kl", 1) is None
    assert get_block(db, run_id, "int4", "per_token", "lens_kl", 0) is None
    assert get_block(db, run_id, "int8", "per_token", "rel_error", 0) is None
    assert get_block(db, "none", "int8", "per_token", "lens_kl", 0) is None


def test_blocks_are_listed_with_their_sizes(
    db: Database, save: Save, token_blocks: tuple[Block, ...]
) -> None:
    """Catches a list that leaves out blocks over all prompts."""
    run_id = save(blocks=token_blocks).run_id
    listed = list_blocks(db, run_id, "int8")
    assert [(b.kind, b.metric, b.prompt) for b in listed] == [
        ("per_prompt", "lens_kl", None),
        ("per_token", "lens_kl", 0),
        ("topk", "logits", 0),
    ]
    assert all(block.num_bytes > 0 for block in listed)
    assert list_blocks(db, run_id, "int4") == []


def test_a_corrupt_block_is_named(
    db: Database, save: Save, token_blocks: tuple[Block, ...]
) -> None:
    """Catches damaged bytes that are drawn as if they had been measured."""
    run_id = save(blocks=token_blocks).run_id
    with db.writer() as session:
        session.execute(
            text("UPDATE block SET payload = :bytes WHERE kind = 'per_token'"),
            {"bytes": b"\x78\x9c damaged"},
        )
    with pytest.raises(StoreError, match=f"per_token block of lens_kl.*{run_id} is corrupt"):
        get_block(db, run_id, "int8", "per_token", "lens_kl", 0)
    assert get_block(db, run_id, "int8", "topk", "logits", 0) is not None


def test_a_block_that_cannot_be_decoded_is_named(
    db: Database, save: Save, token_blocks: tuple[Block, ...]
) -> None:
    """Catches a matrix drawn in another shape."""
    run_id = save(blocks=token_blocks).run_id
    with db.writer() as session:
        session.execute(text("UPDATE block SET shape = '[9,9]' WHERE kind = 'per_token'"))
    with pytest.raises(StoreError, match=r"per_token block of lens_kl.*can't be decoded"):
        get_block(db, run_id, "int8", "per_token", "lens_kl", 0)


def test_a_full_temporary_folder_is_named(
    token_blocks: tuple[Block, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback when there is no room to collect the blocks."""
    monkeypatch.setattr(blocks, "_IN_MEMORY_BYTES", 1)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(StoreError, match="can't be collected in folder /nowhere"):
        blocks.EncodedBlocks(token_blocks)


def test_a_block_of_a_stranger_is_refused(
    db: Database, make_result: Make, begin: Begin, suite: Suite, token_blocks: tuple[Block, ...]
) -> None:
    """Catches blocks that are dropped because their candidate is misspelt."""
    result = make_result()
    begin(db, result)
    with pytest.raises(ValueError, match="int9"):
        finish_run(db, result, suite, [replace(token_blocks[0], candidate="int9")])


@pytest.mark.slow
def test_bytes_per_token(sqlite_file: Path, make_result: Make, begin: Begin, suite: Suite) -> None:
    """Catches a codec that makes a night too large to keep: at most 1,000 bytes per token."""
    num_prompts, num_tokens = 1000, 64
    db = open_database(f"sqlite:///{sqlite_file}")
    before = sqlite_file.stat().st_size
    result = make_result()
    begin(db, result)
    finish_run(db, result, suite, _realistic(num_prompts, num_tokens))
    sizes: dict[str, int] = {}
    for info in list_blocks(db, result.run_id, "int8"):
        name = f"{info.kind} {info.metric}"
        sizes[name] = sizes.get(name, 0) + info.num_bytes
    db.close()
    total = num_prompts * num_tokens
    for name, size in sizes.items():
        print(f"{name:40} {size / total:7.1f} bytes per token")
    whole = (sqlite_file.stat().st_size - before) / total
    print(f"{'whole file':40} {whole:7.1f} bytes per token and candidate")
    assert whole < 1000


def _realistic(num_prompts: int, num_tokens: int) -> Iterator[Block]:
    """One candidate of a model of 30 layers: noise as int8 makes it, lens at 2 of 64 positions."""
    rng = np.random.default_rng(0)
    layers = [Scope(f"layers.{i}") for i in range(30)]
    taps = [Scope("embedding"), Scope("final_norm"), Scope("head")]
    taps += [Scope(f"{layer}{part}") for layer in layers for part in (".attention", ".mlp", "")]
    lens = (*layers, MODEL)
    unread = np.ones((len(lens), num_tokens), dtype=np.bool_)
    unread[:, [20, 50]] = unread[-1] = False
    for prompt in range(num_prompts):

        def noise(rows: int, level: float) -> np.ndarray:
            return rng.lognormal(level, 0.8, (rows, num_tokens))

        yield Block("int8", "per_token", "rel_error", prompt, tuple(taps), noise(93, -4))
        yield Block("int8", "per_token", "lens_kl", prompt, lens, noise(31, -7), unread)
        for metric in ("topk_logit_deviation_k5", "topk_logit_deviation_k3"):
            yield Block("int8", "per_token", metric, prompt, lens, noise(31, -2), unread)
        yield Block("int8", "topk", "logits", prompt, (MODEL,), _top(rng, num_tokens))
    for metric, scopes in (("rel_error", tuple(taps)), ("lens_kl", lens)):
        shape = (num_prompts, len(scopes), 4)
        yield Block("int8", "per_prompt", metric, None, scopes, rng.lognormal(-4, 1, shape))


def _top(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    values = np.empty((5, num_tokens, 10))
    values[0] = rng.integers(0, 49152, (num_tokens, 10))
    logits = np.sort(rng.normal(12, 3, (num_tokens, 10)))[:, ::-1]
    values[1] = logits.astype(np.float32)
    moved = logits + rng.normal(0, 0.1, logits.shape)
    order = np.argsort(-moved, axis=-1)
    values[2] = np.take_along_axis(values[0], order, axis=-1)
    values[3] = np.take_along_axis(moved, order, axis=-1).astype(np.float32)
    values[4] = moved.astype(np.float32)
    return values
