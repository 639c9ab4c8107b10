"""Receivers as they are used: URL checked, secrets read, networks parsed."""

import base64
import binascii
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantwatch.config.receiver_headers import Headers, resolve_headers
from quantwatch.config.receiver_urls import parse_url
from quantwatch.config.roots import allowed_roots
from quantwatch.config.secrets import Secret, from_environment, from_file
from quantwatch.config.service import TEMPLATE_SETTINGS, EndpointConfig
from quantwatch.config.template_files import resolve_template
from quantwatch.config.templates import Template
from quantwatch.errors import ConfigError
from quantwatch.observability import redaction
from quantwatch.telemetry import canonical_sha

if TYPE_CHECKING:
    import httpx

    from quantwatch.config.schema import Config

ADDRESS = "address_and_secrets"
BODY_FILE = "body_file_sha"
"""Key of a template's digest: an edited file is seen, too."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver. Its URL may hold a token: only `name` and `host` are ever shown."""

    name: str
    url: "httpx.URL"
    secrets: tuple[Secret, ...] = ()
    """Signing secrets, the new one first; the routing key of PagerDuty."""
    format: str = "quantwatch"
    """`apprise` is sent around the guarded socket and without delivery guarantee."""
    severities: tuple[str, ...] = ("warning", "critical")
    rate_per_minute: int = 20
    networks: tuple[Network, ...] = ()
    """Private networks that it may lie in."""
    template: Template | None = None
    """The body of format `template`."""
    headers: Headers = ()
    """Of its own, beside those that every message has."""

    def __repr__(self) -> str:
        return f"Endpoint({self.name}, {self.format}, {self.host})"

    @property
    def host(self) -> str:
        """The host alone, for messages."""
        return self.url.host

    @property
    def settings_sha(self) -> str:
        """Digest of everything that decides where and how is sent; one way, to see a change."""
        secrets = [secret.reveal() for secret in self.secrets]
        networks = [str(network) for network in self.networks]
        known: list[Any] = [str(self.url), secrets, self.format, networks]
        if self.template is not None:
            fixed = [[k, v] for k, v in self.headers if isinstance(v, str)]
            known += [self.template.text, self.template.content_type, fixed, _hidden(self)]
        return canonical_sha(known)


def endpoint_document(config: EndpointConfig, endpoint: Endpoint) -> dict[str, Any]:
    """Return an endpoint as it is kept and shown: its settings, of the URL the host alone.

    `ADDRESS` is a digest of URL and secrets, one way, to see that they changed.
    """
    document = config.model_dump(mode="json")
    document["url"] = None if config.url is None else endpoint.host
    for name in TEMPLATE_SETTINGS:
        # An endpoint without a template has none of them, as before there were any.
        if endpoint.template is None or not document[name]:
            del document[name]
    if endpoint.template is not None and config.body_file is not None:
        document[BODY_FILE] = canonical_sha(endpoint.template.text)[:16]
    secrets = [secret.reveal() for secret in endpoint.secrets]
    known = [str(endpoint.url), secrets, *filter(None, [_hidden(endpoint)])]
    return {**document, ADDRESS: canonical_sha(known)}


def _hidden(endpoint: Endpoint) -> list[list[str]]:
    return [[k, v.reveal()] for k, v in endpoint.headers if isinstance(v, Secret)]


def resolve_endpoints(
    config: "Config", base_dir: Path, env: Mapping[str, str] = os.environ
) -> dict[str, Endpoint]:
    """Read the secrets of all endpoints and check their URLs, networks and signing secrets.

    Raises ConfigError naming the endpoint and the setting, never a URL or a secret.
    """
    roots = allowed_roots(config, base_dir)
    return {
        name: resolve_endpoint(name, one, base_dir, env, roots)
        for name, one in config.endpoints.items()
    }


