"""What is measured: prompts, suites, variants and their identity."""

from dataclasses import dataclass

from quantwatch.domain.words import Json
from quantwatch.telemetry import canonical_sha

WARNING = "warning: "
"""What a note begins with that belongs beside a variant's figures."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids. `pieces[i]` is token i's text (the dashboard can't detokenize)."""

    index: int
    category: str
    source: str
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str | None = None
    score_start: int = 0
    """First scored position, from 0: llama.cpp scores the second half of each window."""

    @property
    def num_scored(self) -> int:
        """Number of scored positions."""
        return len(self.token_ids) - self.score_start


@dataclass(frozen=True, slots=True)
class Suite:
    """An ordered set of prompts, identified by the SHA-256 of its token ids and score starts."""

    name: str
    hash: str
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """What the loader left out or rendered otherwise, in words: to be printed, never silent."""
    vocabulary: tuple[str, ...] = ()
    """Text of every token id: a model may rank a token high that no prompt contains."""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_targets(self) -> int:
        """Number of scored positions that have a next token to predict."""
        return sum(max(prompt.num_scored - 1, 0) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a variant as a set of digests, so that drift has a name. SHA-256 hex or ''."""

    weights_sha: str
    config_sha: str
    tokenizer_sha: str
    recipe_sha: str
    serve_sha: str
    fault_sha: str

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the six digests."""
        return canonical_sha({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Variant:
    """What was loaded as the reference or as a candidate."""

    name: str
    fingerprint: Fingerprint
    execution: str
    """`float32`, `bfloat16`, … for plain models; `dequantized`, `aten`, … for quantized ones."""
    size_bytes: int | None
    """None where it isn't known, as of a server that doesn't tell."""
    bits_per_weight: float | None
    source: Json
    notes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """Layers a recipe left alone: (scope, reason)."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes that every report shows: without them the figures would mislead."""
        return tuple(note for note in self.notes if note.startswith(WARNING))
