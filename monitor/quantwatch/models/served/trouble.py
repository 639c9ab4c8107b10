"""What can go wrong with a server: for a while, for one prompt, or for good."""

from quantwatch.errors import ModelError


class UnusableServerError(ModelError):
    """A candidate can't be measured there: another model or tokenizer, or no way to ask."""


class NoAnswerError(Exception):
    """One request came to nothing after all attempts: its positions are missing."""


class StaleAnswerError(Exception):
    """An answer to another request: an old one, from a cache between us and the server."""


class GarbledAnswerError(Exception):
    """An answer that is cut off, no JSON, or without what was asked for."""


def readable(told: str, most: int) -> str:
    """Return what a stranger says in at most so many characters that can be stored and shown.

    A NUL ends a transaction of PostgreSQL, half a surrogate pair has no bytes, an escape sequence
    is obeyed by a terminal.
    """
    return "".join(char if char.isprintable() else "\ufffd" for char in told[:most])
