"""Temporary folders that are removed even if their process was killed.

Each is locked while it is in use, and any process removes those without a lock. A process number would be meaningless
in another container or host.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "fusec-scratch-"
_swept: set[Path] = set()


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a private folder, by default below ``$TMPDIR``, and remove it afterwards.

    Raises:
        OSError: where that cannot be.
    """
    folder, lock = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lasting_folder() -> Path:
    """Make a private folder that is removed when this process ends.

    Raises:
        OSError: where that cannot be.
    """
    (folder, _), owner = _make(None), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not remove its parent's kernels
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def sweep(parent: Path) -> None:
    """Remove the folders of killed processes in a directory."""
    with suppress(OSError), os.scandir(parent) as places:
        for place in places:
            if place.name.startswith(_PREFIX):
                with suppress(OSError):  # it is in use, or another user's
                    _remove_abandoned(place.path)


def _make(parent: Path | None) -> tuple[Path, int]:
    """Return a new folder, and the descriptor that locks it."""
    parent = parent or Path(tempfile.gettempdir())
    if parent not in _swept:
        _swept.add(parent)
        sweep(parent)
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        try:
            lock = _open(folder)
        except FileNotFoundError:  # another process found it before it was locked
            continue
        with suppress(OSError):  # a file system without locks, where no folder counts as abandoned
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return Path(folder), lock
        os.close(lock)


def _remove_abandoned(folder: str) -> None:
    lock = _open(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _open(folder: str) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
