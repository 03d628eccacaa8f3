"""Ownership of files: kernels and records are loaded only if nobody but this user could have written them."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def make_private(directory: Path) -> None:
    """Create a directory, and those missing above it, for this user alone, whatever the umask.

    Raises:
        OSError: where that cannot be.
    """
    for place in (*reversed(directory.absolute().parents), directory):
        if not place.is_dir():
            with suppress(FileExistsError):  # another process was faster; `distrust` reports what is no directory
                place.mkdir()
                place.chmod(0o700)


def distrust(status: os.stat_result) -> str:
    """Return why others may have written a file or directory; empty where they cannot."""
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    return "other users may write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def open_own(path: Path) -> BinaryIO:
    """Open a regular file in a directory, both of which nobody else can write to.

    Both are checked as they were opened, so that replacing one by name changes nothing. Never waits, as opening a FIFO
    would.

    Raises:
        OSError: where there is no such file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        _check(folder, path.parent)
        descriptor = os.open(path.name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(_check(descriptor, path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check(descriptor: int, path: Path) -> os.stat_result:
    status = os.fstat(descriptor)
    if reason := distrust(status):
        raise PermissionError(errno.EPERM, reason, str(path))
    return status
