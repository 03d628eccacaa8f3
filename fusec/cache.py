"""A directory of built files for the next process: private, checked when read, published atomically."""

import errno
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fusec.config import Config
from fusec.ownership import distrust, make_private, open_own
from fusec.pruning import LOCK, prune
from fusec.scratch import lasting_folder, scratch_folder

logger = logging.getLogger(__name__)

ABI = 2
"""Raised whenever the format of a cache entry changes; part of every key."""
_MAGIC = b"fusec\x00v2"
_TRAILER = len(_MAGIC) + hashlib.sha256().digest_size
_MOST_BYTES = 1 << 30
"""No published entry is longer."""
_LOCK_SECONDS = 120.0
_HOUR = 3600.0


def key_of(parts: Sequence[str]) -> str:
    """The name of an entry: a digest of all that decides its content."""
    digest = hashlib.sha256()
    for part in (f"abi {ABI}", *parts):
        data = part.encode(errors="surrogateescape")  # environment variables need not be UTF-8
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class Cache:
    """Files by key. Each ends in a digest of its name and content, so that a damaged one is noticed and rebuilt."""

    def __init__(self, directory: Path, temporary: bool = False, most_bytes: int = 0) -> None:
        self.directory, self.temporary, self.most_bytes = directory, temporary, most_bytes
        self._room = 0
        """Bytes that may be published before the cache is pruned again."""
        self._lock = threading.Lock()

    def path(self, key: str, suffix: str) -> Path:
        """Return the path of an entry, whether it exists or not."""
        return self.directory / f"{key}{suffix}"

    def read(self, key: str, suffix: str) -> bytes | None:
        """Return the content of an entry; None where there is none, it is damaged, or others may have written it."""
        entry = self.entry(key, suffix)
        return None if entry is None else entry[:-_TRAILER]

    def entry(self, key: str, suffix: str) -> bytes | None:
        """Return an entry with its digest, as `admit` expects it."""
        path = self.path(key, suffix)
        try:
            entry = read_entry(path)
        except FileNotFoundError:
            return None
        except OSError as reason:
            logger.warning("a cache entry is unusable and will be rebuilt: %s", reason)
            return None
        with suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > _HOUR:  # or the clock has gone backwards since
                os.utime(path)  # it is used: others are pruned before it
        return entry

    def admit(self, key: str, suffix: str, entry: bytes) -> bool:
        """Store an entry of another cache if its digest is right; return whether it is.

        Raises:
            OSError: as `publish` does.
        """
        if not _is_whole(key + suffix, entry):
            return False
        self.publish(key, suffix, entry[:-_TRAILER])
        return True

    def offer(self, key: str, suffix: str, content: bytes, what: str) -> None:
        """Store an entry that only saves time; where that fails, warn and continue."""
        try:
            self.publish(key, suffix, content)
        except OSError as reason:
            logger.warning("cannot store %s for later processes: %s", what, reason)

    def publish(self, key: str, suffix: str, content: bytes) -> Path:
        """Store an entry; readers see all of it or nothing. If the disk is full a temporary directory takes over.

        Raises:
            OSError: where the temporary directory is full too.
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
        path = self.path(key, suffix)
        with scratch_folder(self.directory) as folder:
            with open(folder / "new", "xb") as file:
                os.fchmod(file.fileno(), 0o600)  # whatever the umask
                file.write(content + _trailer(path.name, content))
                file.flush()
                os.fsync(file.fileno())
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            os.replace(folder / "new", path)
        self._room -= len(content)
        if self.most_bytes and self._room < 0:
            self._room = self.most_bytes // 16
            prune(self.directory, self.most_bytes)
        return path

    @contextmanager
    def building(self, key: str) -> Iterator[None]:
        """Hold the lock of an entry, so that processes build it once; after a long wait it is built twice instead."""
        lock = FileLock(self.path(key, LOCK), timeout=_LOCK_SECONDS, mode=0o600)
        with suppress(Timeout, OSError):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def read_entry(path: Path) -> bytes:
    """Return an entry with its digest.

    Raises:
        OSError: where there is none, it is damaged, or others may have written it.
    """
    with open_own(path) as file:
        raw = file.read() if os.fstat(file.fileno()).st_size <= _MOST_BYTES else b""
        if not _is_whole(path.name, raw):
            raise OSError(errno.EBADMSG, "it is damaged: its digest is not that of its content", str(path))
        return raw


_opened: dict[str, Cache] = {}


def open_cache(config: Config) -> Cache:
    """The cache that the configuration names, or one for this process where that may not be used."""
    name = _name_of(config.cache_path()) if config.cache else ""
    if name not in _opened or reason_against(_opened[name].directory):
        _opened[name] = _open(Path(name)) if name else Cache(lasting_folder(), temporary=True)
    cache = _opened[name]
    cache.most_bytes = config.cache_mb * 1_000_000
    return cache


def _name_of(directory: Path) -> str:
    try:
        return str(directory.absolute())
    except FileNotFoundError:  # it is relative to a working directory that was removed
        return str(directory)


def _open(directory: Path) -> Cache:
    try:
        make_private(directory)
        reason = reason_against(directory)
    except OSError as error:
        reason = str(error)
    return Cache(_instead_of(directory, reason), temporary=True) if reason else Cache(directory)


def reason_against(directory: Path) -> str:
    """Return why a directory cannot be used; empty where it can."""
    try:
        status = directory.lstat()
    except OSError as error:
        return str(error)
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    return distrust(status) or ("" if os.access(directory, os.W_OK | os.X_OK) else "it is not writable")


def _instead_of(directory: Path, reason: str) -> Path:
    warnings.warn(f"fusec stores kernels in a temporary directory, as {directory} is unusable: {reason}", stacklevel=2)
    return lasting_folder()


def _is_whole(name: str, entry: bytes) -> bool:
    return entry[-_TRAILER:] == _trailer(name, entry[:-_TRAILER])


def _trailer(name: str, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(name.encode() + content).digest()
