"""What is fed to the models: a shipped suite or the user's own files."""

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from quantwatch.config.base import Strict

SUITES = ("core-v1", "core-v1:demo")


def _as_tuple(value: object) -> object:
    """`_named_suite` hands on Python values, for which strict validation takes no list."""
    return tuple(value) if isinstance(value, list) else value


class SuiteConfig(Strict):
    """What is fed to the models: the shipped suite, or the user's own files."""

    name: str | None = Field(
        default=None, description="core-v1 (all prompts) or core-v1:demo (16 of them)."
    )
    files: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        default=(),
        description='Plain text, JSON list of strings, or JSONL with a "text", "messages" or '
        '"token_ids" field.',
    )
    window: int | None = Field(
        default=None,
        ge=2,
        description="Plain text is cut into windows of this many tokens (512 when absent).",
    )
    score_start: int = Field(
        default=0,
        ge=0,
        description="First scored position of every prompt; 256 with window = 512 is llama.cpp's "
        "protocol.",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Use only the first N prompts (or windows)."
    )

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: str | None) -> str | None:
        if name is not None and name not in SUITES:
            raise ValueError(
                f"unknown suite {name!r}; known: {', '.join(SUITES)}; own prompts go into files"
            )
        return name

    @model_validator(mode="after")
    def _consistent(self) -> "SuiteConfig":
        if (self.name is None) == (not self.files):
            raise ValueError("exactly one of name and files is required")
        if self.name is not None and self.window is not None:
            raise ValueError("window cuts plain text files; a shipped suite has whole prompts")
        if self.window is not None and self.score_start >= self.window:
            raise ValueError(
                f"score_start = {self.score_start} leaves nothing of a window of {self.window}"
            )
        return self


def named_suite(value: object) -> object:
    """A suite may be written as the name of a shipped one."""
    return {"name": value} if isinstance(value, str) else value
