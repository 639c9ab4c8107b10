"""The service: endpoints that are told, how it listens, how long things are kept."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from quantwatch.config.base import Strict
from quantwatch.config.durations import Duration, PositiveDuration

Format = Literal[
    "quantwatch",
    "alertmanager",
    "slack",
    "discord",
    "teams",
    "pagerduty",
    "template",
    "apprise",
]
"""Shapes of messages. `template` is one's own; `apprise` needs the extra of that name and gives no
delivery guarantee."""
TEMPLATE_SETTINGS = (
    *("body", "body_file", "content_type", "headers", "headers_env", "headers_file"),
)
"""Those that only `format = "template"` has."""
_CONTENT_TYPE = re.compile(
    r"(application/([a-z0-9][a-z0-9.+-]*\+)?json|text/plain)(; ?charset=utf-8)?"
)


class EndpointConfig(Strict):
    """A receiver of alerts. Secrets are named, never written: by variable or by file."""

    url: str | None = Field(default=None, description="https URL, when nothing in it is secret.")
    url_env: str | None = Field(default=None, description="Environment variable with the URL.")
    url_file: str | None = Field(default=None, description="File with the URL.")
    secret_env: str | None = Field(
        default=None, description="Variable with the signing secret (whsec_…); two while it rotates"
        ", separated by a blank.",
    )  # fmt: skip
    secret_file: str | None = Field(default=None, description="File with the signing secret.")
    format: Format = Field(default="quantwatch", description="Shape of the message.")
    severities: tuple[Literal["warning", "critical"], ...] = Field(
        default=("warning", "critical"), description="What it is told about."
    )
    rate_per_minute: int = Field(
        default=20, ge=1, le=600, description="More than this is put together in one message."
    )
    allow_http: bool = Field(default=False, description="Allow a URL without TLS.")
    allow_networks: tuple[str, ...] = Field(
        default=(), description="Private networks (CIDR) that it may lie in."
    )

    body: str | None = Field(
        default=None, description="The template: text with `{{ name }}` (docs/webhooks.md)."
    )
    body_file: str | None = Field(
        default=None, description="File with the template, inside the allowed roots."
    )
    content_type: str = Field(
        default="application/json",
        description="application/json, application/…+json or text/plain.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict, description="Headers with fixed values, of a template."
    )
    headers_env: dict[str, str] = Field(
        default_factory=dict, description="Secret headers: the variable with the value."
    )
    headers_file: dict[str, str] = Field(
        default_factory=dict, description="Secret headers: the file with the value."
    )

    @field_validator("content_type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if not _CONTENT_TYPE.fullmatch(value):
            raise ValueError(
                f"{value!r} is not allowed; allowed: application/json, application/…+json or "
                "text/plain: in no other a placeholder's text is escaped"
            )
        return value

    @model_validator(mode="after")
    def _one_url(self) -> "EndpointConfig":
        given = [key for key in ("url", "url_env", "url_file") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of url, url_env and url_file is required")
        if self.secret_env is not None and self.secret_file is not None:
            raise ValueError("at most one of secret_env and secret_file is allowed")
        return self

    @model_validator(mode="after")
    def _template(self) -> "EndpointConfig":
        if self.format != "template":
            # By value: a configuration that was stored or handed to a process names every key.
            fields = type(self).model_fields
            plain = {k: fields[k].get_default(call_default_factory=True) for k in TEMPLATE_SETTINGS}
            for key in sorted(key for key, value in plain.items() if getattr(self, key) != value):
                raise ValueError(f'{key} is only for format = "template", not {self.format}')
        elif (self.body is None) == (self.body_file is None):
            raise ValueError('format = "template" needs exactly one of body and body_file')
        return self


class RetentionConfig(Strict):
    """How long results stay. Baselines, flagged runs and open alerts are never touched."""

    token_runs: int = Field(
        default=7, ge=0, description="Newest runs of a check that keep per-token matrices."
    )
    flagged: PositiveDuration = Field(
        default="180d", description="How long a flagged run keeps its matrices."
    )
    prompts: PositiveDuration = Field(
        default="90d", description="How long per-prompt sums stay; paired tests need them."
    )
    statistics: PositiveDuration = Field(
        default="730d", description="How long statistics stay per run, then per week."
    )
    runs: PositiveDuration = Field(default="1830d", description="How long a run itself stays.")
    logs: PositiveDuration = Field(
        default="180d", description="How long deliveries, attempts and audit rows stay."
    )


class CacheConfig(Strict):
    """How much disk may be taken by what can be made again."""

    reference_gb: int = Field(
        default=20,
        ge=1,
        description="GB that recorded references may take (`reference_cache`); the least recently "
        "used go first.",
    )

    @property
    def reference_bytes(self) -> int:
        """The limit in bytes."""
        return self.reference_gb * 10**9


class ServiceConfig(Strict):
    """One `quantwatch start`."""

    dashboard_url: str | None = Field(
        default=None, description="Where the dashboard is reached; messages link to it."
    )
    metrics_address: str = Field(default="127.0.0.1", description="Where /metrics listens.")
    metrics_port: int = Field(default=9464, ge=0, le=65535, description="0: any free port.")
    layer_metrics: int = Field(
        default=0, ge=0, le=64, description="Worst layers per check that /metrics shows; 0: none."
    )
    allowed_roots: tuple[str, ...] = Field(
        default=(),
        description="Folders that models and prompts of the service's checks lie in; the file's "
        "own folder when empty.",
    )
    dead_man_url_env: str | None = Field(
        default=None, description="Variable with a URL that is called after each run "
        "(Healthchecks' protocol).",
    )  # fmt: skip
    shutdown: Duration = Field(
        default="30s", description="How long SIGTERM waits for a run before it is given back."
    )
