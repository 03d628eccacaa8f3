"""Data that torch is needed for, kept in the cache, as torch is slow to import."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fusec.config import Config

_SUFFIX = ".listing"


def kept_data(parts: Sequence[str], config: Config, make: Callable[[], Any]) -> Any:
    """Return JSON data that follows from these parts, Python and fusec's own code, which is made unless it is kept."""
    from fusec.cache import key_of, open_cache
    from fusec.provenance import own_code

    cache, code = open_cache(config), own_code()
    key = key_of(["listing", code, sys.version, *parts])
    if code and (kept := cache.read(key, _SUFFIX)) is not None:
        return json.loads(kept)
    made = make()
    if code:
        cache.offer(key, _SUFFIX, json.dumps(made).encode(), f"the listing of {parts[0]}")
    return made
