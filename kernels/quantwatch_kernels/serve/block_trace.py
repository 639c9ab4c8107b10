"""A trace of which blocks requests used, recorded once and replayed under any policy.

    {"format": "quantwatch block trace", "version": 1, "page_size": 16, "about": "…",
     "segments": [[parent, first, length], …], "requests": [[prompt, whole], …], "events": […]}

Contents are numbered in the order they were first seen. A segment is a chain of new numbers `first`
… `first + length − 1` whose first hangs below `parent` (−1: the beginning of a text); most requests
add one or two, so thousands of blocks take a few kilobytes. A request is the last full block of its
prompt and of its prompt with its answer (−1: none). Events are in order: r starts request r, −1 − r
ends it. No token of any text is in a trace.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quantwatch_kernels.serve.block_hash import ExtraKeys, block_digest, token_ids

__all__ = ["BlockTrace", "TraceRecorder", "TracedRequest", "load_trace", "save_trace"]

_FORMAT, _VERSION = "quantwatch block trace", 1
NO_BLOCK = -1


class TracedRequest(NamedTuple):
    """Last full block of the prompt, and of the prompt with the answer; −1: none."""

    prompt: int
    whole: int


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Contents as a tree, requests as paths in it, events in order; anything else: ValueError."""

    page_size: int
    parents: tuple[int, ...]
    requests: tuple[TracedRequest, ...]
    events: tuple[int, ...]
    about: str = ""

    def __post_init__(self) -> None:
        for block, parent in enumerate(self.parents):
            if not NO_BLOCK <= parent < block:
                raise ValueError(f"block {block} hangs below {parent}, which isn't before it.")
        for number, request in enumerate(self.requests):
            if not all(NO_BLOCK <= block < len(self.parents) for block in request):
                raise ValueError(
                    f"request {number} names blocks {list(request)} that aren't there."
                )
            whole = self.path(request.whole)
            if request.prompt != NO_BLOCK and request.prompt not in whole:
                raise ValueError(f"request {number}: its prompt isn't the beginning of its text.")
        self._check_events()

    def path(self, block: int) -> list[int]:
        """Return the blocks from the beginning of the text to this one."""
        found = list[int]()
        while block != NO_BLOCK:
            found.append(block)
            block = self.parents[block]
        return found[::-1]

    def _check_events(self) -> None:
        state = dict[int, int]()
        for event in self.events:
            number, step = (event, 0) if event >= 0 else (-1 - event, 1)
            if number >= len(self.requests) or state.get(number, 0) != step:
                raise ValueError(f"event {event} comes out of order, or names no request.")
            state[number] = step + 1


@dataclass(slots=True)
class TraceRecorder:
    """Listens to a block manager; `trace` returns what was heard."""

    page_size: int
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _parents: list[int] = field(default_factory=list)
    _requests: list[TracedRequest] = field(default_factory=list)
    _events: list[int] = field(default_factory=list)
    _open: dict[str, int] = field(default_factory=dict)

    def start(self, name: str, prompt: Sequence[int], extra: ExtraKeys) -> None:
        """Hear that a request begins."""
        number = self._open[name] = len(self._requests)
        last = self._last(prompt, extra)
        self._requests.append(TracedRequest(last, last))
        self._events.append(number)

    def finish(self, name: str, tokens: Sequence[int], extra: ExtraKeys) -> None:
        """Hear that a request ends, with all tokens it had computed."""
        number = self._open.pop(name, None)
        if number is None:
            return  # a fork: its blocks are those of the request it came from
        prompt = self._requests[number].prompt
        last = self._last(tokens, extra)
        if prompt not in self._path(last):  # cancelled before its prompt was computed
            last = prompt
        self._requests[number] = TracedRequest(prompt, last)
        self._events.append(-1 - number)

    def trace(self, about: str = "") -> BlockTrace:
        """Return what was recorded so far."""
        parts = tuple(self._parents), tuple(self._requests), tuple(self._events)
        return BlockTrace(self.page_size, *parts, about)

    def _last(self, tokens: Sequence[int], extra: ExtraKeys) -> int:
        ids, digest, last = token_ids(tokens), None, NO_BLOCK
        for begin in range(0, len(ids) - self.page_size + 1, self.page_size):
            digest = block_digest(digest, ids[begin : begin + self.page_size], extra)
            number = self._numbers.setdefault(digest, len(self._parents))
            if number == len(self._parents):
                self._parents.append(last)
            last = number
        return last

    def _path(self, block: int) -> set[int]:
        found = {NO_BLOCK}
        while block != NO_BLOCK:
            found.add(block)
            block = self._parents[block]
        return found


def save_trace(trace: BlockTrace, path: Path) -> None:
    """Write a trace as JSON."""
    segments = list[list[int]]()
    for block, parent in enumerate(trace.parents):
        if segments and parent == block - 1:
            segments[-1][2] += 1
        else:
            segments.append([parent, block, 1])
    data = {
        "format": _FORMAT, "version": _VERSION, "page_size": trace.page_size, "about": trace.about,
        "segments": segments, "requests": [list(one) for one in trace.requests],
        "events": list(trace.events),
    }  # fmt: skip
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def load_trace(path: Path) -> BlockTrace:
    """Read a trace. Raises ValueError naming the file for anything that isn't one."""
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no block trace: {error!r}") from error


def _read(data: dict[str, Any]) -> BlockTrace:
    if data["format"] != _FORMAT or data["version"] != _VERSION:
        raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
    parents = list[int]()
    for parent, first, length in data["segments"]:
        if first != len(parents) or length < 1:
            raise ValueError(f"segment {[parent, first, length]} doesn't begin at {len(parents)}")
        parents += [parent, *range(first, first + length - 1)]
    requests = tuple(TracedRequest(*request) for request in data["requests"])
    events = tuple(data["events"])
    return BlockTrace(data["page_size"], tuple(parents), requests, events, data["about"])
