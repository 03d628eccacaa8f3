"""A directory of built files for the next process: private, checked when read, published atomically."""

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fusec.config import Config

ABI = 1
"""Raised whenever what lies in the cache changes its form; part of every key."""
_MAGIC = b"fusec\x00v1"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size
_LOCK_SECONDS = 120.0


def key_of(parts: Sequence[str]) -> str:
    """The name of an entry: a digest of all that decides its content."""
    digest = hashlib.sha256()
    for part in (f"abi {ABI}", *parts):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class Cache:
    """Files by key. Each ends in a digest of its key and content, so that a damaged one is noticed and rebuilt."""

    def __init__(self, directory: Path, temporary: bool = False) -> None:
        self.directory, self.temporary = directory, temporary
        self._lock = threading.Lock()

    def path(self, key: str, suffix: str) -> Path:
        """Where an entry lies, or will."""
        return self.directory / f"{key}{suffix}"

    def find(self, key: str, suffix: str) -> Path | None:
        """The file of an entry whose content is what was published, or None."""
        return None if self.entry(key, suffix) is None else self.path(key, suffix)

    def read(self, key: str, suffix: str) -> bytes | None:
        """The content of an entry, or None where there is none or it is damaged."""
        entry = self.entry(key, suffix)
        return None if entry is None else entry[:-_TRAILER]

    def entry(self, key: str, suffix: str) -> bytes | None:
        """The same with its digest, as `admit` takes it."""
        try:
            entry = self.path(key, suffix).read_bytes()
        except OSError:
            return None
        return entry if _is_whole(key, entry) else None

    def admit(self, key: str, suffix: str, entry: bytes) -> bool:
        """Store an entry of another cache; whether its digest is right, without which it is left alone.

        Raises:
            OSError: as `publish` does.
        """
        if not _is_whole(key, entry):
            return False
        self.publish(key, suffix, entry[:-_TRAILER])
        return True

    def publish(self, key: str, suffix: str, content: bytes) -> Path:
        """Store an entry; readers see all of it or nothing. Where a disk is full a temporary directory takes over.

        Raises:
            OSError: where that takes nothing either.
        """
        directory = self.directory
        try:
            return self._store(key, suffix, content)
        except OSError as error:
            if self.temporary:
                raise
            with self._lock:
                if self.directory == directory:
                    self.directory, self.temporary = _instead_of(directory, str(error)), True
        return self._store(key, suffix, content)

    def _store(self, key: str, suffix: str, content: bytes) -> Path:
        descriptor, name = tempfile.mkstemp(prefix=".new-", dir=self.directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content + _trailer(key, content))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path(key, suffix))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return self.path(key, suffix)

    @contextmanager
    def building(self, key: str) -> Iterator[None]:
        """Hold the lock of an entry, so that processes build it once; after a long wait it is built twice instead."""
        lock = FileLock(self.path(key, ".lock"), timeout=_LOCK_SECONDS)
        try:
            lock.acquire()
        except (Timeout, OSError):
            yield
            return
        try:
            yield
        finally:
            lock.release()


_opened: dict[str, Cache] = {}


def open_cache(config: Config) -> Cache:
    """The cache that the configuration names, or one for this process where that may not be used."""
    name = str(config.cache_path()) if config.cache else ""
    if name not in _opened or not _opened[name].directory.is_dir():
        _opened[name] = _open(Path(name)) if name else Cache(_temporary(), temporary=True)
    return _opened[name]


def _open(directory: Path) -> Cache:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _distrust(directory)
        if not reason:
            directory.chmod(0o700)
            reason = "" if os.access(directory, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        reason = str(error)
    return Cache(_instead_of(directory, reason), temporary=True) if reason else Cache(directory)


def _instead_of(directory: Path, reason: str) -> Path:
    warnings.warn(
        f"fusec keeps its kernels in a temporary directory, as {directory} cannot be used: {reason}", stacklevel=2
    )
    return _temporary()


def _distrust(directory: Path) -> str:
    """Why code from this directory must not be run; empty where it may."""
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write to it"
    return ""


def _temporary() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="fusec-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child must not take its parent's kernels away.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def _is_whole(key: str, entry: bytes) -> bool:
    return entry[-_TRAILER:] == _trailer(key, entry[:-_TRAILER])


def _trailer(key: str, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + content).digest()
