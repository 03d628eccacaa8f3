"""What may become of an entry in a cache: damage, forgery, and things that are no files."""

import os
import random
import shutil
import socket
import tempfile
from pathlib import Path

from fusec.cache import Cache

NOBODY = 65534
"""A user who is not this one."""


def cut(path: Path, rng: random.Random) -> None:
    """Cut it short."""
    path.write_bytes((content := path.read_bytes())[: rng.randrange(len(content))])


def flip(path: Path, rng: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def empty(path: Path, rng: random.Random) -> None:
    """Leave nothing in it."""
    path.write_bytes(b"")


def exchange(path: Path, rng: random.Random) -> None:
    """Let it change places with the next one of its kind: each is whole, and stale once all have."""
    later = sorted(other for other in path.parent.glob(f"*{path.suffix}") if other > path)
    if later:
        path.rename(path.with_name("aside"))
        later[0].rename(path)
        path.with_name("aside").rename(later[0])


def forge(path: Path, rng: random.Random) -> None:
    """The digest is right, the content is nothing that loads, or reads."""
    Cache(path.parent).publish(path.stem, path.suffix, rng.randbytes(5000))


def fifo(path: Path, rng: random.Random) -> None:
    """Put a FIFO in its place."""
    path.unlink()
    os.mkfifo(path)


def socket_file(path: Path, rng: random.Random) -> None:
    """Put a socket in its place."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as one, tempfile.TemporaryDirectory() as short:
        one.bind(f"{short}/s")  # a longer name is no address
        shutil.move(f"{short}/s", path)


def folder(path: Path, rng: random.Random) -> None:
    """Put a folder in its place, with something in it."""
    path.unlink()
    (path / "more").mkdir(parents=True)


def link(path: Path, rng: random.Random) -> None:
    """Put a link to itself in its place."""
    path.unlink()
    path.symlink_to(path.name)


def let_others_write(path: Path, rng: random.Random) -> None:
    """Let other users write to it."""
    path.chmod(0o666)


def give_away(path: Path, rng: random.Random) -> None:
    """Let it belong to another user."""
    os.chown(path, NOBODY, NOBODY)


def lock_fifo(path: Path, rng: random.Random) -> None:
    """Put a FIFO in the place of its lock, and remove it."""
    path.unlink()
    lock = path.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    os.mkfifo(lock)
