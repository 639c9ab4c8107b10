"""Lists and texts as compressed bytes.

Text columns of PostgreSQL refuse NUL and half a character; a user's text and tokens hold both.
"""

import json
import zlib
from typing import Any


def pack(value: Any) -> bytes:
    """Compress as ASCII JSON, which keeps NUL and lone surrogates. Tuples come back as lists."""
    return zlib.compress(json.dumps(value).encode())


def unpack(packed: bytes) -> Any:
    """Return what `pack` was given."""
    return json.loads(zlib.decompress(packed))
