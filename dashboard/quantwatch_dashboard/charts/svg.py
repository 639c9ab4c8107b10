"""Pictures small enough for a table row or a card. No script, no text from the database."""

import base64


def data_uri(body: str, width: int, height: int) -> str:
    """Return an SVG image of this size as a data URI."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg>'
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.encode()).decode()
