"""Which file system a path lies on: SQLite must not lie on one of the network."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "ncpfs"}
    | {"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone"}
)
_TABLE = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_network(self) -> bool:
        """Whether another machine holds it: locks and write-ahead logs don't work there."""
        return self.kind in NETWORK

    @property
    def is_read_only(self) -> bool:
        """Whether nobody can write to it."""
        return "ro" in self.options


def mount_of(path: Path, table: str | None = None) -> Mount | None:
    """Return the file system that a path lies on; None where the system has no such table."""
    if table is None:
        try:
            table = _TABLE.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    real = os.path.realpath(path)
    holding = [mount for mount in _parse(table) if _holds(mount.point, real)]
    # Of two mounts on one place the later one is seen.
    return max(enumerate(holding), key=lambda at: (len(at[1].point), at[0]))[1] if holding else None


def _parse(table: str) -> list[Mount]:
    rows = [line.split() for line in table.splitlines()]
    return [
        Mount(_OCTAL.sub(lambda m: chr(int(m[1], 8)), row[1]), row[2], frozenset(row[3].split(",")))
        for row in rows
        if len(row) >= 4
    ]


def _holds(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")
