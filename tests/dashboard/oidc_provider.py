"""A small OpenID provider on the loopback: real HTTP, signed tokens, and faults on demand.

It follows OpenID Connect Core 1.0 (code flow) and RFC 7636 (PKCE, S256) as far as a client sees.
Its sign-in page offers one link per person; whoever is followed is signed in.
"""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID, CLIENT_SECRET = "quantwatch-tests", "a secret of the tests, nowhere else"
KEY_ID = "tests-1"


@dataclass
class Provider:
    """Whom it knows, what it has granted, and how it misbehaves."""

    people: Mapping[str, Mapping[str, Any]]
    """Claims by name of the link."""
    url: str = ""
    fault: str = ""
    """`nonce`, `signature`, `audience`, `issuer`, `expired`, `unsigned`: what is wrong with the
    identity tokens that it gives out; nothing when empty."""
    lasts_s: int = 3600
    key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": KEY_ID}))
    other_key: RSAKey = field(default_factory=lambda: RSAKey.generate_key(2048, {"kid": KEY_ID}))
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    num_tokens: int = 0
    num_sign_outs: int = 0

    def metadata(self) -> dict[str, Any]:
        """Return the discovery document."""
        places = {
            "authorization_endpoint": "authorize",
            "token_endpoint": "token",
            "jwks_uri": "jwks",
            "userinfo_endpoint": "userinfo",
            "end_session_endpoint": "logout",
        }
        return {
            "issuer": self.url,
            **{name: f"{self.url}/{path}" for name, path in places.items()},
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
        }

    def grant(self, query: Mapping[str, str], person: str) -> str:
        """Note that a person agreed; return the code."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = {**query, "person": person}
        return code

    def identity(self, asked: Mapping[str, str]) -> str:
        """Return the identity token for a request, with the fault that is wanted."""
        now = int(time.time())
        claims = {
            "iss": self.url if self.fault != "issuer" else "https://elsewhere.example",
            "aud": CLIENT_ID if self.fault != "audience" else "another-client",
            "sub": asked["person"],
            "iat": now if self.fault != "expired" else now - 7200,
            "exp": now + self.lasts_s if self.fault != "expired" else now - 3600,
            "nonce": asked.get("nonce", "") if self.fault != "nonce" else "not what was asked",
            **self.people[asked["person"]],
        }
        if self.fault == "unsigned":
            head, body = ({"alg": "none", "kid": KEY_ID}, claims)
            return ".".join([*(_base64(json.dumps(part).encode()) for part in (head, body)), ""])
        key = self.other_key if self.fault == "signature" else self.key
        return jwt.encode({"alg": "RS256", "kid": KEY_ID}, claims, key)


@contextmanager
def provider(people: Mapping[str, Mapping[str, Any]]) -> Iterator[Provider]:
    """Run a provider on a free port of the loopback; it ends with the block."""
    found = Provider(people)
    handler = type("Handler", (_Handler,), {"provider": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class _Handler(BaseHTTPRequestHandler):
    """The endpoints."""

    provider: Provider

    def do_GET(self) -> None:
        """Discovery, keys, sign-in page, consent, sign-out."""
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        match split.path:
            case "/.well-known/openid-configuration":
                self._json(self.provider.metadata())
            case "/jwks":
                self._json({"keys": [self.provider.key.as_dict(private=False)]})
            case "/authorize":
                self._sign_in_page(query)
            case "/consent":
                code = self.provider.grant(query, query.pop("person"))
                back = urlencode({"code": code, "state": query["state"]})
                self._redirect(f"{query['redirect_uri']}?{back}")
            case "/logout":
                self.provider.num_sign_outs += 1
                self._redirect(query["post_logout_redirect_uri"])
            case "/favicon.ico":
                self._send(b"", "image/x-icon")
            case _:
                self.send_error(404)

    def do_POST(self) -> None:
        """Exchange a code, once, for the tokens."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        form = {key: values[0] for key, values in parse_qs(body).items()}
        asked = self.provider.codes.pop(form.get("code", ""), None)
        if urlsplit(self.path).path != "/token" or asked is None or not self._is_client():
            self._json({"error": "invalid_grant"}, 400)
            return
        challenge = _base64(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if challenge != asked.get("code_challenge"):
            self._json({"error": "invalid_grant", "error_description": "PKCE"}, 400)
            return
        self.provider.num_tokens += 1
        tokens = {"access_token": secrets.token_urlsafe(16), "token_type": "Bearer"}
        self._json({**tokens, "expires_in": 3600, "id_token": self.provider.identity(asked)})

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _is_client(self) -> bool:
        wanted = base64.b64encode(f"{CLIENT_ID}:{quote(CLIENT_SECRET)}".encode()).decode()
        plain = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        return self.headers.get("Authorization") in (f"Basic {wanted}", f"Basic {plain}")

    def _sign_in_page(self, query: Mapping[str, str]) -> None:
        links = (
            f'<li><a href="/consent?{escape(urlencode({**query, "person": person}))}">'
            f"{escape(person)}</a></li>"
            for person in self.provider.people
        )
        self._send(f"<h1>Who are you?</h1><ul>{''.join(links)}</ul>".encode(), "text/html")

    def _json(self, document: Mapping[str, Any], status: int = 200) -> None:
        self._send(json.dumps(document).encode(), "application/json", status)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _redirect(self, url: str) -> None:
        self.send_response(302)
        self.send_header("Location", url)
        self.send_header("Content-Length", "0")
        self.end_headers()
