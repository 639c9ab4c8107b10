"""Nested records as flat ones."""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(value: Any, prefix: str = "", *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the leaves as dotted names; with `lists=False` a list of plain values is a leaf."""
    inner: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping):
        inner = iter(value.items())
    elif isinstance(value, list | tuple) and (lists or any(isinstance(v, Mapping) for v in value)):
        inner = iter(enumerate(value))
    else:
        yield prefix, value
        return
    for key, each in inner:
        yield from leaves(each, f"{prefix}.{key}" if prefix else str(key), lists=lists)
