"""A candidate that is a server: where it is, which protocol it speaks, how much it is asked for."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from quantwatch.config.base import Strict
from quantwatch.config.receiver_urls import parse_url

if TYPE_CHECKING:
    import httpx

Api = Literal["vllm", "sglang", "llamacpp", "openai"]
_VERSION = "/v1"


class ServedConfig(Strict):
    """An inference server that tells the log-probabilities of the tokens of a prompt."""

    url: str = Field(
        description="Where it listens, e.g. http://127.0.0.1:8000; `/v1` at the end is left out. "
        "No user, password or query: secrets come from token_env."
    )
    api: Api = Field(
        description="Protocol that it is asked in: vllm (prompt_logprobs), sglang (/generate), "
        "llamacpp (/completion, a request per token), openai (echo and logprobs)."
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Which of its models; the only one that it lists when absent.",
    )
    top_k: int = Field(
        default=20,
        ge=5,
        le=2000,
        description="Log-probabilities asked for at each position. The server must allow as many "
        "(vLLM: --max-logprobs; OpenAI: 5).",
    )
    token_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the bearer token.",
    )
    timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Longest time that one request takes."
    )
    attempts: int = Field(
        default=4,
        ge=1,
        le=10,
        description="Attempts at one request that meets 429, 5xx, a time-out or an answer cut off.",
    )

    @field_validator("url")
    @classmethod
    def _plain(cls, url: str) -> str:
        parsed = parse_url("url", url, allow_http=True, allow_local=True)
        if parsed.query:
            raise ValueError("the URL contains a query (?)")
        return url

    @property
    def base(self) -> "httpx.URL":
        """The URL that the paths of the protocol are appended to."""
        path = self.url.rstrip("/")
        return parse_url("url", path.removesuffix(_VERSION), allow_http=True, allow_local=True)
