"""Loading shared libraries from memory: the bytes that were checked are loaded, even if the cache is mounted noexec."""

import ctypes
import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusec.errors import BuildError
from fusec.scratch import scratch_folder

ENTRY = "fusec_kernel"
"""The name of the function in all libraries, so that kernels that differ in name alone share one."""
_counter = itertools.count(1)


def load(content: bytes) -> Any:
    """Load a library from a private copy, in memory or else in a file, and return its function.

    With a copy the cache may be mounted ``noexec``, and later writes to its files have no effect.

    Raises:
        BuildError: if it does not load, or does not have the function.
    """
    _check_complete(content)
    # Load torch first: the kernel binds to its OpenMP runtime.
    import torch  # noqa: F401

    reasons = []
    for copy in (_in_memory, _in_file):
        try:
            with copy(content) as path:
                function = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)[ENTRY]
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
            continue
        function.restype = ctypes.c_int64
        return function
    raise BuildError("a built kernel does not load", why="; ".join(reasons))


def _check_complete(content: bytes) -> None:
    """Reject a truncated file: the linker would map it, and the process crash on access beyond its end."""
    header = struct.Struct(
        "<6s34xQ10xHH"
    )  # magic, class and byte order; offset, entry size and count of the section table, which is last
    magic, table, size, number = header.unpack_from(content.ljust(header.size, b"\0"))
    if magic == b"\x7fELF\x02\x01" and table + size * number > len(content):
        raise BuildError("a built kernel does not load", why="its file is cut short")


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of an anonymous file."""
    with os.fdopen(os.memfd_create("fusec-kernel", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        if file.write(content) != len(content):
            raise OSError("no memory for a copy of it")
        # The linker identifies libraries by path, and file descriptors are reused: write each path differently.
        spelling = "".join("./" if bit == "1" else "/" for bit in f"{next(_counter):b}")
        yield f"/proc/self/fd/{spelling}{file.fileno()}"


@contextmanager
def _in_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file that only this user can access."""
    with scratch_folder() as folder:
        (folder / "kernel.so").write_bytes(content)
        yield str(folder / "kernel.so")
