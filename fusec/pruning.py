"""The size of a cache: entries used longest ago are removed first."""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ENTRY = re.compile(r"([0-9a-f]{64})(\.[a-z]+)")
"""The file name of an entry or its lock: a key and a suffix."""
LOCK = ".lock"
_DAY = 24 * 3600.0


class Entry(NamedTuple):
    """A file in a cache."""

    path: Path
    size: int
    used: float
    """Time of the last use, in seconds since the epoch."""


def entries(directory: Path) -> list[Entry]:
    """Return the entries of a cache, those used longest ago first."""
    return sorted((entry for entry in _files(directory) if entry.path.suffix != LOCK), key=lambda e: e.used)


def prune(directory: Path, most_bytes: int) -> list[Entry]:
    """Remove entries until the others take at most so many bytes; return those removed. Old locks are removed too."""
    old = time.time() - _DAY
    for lock in _files(directory):
        if lock.path.suffix == LOCK and lock.used < old:
            remove(lock)
    kept = entries(directory)
    total, removed = sum(entry.size for entry in kept), []
    for entry in kept:
        if total <= most_bytes:
            break
        total -= entry.size
        if remove(entry):
            removed.append(entry)
    return removed


def remove(entry: Entry) -> bool:
    """Remove a file of a cache; return whether it existed. Processes that use it have a copy."""
    with suppress(OSError):
        entry.path.unlink()
        return True
    return False


def _files(directory: Path) -> Iterator[Entry]:
    with suppress(OSError), os.scandir(directory) as places:
        for place in places:
            if ENTRY.fullmatch(place.name):
                with suppress(FileNotFoundError):  # another process has removed it
                    status = place.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        yield Entry(Path(place.path), status.st_size, status.st_mtime)
