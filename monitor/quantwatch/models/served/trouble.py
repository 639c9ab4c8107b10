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
