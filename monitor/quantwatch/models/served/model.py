"""A candidate that is a server: who it says it is, and what it says of prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantwatch.domain import Prompt, Variant
from quantwatch.models.served.answers import Answer, Positions, Question
from quantwatch.models.served.dialect import Dialect, Said
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.http import JsonClient
from quantwatch.models.served.trouble import NoAnswerError, UnusableServerError

MOST_SILENT = 3
"""Prompts in a row without an answer before a server is given up."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a server is asked for, and what is known of it beside its answers."""

    top_k: int
    """Log-probabilities per position."""
    dtype: torch.dtype
    """What its head computes in, as its operator says: decides what is a tie."""
    texts: Sequence[str]
    """Text of every token id of the reference."""
    most_ids: int | None = None
    """How many ids its vocabulary has at most."""


class ServedModel:
    """One candidate on one server. `missing` counts positions by why they are missing."""

    def __init__(
        self, variant: Variant, said: Said, dialect: Dialect, client: JsonClient, terms: Terms
    ) -> None:
        self.variant = variant
        self.terms = terms
        self.client = client
        self.missing = Counter[str]()
        self._said = said
        self._dialect = dialect
        self._freshness = Freshness()
        self._silent = 0

    @property
    def always_tells_target(self) -> bool:
        """Whether the target's log-probability is told however unlikely it is."""
        return self._dialect.always_tells_target

    def ask(self, prompt: Prompt) -> Positions:
        """Return what the server says of each scored position that has a next token.

        Raises UnusableServerError when it isn't the model that it was, scored other tokens, or
        answered none of the last prompts.
        """
        try:
            positions = self._answer(prompt).positions
        except NoAnswerError as error:
            reason = str(error)
            self._silent += 1
            if self._silent >= MOST_SILENT:
                raise UnusableServerError(
                    f"{self.client.base.host} gave no answer to {self._silent} prompts in a row: "
                    f"{reason}"
                ) from error
            positions = (reason,) * max(prompt.num_scored - 1, 0)
        else:
            self._silent = 0
        self.missing.update(one for one in positions if isinstance(one, str))
        return positions

    def repeat(self, prompt: Prompt, before: Positions) -> float | None:
        """Ask again; return the largest |Δ ln q| of a likeliest token, None when nothing compares.

        What a server's own batching and caches do to its numbers.
        """
        try:
            again = self._answer(prompt).positions
        except NoAnswerError:
            return None
        pairs = zip(before, again, strict=True)
        both = [(a, b) for a, b in pairs if not isinstance(a, str) and not isinstance(b, str)]
        known = [
            (a.logprobs[0], dict(zip(b.ids, b.logprobs, strict=True)).get(a.ids[0]))
            for a, b in both
        ]
        return max((abs(a - b) for a, b in known if b is not None), default=None)

    def require_same(self) -> None:
        """Raise UnusableServerError unless the server says of itself what it said at first."""
        try:
            now = self._dialect.identify(self.client, self._said.model).facts
        except NoAnswerError as error:
            raise UnusableServerError(
                f"{self.client.base.host} can't be reached at the end of the run: {error}"
            ) from error
        before = self._said.facts
        for name in dict.fromkeys([*before, *now]):
            if now.get(name) != before.get(name):
                raise UnusableServerError(
                    f"the server changed while it was measured: its {name} is {now.get(name)!r}, "
                    f"was {before.get(name)!r}"
                )

    def _answer(self, prompt: Prompt) -> Answer:
        terms = self.terms
        question = Question(
            self._said.model,
            prompt.token_ids,
            prompt.score_start,
            terms.top_k,
            terms.texts,
            terms.most_ids,
        )
        if not question.targets:
            return Answer(())
        return self._dialect.ask(self.client, question, self._freshness)
