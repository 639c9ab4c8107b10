"""Standard Webhooks: which headers say that a message is ours and unchanged."""

import base64
import os
from collections.abc import Sequence
from datetime import datetime

from quantwatch.config.secrets import Secret


def signed_headers(
    message_id: str, at: datetime, body: bytes, secrets: Sequence[Secret]
) -> dict[str, str]:
    """Return the headers of one attempt: the id is the message's, the time is the attempt's.

    `body` must be the very bytes that are sent (UTF-8). With two secrets, both sign. Without any,
    only id and time are told.
    """
    from standardwebhooks import Webhook

    headers = {"webhook-id": message_id, "webhook-timestamp": str(int(at.timestamp()))}
    if secrets:
        text = body.decode("utf-8")
        signatures = (Webhook(secret.reveal()).sign(message_id, at, text) for secret in secrets)
        headers["webhook-signature"] = " ".join(signatures)
    return headers


def new_signing_secret() -> str:
    """Return a fresh signing secret: whsec_ and 32 random bytes in base64."""
    return "whsec_" + base64.b64encode(os.urandom(32)).decode()
