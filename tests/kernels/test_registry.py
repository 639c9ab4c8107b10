"""Operators, back ends, and the count of fallbacks."""

import threading

import pytest

from quantwatch_kernels.registry import (
    Fallback,
    Op,
    Slow,
    Watch,
    clear_fallbacks,
    fallbacks,
    prefer,
    record_fallback,
    record_slow,
    slow_calls,
    watched,
)


def make() -> Op[[int], str]:
    op: Op[[int], str] = Op("double")
    op.register("fast", lambda x: None if x < 10 else f"{x} is too large")(
        lambda x: f"fast {2 * x}"
    )
    op.register("slow")(lambda x: f"slow {2 * x}")
    return op


def test_the_first_one_that_applies() -> None:
    """Catches a fallback that nobody hears of."""
    op = make()
    assert op.run(None, 3) == "fast 6"
    assert fallbacks() == {}
    assert op.run(None, 10) == "slow 20"
    assert op.run(None, 10) == "slow 20"
    assert fallbacks() == {Fallback("double", "fast", "slow", "10 is too large"): 2}
    clear_fallbacks()
    assert fallbacks() == {}


def test_asking_by_name() -> None:
    """Catches a preference that is ignored or outlives its block."""
    op = make()
    assert op.run("slow", 3) == "slow 6"
    with prefer("slow"):
        assert op.run(None, 3) == "slow 6"
        assert op.run("fast", 3) == "fast 6"
    with prefer("elsewhere"):
        assert op.run(None, 3) == "fast 6"
    assert op.run(None, 3) == "fast 6"


def test_mistakes_are_named() -> None:
    """Catches a misspelt back end that silently means the default."""
    op = make()
    with pytest.raises(ValueError, match="no back end 'triton'; it has fast, slow"):
        op.run("triton", 3)
    with pytest.raises(ValueError, match="already"):
        op.register("slow")
    lonely: Op[[int], int] = Op("lonely")
    lonely.register("only", lambda _: "it is Sunday")(lambda x: x)
    with pytest.raises(ValueError, match="it is Sunday"):
        lonely.run(None, 1)


def test_rows_count_too() -> None:
    """Catches a count of calls where rows were meant."""
    record_fallback(Fallback("op", "a", "b", "rows"), 3)
    record_fallback(Fallback("op", "a", "b", "rows"), 2)
    assert fallbacks()[Fallback("op", "a", "b", "rows")] == 5


def test_a_watch_sees_its_own_events_only() -> None:
    """Catches events of another owner, of another thread, and of what is nobody's."""
    first, second = Watch(), Watch()
    fallback, slow = Fallback("op", "a", "b", "rows"), Slow("op", "a", "rows")
    elsewhere = threading.Thread(target=record_slow, args=(slow,))
    with watched(first):
        record_slow(slow)
        elsewhere.start()
        elsewhere.join()
        with watched(second):
            record_fallback(fallback, 5)
        with watched(None):
            record_slow(slow)
        record_fallback(fallback)
    record_slow(slow)
    assert (dict(first.slow), dict(first.fallbacks)) == ({slow: 1}, {fallback: 1})
    assert (dict(second.slow), dict(second.fallbacks)) == ({}, {fallback: 5})
    assert (slow_calls(), fallbacks()) == ({slow: 4}, {fallback: 6})


def test_a_watch_ends_with_an_error() -> None:
    """Catches a model whose failed forward leaves its watch behind."""
    watch = Watch()
    with pytest.raises(KeyError), watched(watch):
        raise KeyError
    record_slow(Slow("op", "a", "rows"))
    assert not watch.slow
