"""The digest of the running code, which is part of the keys of everything derived from it."""

import functools
import sys
import time
from pathlib import Path

_LOADED = time.time()  # fusec/__init__ imports this module before any other of fusec's


def key_of_derived(kind: str, *sources: str) -> str:
    """Return the cache key of a result of this code, Python and torch; empty if it must not be cached."""
    import torch

    from fusec.cache import key_of

    code = own_code()
    return key_of([kind, code, sys.version, torch.__version__, *sources]) if code else ""


@functools.cache
def own_code() -> str:
    """A digest of fusec's sources; empty where they are missing, or may have changed since they were loaded."""
    return digest_of(Path(__file__).parent, _LOADED)


def digest_of(folder: Path, loaded: float) -> str:
    """Return a digest of the Python files in and below a folder; empty if there are none, or one is newer than a time.

    Args:
        folder: links in it are followed.
        loaded: seconds since the epoch; the time of the last change of content or name counts, which
            cannot be set back.
    """
    import hashlib
    import os

    digest, found = hashlib.sha256(), False
    for path, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(file for file in files if file.endswith(".py")):
            file = Path(path, name)
            if file.stat().st_ctime >= loaded:
                return ""
            content, found = file.read_bytes(), True
            digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest() if found else ""