def resolve_endpoint(
    name: str,
    config: EndpointConfig,
    base_dir: Path,
    env: Mapping[str, str] = os.environ,
    roots: Sequence[Path] = (),
) -> Endpoint:
    """Read one endpoint's secrets and check it; its template lies in `roots`, by default in none.

    Raises ConfigError.
    """
    key = f"endpoints.{name}"
    if config.format == "apprise":
        url, secrets = _apprise(key, config, base_dir, env)
    else:
        url, secrets = _url(key, config, base_dir, env), _secrets(key, config, base_dir, env)
    return Endpoint(
        name=name,
        url=url,
        secrets=secrets,
        format=config.format,
        severities=config.severities,
        rate_per_minute=config.rate_per_minute,
        networks=tuple(_network(key, text) for text in config.allow_networks),
        template=resolve_template(key, config, base_dir, roots),
        headers=resolve_headers(key, config, base_dir, env),
    )


def _url(key: str, config: EndpointConfig, base_dir: Path, env: Mapping[str, str]) -> "httpx.URL":
    """Read the URL; one that was named, not written, is kept out of all texts."""
    if config.url is not None:
        return parse_url(f"{key}.url", config.url, allow_http=config.allow_http)
    key, secret = _named_url(key, config, base_dir, env)
    url = parse_url(key, secret.reveal(), allow_http=config.allow_http)
    for part in re.split(r"[/?&=]", url.raw_path.decode("ascii")):
        # Words like "services" stay readable.
        if len(part) >= 16 or (len(part) >= 8 and re.search(r"\d", part)):
            redaction.register(part)
    return url


def _named_url(
    key: str, config: EndpointConfig, base_dir: Path, env: Mapping[str, str]
) -> tuple[str, Secret]:
    if config.url_env is not None:
        key = f"{key}.url_env"
        return key, from_environment(key, config.url_env, env)
    assert config.url_file is not None
    key = f"{key}.url_file"
    return key, from_file(key, config.url_file, base_dir)


def _apprise(
    key: str, config: EndpointConfig, base_dir: Path, env: Mapping[str, str]
) -> tuple["httpx.URL", tuple[Secret, ...]]:
    """Read a URL of Apprise's own kinds, which always holds a secret."""
    import httpx

    if config.url is not None:
        raise ConfigError(f"{key}.url: format apprise needs url_env or url_file: it holds a secret")
    _, secret = _named_url(key, config, base_dir, env)
    return httpx.URL("apprise://apprise"), (secret,)


def _secrets(
    key: str, config: EndpointConfig, base_dir: Path, env: Mapping[str, str]
) -> tuple[Secret, ...]:
    if config.secret_env is not None:
        key, read = (
            f"{key}.secret_env",
            from_environment(f"{key}.secret_env", config.secret_env, env),
        )
    elif config.secret_file is not None:
        key, read = (
            f"{key}.secret_file",
            from_file(f"{key}.secret_file", config.secret_file, base_dir),
        )
    elif config.format == "pagerduty":
        raise ConfigError(
            f"{key}: format pagerduty needs secret_env or secret_file: its routing key"
        )
    else:
        return ()
    secrets = tuple(map(Secret, read.reveal().split()))
    if len(secrets) > 2:
        raise ConfigError(f"{key}: {len(secrets)} secrets; allowed: one, or two while it rotates")
    if config.format != "pagerduty":
        for secret in secrets:
            _check_signing_secret(key, secret)
    return secrets


def _check_signing_secret(key: str, secret: Secret) -> None:
    """Raise ConfigError unless whsec_ and 24 to 64 bytes in base64: a weak one signs nothing."""
    kind, _, encoded = secret.reveal().partition("_")
    try:
        size = len(base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True))
    except binascii.Error:
        size = 0
    if kind != "whsec" or not 24 <= size <= 64:
        raise ConfigError(
            f"{key}: is no signing secret; allowed: whsec_ and 24 to 64 bytes in base64 "
            "(`quantwatch endpoints secret` makes one)"
        )


def _network(key: str, text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{key}.allow_networks: {text!r}: {error}; allowed: 10.1.0.0/16"
        ) from None
